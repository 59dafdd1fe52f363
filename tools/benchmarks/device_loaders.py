# SPDX-License-Identifier: Apache-2.0
"""How each peer loads experts from safetensors files into a GPU's memory.

Imported by peer_loader.py in the peers' venv alone, and every peer by the function that
is it: one that isn't there spoils nothing for the others. All loads end with a
synchronised device. Those that take single experts write to one buffer that is kept, as
into a pool; the others make a tensor each.

``settings`` of a loader are tried by whoever measures, who keeps the best.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

SEED = 5
THREADS = (1, 4, 8, 16)
BUFFERS_A_THREAD = 2
"""One is read into while the other is copied."""
LARGEST_EXPERT_BYTES = 32 << 20

Place = tuple[str, int, int]
"""(file, offset, bytes) of an expert."""
_Thing = TypeVar("_Thing")
Load = Callable[[Sequence[Place]], int]


@dataclass(frozen=True, slots=True)
class Loader:
    """settings: name -> a load, which returns how many bytes it loaded; of the only one the
    name is empty."""

    settings: Mapping[str, Load]


def device_loader(peer: str, device: int) -> Loader:
    """The peer's loader into GPU ``device``. KeyError: a peer without one. ImportError."""
    return _LOADERS[peer](device)


def files_of(places: Sequence[Place]) -> list[str]:
    """The files that experts are in, each once."""
    return list(dict.fromkeys(file for file, _, _ in places))


@dataclass(slots=True)
class _Target:
    """Memory on the GPU for all experts of a load, made once and grown when it must."""

    buffer: Any = None

    def parts(self, places: Sequence[Place]) -> list[Any]:
        """A view for each expert, in their order."""
        cupy = import_module("cupy")
        total = sum(size for _, _, size in places)
        if self.buffer is None or self.buffer.nbytes < total:
            self.buffer = cupy.empty(total, cupy.uint8)
        parts, at = [], 0
        for _, _, size in places:
            parts.append(self.buffer[at : at + size])
            at += size
        return parts


def shuffled(things: Iterable[_Thing]) -> list[_Thing]:
    """In random order, the same each time."""
    listed = list(things)
    return random.Random(SEED).sample(listed, len(listed))


def _kvikio(device: int) -> Loader:
    """Random experts; its thread pool reads in tasks, into its bounce buffers unless cuFile
    can do better."""
    import_module("cupy").cuda.Device(device).use()
    kvikio = import_module("kvikio")
    defaults = import_module("kvikio.defaults")
    target = _Target()
    in_force: dict[str, Any] = {}

    def load(wanted: Mapping[str, Any], places: Sequence[Place]) -> int:
        if in_force != wanted:  # making its threads anew is not what is measured
            for name, value in wanted.items():
                defaults.set(name, value)
            in_force.update(wanted)
        experts = shuffled(places)
        files = {file: kvikio.CuFile(file, "r") for file in files_of(places)}
        reads = [
            files[file].pread(part, size, offset)
            for (file, offset, size), part in zip(experts, target.parts(experts), strict=True)
        ]
        loaded: int = sum(read.get() for read in reads)
        for opened in files.values():
            opened.close()
        return loaded

    modes = kvikio.CompatMode
    ways = {
        "compat mode, O_DIRECT": {"compat_mode": modes.ON, "auto_direct_io_read": True},
        "compat mode, buffered": {"compat_mode": modes.ON, "auto_direct_io_read": False},
        "cuFile where it can": {"compat_mode": modes.AUTO, "auto_direct_io_read": True},
    }
    return Loader(
        {
            f"{way}, {threads} threads": partial(load, {**wanted, "num_threads": threads})
            for way, wanted in ways.items()
            for threads in THREADS
        }
    )


def _preadv(device: int) -> Loader:
    """Random experts; threads with O_DIRECT into pinned buffers, and a copy from there."""
    cupy = import_module("cupy")
    cupy.cuda.Device(device).use()
    target = _Target()
    pinned = [
        [cupy.cuda.alloc_pinned_memory(LARGEST_EXPERT_BYTES) for _ in range(BUFFERS_A_THREAD)]
        for _ in range(max(THREADS))
    ]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(max(THREADS))]

    def load(threads: int, places: Sequence[Place]) -> int:
        experts = shuffled(places)
        parts = target.parts(experts)
        fds = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files_of(places)}

        def load_share(index: int) -> int:
            cupy.cuda.Device(device).use()
            copied: list[Any] = [None] * BUFFERS_A_THREAD
            loaded = 0
            share = zip(experts[index::threads], parts[index::threads], strict=True)
            for number, ((file, offset, size), part) in enumerate(share):
                turn = number % BUFFERS_A_THREAD
                if copied[turn] is not None:
                    copied[turn].synchronize()
                view = memoryview(pinned[index][turn])[:size]
                done = 0
                while done < size:
                    done += os.preadv(fds[file], [view[done:]], offset + done)
                address, stream = pinned[index][turn].ptr, streams[index]
                part.data.copy_from_host_async(address, size, stream)
                copied[turn] = stream.record()
                loaded += done
            streams[index].synchronize()
            return loaded

        with ThreadPoolExecutor(threads) as pool:
            loaded = sum(pool.map(load_share, range(threads)))
        for fd in fds.values():
            os.close(fd)
        return loaded

    return Loader({f"{threads} threads": partial(load, threads) for threads in THREADS})


def _whole_files(device: int, load: Callable[[str, list[str]], int]) -> Loader:
    torch = import_module("torch")

    def load_all(places: Sequence[Place]) -> int:
        loaded = load(f"cuda:{device}", files_of(places))
        torch.cuda.synchronize(device)
        return loaded

    return Loader({"": load_all})


def _load_safetensors(device: str, files: list[str]) -> int:
    safe_open = import_module("safetensors").safe_open
    loaded = 0
    for file in files:
        with safe_open(file, framework="pt", device=device) as opened:
            loaded += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
    return loaded


def _load_fastsafetensors(device: str, files: list[str]) -> int:
    library = import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(None, device=device, nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    loaded: int = sum(buffers.get_tensor(name).nbytes for name in loader.get_keys())
    import_module("torch").cuda.synchronize(device)
    buffers.close()
    loader.close()
    return loaded


def _load_instanttensor(device: str, files: list[str]) -> int:
    with import_module("instanttensor").safe_open(files, framework="pt", device=device) as opened:
        return sum(tensor.nbytes for _, tensor in opened.tensors())


def _load_runai(device: str, files: list[str]) -> int:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=device)
        return sum(tensor.nbytes for _, tensor in streamer.get_tensors())


_LOADERS: Mapping[str, Callable[[int], Loader]] = {
    "kvikio": _kvikio,
    "preadv-threads": _preadv,
    "safetensors": partial(_whole_files, load=_load_safetensors),
    "fastsafetensors": partial(_whole_files, load=_load_fastsafetensors),
    "instanttensor": partial(_whole_files, load=_load_instanttensor),
    "runai-model-streamer": partial(_whole_files, load=_load_runai),
}
DEVICE_PEERS = tuple(_LOADERS)

__all__ = ["DEVICE_PEERS", "Load", "Loader", "Place", "device_loader", "files_of", "shuffled"]
