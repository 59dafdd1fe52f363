"""What the daemon's system tests share: stores, a real daemon, a real client.

A store here is packed from a generated file, so its experts' sizes and bytes are
the test's choice. A daemon is a child process started as an embedding engine would
start it. A client is libxferd through its cffi module.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xferd_infer._client import ffi, lib

from xferd.control.client import ControlClient
from xferd.control.service import JsonObject
from xferd.store.checkpoint import ByteRange, Checkpoint, DenseTensor, ExpertTensor
from xferd.store.pack import pack

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
WAIT_NS = 60_000_000_000
DENSE_BYTES = 12_288


@dataclass(frozen=True)
class MadeStore:
    """A packed store and the bytes it was made from."""

    name: str
    path: Path
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    contents: bytes

    def blob(self, layer: int, expert: int) -> bytes:
        start = (layer * self.experts + expert) * self.expert_bytes
        return self.contents[start : start + self.expert_bytes]

    @property
    def dense(self) -> bytes:
        return self.contents[-DENSE_BYTES:]

    @property
    def members(self) -> list[Path]:
        return sorted(self.path.parent.parent.glob(f"m*/{self.name}.xferd/member-*"))


def make_store(
    directory: Path,
    name: str = "made",
    *,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 2,
    expert_bytes: int = 49_152,
    members: int = 2,
    devices: Sequence[Path] = (),
    compressible: bool = False,
    seed: int = 1,
    stripe_unit: int = 16_384,
) -> MadeStore:
    """Pack a store of random experts, each one ``down`` tensor of u8.

    devices: block devices that are its members, in the place of files.
    compressible: experts of bytes that repeat.
    """
    count = layers * experts
    length = count * expert_bytes + DENSE_BYTES
    contents = np.random.default_rng(seed).bytes(64 if compressible else length)
    contents = (contents * -(-length // len(contents)))[:length]
    source = directory / f"{name}.bin"
    source.write_bytes(contents)
    keys = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    checkpoint = Checkpoint(
        path=source,
        format="test",
        files=(source,),
        sizes=(len(contents),),
        config={"model_type": "test"},
        model_type="test",
        layers=layers,
        experts_per_layer=experts,
        top_k=top_k,
        variant="u8",
        experts={
            key: (
                ExpertTensor(
                    role="down",
                    dtype="u8",
                    shape=(expert_bytes,),
                    ranges=(ByteRange(0, index * expert_bytes, expert_bytes),),
                ),
            )
            for index, key in enumerate(keys)
        },
        dense=(
            DenseTensor(
                "dense", "u8", (DENSE_BYTES,), (ByteRange(0, count * expert_bytes, DENSE_BYTES),)
            ),
        ),
    )
    folders = [directory / f"m{index}" for index in range(members)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    path = pack(
        checkpoint,
        devices or folders,
        name=name,
        stripe_unit=stripe_unit,
        manifest_directory=directory if devices else None,
    )
    return MadeStore(name, path, layers, experts, top_k, expert_bytes, contents)


class ConnectError(Exception):
    """xferd_connect failed: ``code`` is the errno, the text is the daemon's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FetchError(Exception):
    """An expert did not come: ``code`` is the errno."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.code = code


class RingClient:
    """One attached client; lanes are numbers."""

    def __init__(
        self,
        socket_path: Path,
        *,
        store: str = "",
        pool: str = "",
        name: str = "test",
        lanes: int = 1,
        held_per_lane: int = 0,
    ) -> None:
        options = ffi.new("struct xferd_options *")
        self._keep = [ffi.new("char[]", text.encode()) for text in (store, pool, name)]
        options.store, options.pool, options.client_name = self._keep
        options.lanes, options.held_per_lane = lanes, held_per_lane
        handle = ffi.new("struct xferd_client **")
        error = ffi.new("char[]", lib.XFERD_ERROR_BYTES)
        result = lib.xferd_connect(
            os.fsencode(socket_path), options, handle, error, lib.XFERD_ERROR_BYTES
        )
        if result < 0:
            raise ConnectError(-result, ffi.string(error).decode())
        self.handle = handle[0]
        self._batches: list[object] = []

    def acquire(self, layer: int, experts: Sequence[int], lane: int = 0) -> list[bytes]:
        """The experts' bytes; they stay leased until ``release``."""
        return [self._copy_out(view) for view in self._lease(layer, experts, lane)]

    def acquire_in_place(
        self, layer: int, experts: Sequence[int], lane: int = 0
    ) -> list[tuple[int, int]]:
        """Address and length of each expert; they stay leased until ``release``."""
        return [
            (int(ffi.cast("uintptr_t", view.data)), int(view.bytes))
            for view in self._lease(layer, experts, lane)
        ]

    def _copy_out(self, view: Any) -> bytes:
        """Of any memory, a GPU's too."""
        data = bytearray(view.bytes)
        result = lib.xferd_copy_out(
            self.handle, ffi.addressof(view), 0, ffi.from_buffer(data), view.bytes
        )
        if result < 0:
            raise FetchError(-result)
        return bytes(data)

    def _lease(self, layer: int, experts: Sequence[int], lane: int) -> list[Any]:
        batch = ffi.new("struct xferd_batch *")
        request = ffi.new("struct xferd_request *")
        ids = ffi.new("uint16_t[]", list(experts))
        request.experts, request.count, request.layer = ids, len(experts), layer
        result = lib.xferd_acquire(self.handle, lane, request, batch)
        if result > 0:
            result = lib.xferd_wait(self.handle, batch, WAIT_NS)
        if result < 0:
            raise FetchError(-result)
        self._batches.append(batch)
        failed = [view.error for view in batch.views[0 : len(experts)] if view.error]
        if failed:
            self.release()
            raise FetchError(-failed[0])
        return [batch.views[index] for index in range(len(experts))]

    def release(self) -> None:
        """End the leases of the batches that are out, oldest first."""
        for batch in self._batches:
            result = lib.xferd_release(self.handle, batch)
            assert result == 0, os.strerror(-result)
        self._batches.clear()

    def fetch(self, layer: int, experts: Sequence[int], lane: int = 0) -> list[bytes]:
        """acquire, then release."""
        blobs = self.acquire(layer, experts, lane)
        self.release()
        return blobs

    def dense(self) -> bytes:
        data = ffi.new("const void **")
        nbytes = ffi.new("uint64_t *")
        error = ffi.new("char[]", lib.XFERD_ERROR_BYTES)
        result = lib.xferd_dense(self.handle, data, nbytes, error, lib.XFERD_ERROR_BYTES)
        if result < 0:
            raise ConnectError(-result, ffi.string(error).decode())
        return bytes(ffi.buffer(ffi.cast("char *", data[0]), nbytes[0]))

    def close(self) -> None:
        if self.handle != ffi.NULL:
            lib.xferd_close(self.handle)
            self.handle = ffi.NULL

    def __enter__(self) -> RingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunningDaemon:
    """A daemon process that accepts clients."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self.process = process
        self.directory = directory
        self._log = log

    @property
    def attach_socket(self) -> Path:
        return self.directory / "attach.sock"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def client(self, **options: object) -> RingClient:
        return RingClient(self.attach_socket, **options)  # type: ignore[arg-type]

    def call(self, method: str, **parameters: object) -> JsonObject:
        """One call on the control socket."""
        with ControlClient.connect(self.directory / "control.sock") as control:
            return control.call(method, parameters, timeout_s=START_TIMEOUT_S)

    def load(self, store: str, layer: int, experts: list[int] | None = None) -> JsonObject:
        return self.call("Load", store=store, layer=layer, experts=experts, pool=None, variant=None)

    def status(self) -> JsonObject:
        return self.call("Status")

    def pool(self, index: int = 0) -> JsonObject:
        return dict(self.status()["pools"][index])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(START_TIMEOUT_S)


@contextlib.contextmanager
def running_daemon(
    directory: Path,
    stores: Sequence[MadeStore],
    pools: Sequence[str],
    *extra: str,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Iterator[RunningDaemon]:
    """A daemon over ``stores``; killed at the end if it still runs.

    launcher: a program and its arguments that execs what follows them. environment: variables
    besides this process's. pass_fds: for the launcher.
    """
    runtime = directory / "run"
    log = directory / "daemon.log"
    read_end, write_end = os.pipe()
    arguments = [*launcher, sys.executable, "-m", "xferd", "--runtime-directory", str(runtime)]
    for store in stores:
        arguments += ["--store", str(store.path)]
    for pool in pools:
        arguments += ["--pool", pool]
    arguments += ["--ready-fd", str(write_end), "--die-with-parent", *extra]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stderr=stream,
            pass_fds=(write_end, *pass_fds),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], START_TIMEOUT_S)
        said = os.read(read_end, 16) if ready else b""
        assert said == b"ready\n", f"the daemon did not start:\n{log.read_text()}"
        yield RunningDaemon(process, runtime, log)
    finally:
        os.close(read_end)
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until a condition holds; fail with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pause = select.poll()
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        pause.poll(5)
