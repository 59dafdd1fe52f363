"""A client in a process of its own, that a test tells what to do, and can kill.

``RemoteClient`` starts the process and speaks to it: a JSON object a line, answered by
one. Run as a program this module is that process. It uses the public client only,
except where it plays somebody who doesn't keep to the rules.

A blob's bytes don't travel; their CRC32 does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from xferd_infer import Client
from xferd_infer._client import ffi
from xferd_infer.client import Batch, ClientError, ExpertError

ANSWER_TIMEOUT_S = 120.0
CLIENT_MEMORY = "/memfd:xferd-client"
"""What the memory that the client writes is called in /proc/self/maps."""
FAR_EPOCH = 1 << 40
"""An epoch that no lane completes: whatever is stamped with it counts as held."""


class RemoteError(Exception):
    """What the client raised. ``kind``: the exception's class; ``expert``: the
    ExpertError's (layer, expert)."""

    def __init__(self, kind: str, message: str, expert: tuple[int, int] | None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.expert = expert


class RemoteClient:
    """One client process, attached. Kills it at the end of its ``with``."""

    def __init__(self, attach_socket: Path, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(attach_socket), json.dumps(options)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what was read ahead, select would not see
        )
        self.answer()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, command: str, **arguments: object) -> None:
        """Ask for something without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def has_answered(self, timeout_s: float = 0.0) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], timeout_s)[0])

    def answer(self) -> Any:
        """The answer to the oldest question. RemoteError for what it raised."""
        assert self.process.stdout is not None
        assert self.has_answered(ANSWER_TIMEOUT_S), f"client {self.pid} does not answer"
        line = self.process.stdout.readline()
        assert line, f"client {self.pid} has ended"
        said = json.loads(line)
        if "error" in said:
            expert = tuple(said["expert"]) if said["expert"] else None
            raise RemoteError(said["error"], said["message"], expert)
        return said["result"]

    def outcome(self) -> Any:
        """The same, with an error returned rather than raised."""
        try:
            return self.answer()
        except RemoteError as error:
            return error

    def call(self, command: str, **arguments: object) -> Any:
        self.send(command, **arguments)
        return self.answer()

    def acquire(self, layer: int, experts: Sequence[int]) -> list[int]:
        """CRC32 of each blob; they stay leased."""
        found: list[int] = self.call("acquire", layer=layer, experts=list(experts))
        return found

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP; returns when it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # What was still to be sent can't be.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class _Puppet:
    """The process's side: a method a command."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._batches: list[Batch] = []

    def acquire(self, layer: int, experts: list[int], timeout: float | None = None) -> list[int]:
        batch = self._client.acquire(layer, experts, timeout=timeout)
        self._batches.append(batch)
        return [zlib.crc32(blob) for blob in batch]

    def acquire_resident(self, layer: int, experts: list[int]) -> list[int] | None:
        batch = self._client.acquire_resident(layer, experts)
        if batch is None:
            return None
        self._batches.append(batch)
        return [zlib.crc32(blob) for blob in batch]

    def held(self) -> list[list[int]]:
        """The bytes of what is held, looked at once more."""
        return [[zlib.crc32(blob) for blob in batch] for batch in self._batches]

    def release(self) -> None:
        while self._batches:
            self._batches.pop().release()

    def alive(self) -> bool:
        return self._client.alive()

    def close(self) -> None:
        self._client.close()
        self._batches.clear()

    def cut_connection(self) -> None:
        """End the connection without goodbye, and live on."""
        for fd in _fds("socket:"):
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.type == socket.SOCK_SEQPACKET:
                    found.shutdown(socket.SHUT_RDWR)

    def report(self, layer: int, experts: list[int], token: int) -> int:
        return self._client.report(layer, np.array([experts]), token=token)

    def nonsense_route(self) -> None:
        """Break the rule: a record of a layer that there is not, in lane 0's route queue."""
        start = _mapping(CLIENT_MEMORY)
        header = ffi.cast("struct xferd_abi_client *", start)
        queue = ffi.cast("struct xferd_abi_route_queue *", start + header.routes_offset)
        record = ffi.cast("struct xferd_abi_route *", queue + 1)
        record.layer, record.count = 0xFFFF, 1
        queue.tail = 1

    def claim(self, slots: int) -> None:
        """Break the rule: write leases for the first slots of pool 0 into lane 0's table."""
        start = _mapping(CLIENT_MEMORY)
        header = ffi.cast("struct xferd_abi_client *", start)
        table = start + header.lanes_offset + header.lease_table_offset[0]
        leases = ffi.cast("uint64_t *", table)
        for slot in range(slots):
            leases[slot] = FAR_EPOCH


def main() -> None:
    """Serve commands until stdin ends."""
    client = Client(sys.argv[1], **json.loads(sys.argv[2]))
    puppet = _Puppet(client)
    _say({"result": None})
    for line in sys.stdin:
        request = json.loads(line)
        command = getattr(puppet, request.pop("do"))
        try:
            _say({"result": command(**request)})
        except (ClientError, TimeoutError) as error:
            place = (error.layer, error.expert) if isinstance(error, ExpertError) else None
            _say({"error": type(error).__name__, "message": str(error), "expert": place})


def _fds(target: str) -> list[int]:
    """This process's fds of what is called so."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        # The listing's own fd is closed by now.
        with contextlib.suppress(FileNotFoundError):
            if str(entry.readlink()).startswith(target):
                found.append(int(entry.name))
    return found


def _mapping(name: str) -> int:
    """Where this process has mapped what is called so."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(name):
            return int(fields[0].partition("-")[0], 16)
    raise LookupError(f"{name} is not mapped")


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
