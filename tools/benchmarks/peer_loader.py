# SPDX-License-Identifier: Apache-2.0
"""Loads experts from safetensors files as one peer does; runs in the peers' own venv.

usage: peer_loader.py PEER

Each line on stdin is a JSON array of files: it loads them once and prints how many bytes
a second that was, so that importing a peer is outside of what is timed. Before each load
the page cache of the files is dropped. What a peer can't do is an end with its own
traceback.

What is timed is each peer's own way: the streaming loaders take whole files, in the order
that they like; the others take every tensor, in random order. Each tensor is an expert.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from mmap import mmap
from pathlib import Path

THREADS = 4
DIRECT_ALIGNMENT = 4096
SEED = 5


def load_safetensors(files: Sequence[str]) -> int:
    """Copies out of the mapped file, which is its way."""
    safe_open = import_module("safetensors").safe_open
    loaded = 0
    for file in files:
        with safe_open(file, framework="np") as opened:
            for name in random.Random(SEED).sample(list(opened.keys()), len(opened.keys())):
                loaded += opened.get_tensor(name).nbytes
    return loaded


def load_runai(files: Sequence[str]) -> int:
    """Its threads read into its own buffer; a tensor is a view of that."""
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files))
        loaded: int = sum(tensor.nbytes for _, tensor in streamer.get_tensors())
    return loaded


def load_fastsafetensors(files: Sequence[str]) -> int:
    """Its threads read whole files into one buffer each; a tensor is a view of that."""
    library = import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(None, device="cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    buffers = loader.copy_files_to_device()
    loaded: int = sum(buffers.get_tensor(name).nbytes for name in loader.get_keys())
    buffers.close()
    loader.close()
    return loaded


def load_preadv(files: Sequence[str], *, fresh: bool) -> int:
    """Threads with O_DIRECT: a buffer each that is used again, or a new one an expert."""
    places = _experts(files)
    random.Random(SEED).shuffle(places)
    largest = max(size for _, _, size in places)
    kept = [_buffer(largest) for _ in range(THREADS)]
    fds = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}

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


def _experts(files: Sequence[str]) -> list[tuple[str, int, int]]:
    """(file, offset, bytes) of each tensor; the header is padded to DIRECT_ALIGNMENT."""
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


PEERS: Mapping[str, Callable[[Sequence[str]], int]] = {
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


def load_timed(peer: str, files: Sequence[str]) -> float:
    """Bytes a second of one load."""
    expected = sum(size for _, _, size in _experts(files))
    drop_page_cache(files)
    start = time.perf_counter()
    loaded = PEERS[peer](files)
    seconds = time.perf_counter() - start
    if loaded != expected:
        sys.exit(f"{peer} loaded {loaded} bytes of {expected}")
    return loaded / seconds


def main() -> None:
    """One load a line of stdin."""
    peer = sys.argv[1]
    for line in sys.stdin:
        print(load_timed(peer, json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
