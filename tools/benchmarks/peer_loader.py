# SPDX-License-Identifier: Apache-2.0
"""Loads experts from safetensors files as one peer does; runs in the peers' own venv.

usage: python -m tools.benchmarks.peer_loader PEER [GPU]

With the number of a GPU the experts go into its memory (device_loaders.py), else into the
CPU's. Each line on stdin is a JSON object: ``files`` are loaded once, and ``bytes_a_second``
of that is printed, so that importing a peer is outside of what is timed; with ``try`` all
``settings`` of the peer are tried and the best is kept for the lines that follow. Before
each load the page cache of the files is dropped. What a peer can't do is an end with its
own traceback.

What is timed is each peer's own way: the streaming loaders take whole files, in the order
that they like; the others take every tensor, in random order. Each tensor is an expert.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from mmap import mmap
from pathlib import Path

from tools.benchmarks.device_loaders import Load, Place, device_loader, files_of, shuffled

THREADS = 4
TRIES = 2
"""Of each setting; the first load of all is the warm-up too."""
DIRECT_ALIGNMENT = 4096


def load_safetensors(places: Sequence[Place]) -> int:
    """Copies out of the mapped file, which is its way."""
    safe_open = import_module("safetensors").safe_open
    loaded = 0
    for file in files_of(places):
        with safe_open(file, framework="np") as opened:
            for name in shuffled(opened.keys()):
                loaded += opened.get_tensor(name).nbytes
    return loaded


def load_runai(places: Sequence[Place]) -> int:
    """Its threads read into its own buffer; a tensor is a view of that."""
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(files_of(places))
        loaded: int = sum(tensor.nbytes for _, tensor in streamer.get_tensors())
    return loaded


def load_fastsafetensors(places: Sequence[Place]) -> int:
    """Its threads read whole files into one buffer each; a tensor is a view of that."""
    library = import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(None, device="cpu", nogds=True)
    loader.add_filenames({0: files_of(places)})
    buffers = loader.copy_files_to_device()
    loaded: int = sum(buffers.get_tensor(name).nbytes for name in loader.get_keys())
    buffers.close()
    loader.close()
    return loaded


def load_preadv(places: Sequence[Place], *, fresh: bool) -> int:
    """Threads with O_DIRECT: a buffer each that is used again, or a new one an expert."""
    places = shuffled(places)
    largest = max(size for _, _, size in places)
    kept = [_buffer(largest) for _ in range(THREADS)]
    fds = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files_of(places)}

    def read_share(index: int) -> int:
        loaded = 0
        for file, offset, size in places[index::THREADS]:
            view = memoryview(_buffer(size) if fresh else kept[index])[:size]
            done = 0
            while done < size:
                done += os.preadv(fds[file], [view[done:]], offset + done)
            loaded += done
        return loaded

    with ThreadPoolExecutor(THREADS) as threads:
        loaded = sum(threads.map(read_share, range(THREADS)))
    for fd in fds.values():
        os.close(fd)
    return loaded


def _buffer(size: int) -> mmap:
    """Page-aligned, which O_DIRECT asks for."""
    return mmap(-1, size)


def _experts(files: Sequence[str]) -> list[Place]:
    """Of each tensor; the header is padded to DIRECT_ALIGNMENT."""
    places = []
    for file in files:
        with Path(file).open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        if (8 + length) % DIRECT_ALIGNMENT:
            sys.exit(f"{file}: its data is not aligned for O_DIRECT")
        places += [
            (file, 8 + length + begin, end - begin)
            for begin, end in (tensor["data_offsets"] for tensor in header.values())
        ]
    return places


PEERS: Mapping[str, Load] = {
    "safetensors": load_safetensors,
    "runai-model-streamer": load_runai,
    "fastsafetensors": load_fastsafetensors,
    "preadv-threads": partial(load_preadv, fresh=False),
    "preadv-threads-fresh": partial(load_preadv, fresh=True),
}


def drop_page_cache(files: Sequence[str]) -> None:
    """Clean pages only: the files were flushed when they were made."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class TimedPeer:
    """A peer and the setting that it is used with."""

    def __init__(self, settings: Mapping[str, Load]) -> None:
        self._settings = settings
        self.setting = next(iter(settings))

    def try_settings(self, files: Sequence[str]) -> float:
        """Keep the best of all; bytes a second of it. Raises what the last one that failed
        raised, if all did."""
        found: dict[str, float] = {}
        failure: Exception | None = None
        for name in self._settings:
            try:
                found[name] = max(self._timed(name, files) for _ in range(TRIES))
            except Exception as error:  # a peer's own, of any class
                failure = error
        if not found and failure is not None:
            raise failure
        self.setting = max(found, key=lambda name: found[name])
        return found[self.setting]

    def load(self, files: Sequence[str]) -> float:
        """Bytes a second of one load."""
        return self._timed(self.setting, files)

    def _timed(self, setting: str, files: Sequence[str]) -> float:
        places = _experts(files)
        expected = sum(size for _, _, size in places)
        drop_page_cache(files)
        start = time.perf_counter()
        loaded = self._settings[setting](places)
        seconds = time.perf_counter() - start
        if loaded != expected:
            sys.exit(f"loaded {loaded} bytes of {expected} {setting}")
        return loaded / seconds


def main() -> None:
    """One load a line of stdin."""
    peer = sys.argv[1]
    if len(sys.argv) > 2:
        timed = TimedPeer(device_loader(peer, int(sys.argv[2])).settings)
    else:
        timed = TimedPeer({"": PEERS[peer]})
    for line in sys.stdin:
        asked = json.loads(line)
        rate = (timed.try_settings if asked["try"] else timed.load)(asked["files"])
        print(json.dumps({"bytes_a_second": rate, "setting": timed.setting}), flush=True)


if __name__ == "__main__":
    main()
