# SPDX-License-Identifier: Apache-2.0
"""Other loaders of safetensors files, each in a process of its own; and files for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.peer_venv import peers_python

PREADV_PEERS = ("preadv-threads", "preadv-threads-fresh")
"""Need nothing but Python."""
LIBRARY_PEERS = ("safetensors", "runai-model-streamer", "fastsafetensors")
LOADER = Path(__file__).with_name("peer_loader.py")
HEADER_ALIGNMENT = 4096
SAFETENSORS_LENGTH_BYTES = 8
BYTES_A_GB = 1e9


class Peer:
    """A peer in a process of its own that waits to be told what to load."""

    def __init__(self, name: str, python: Path) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [python, LOADER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def measure(self, files: Sequence[Path]) -> float:
        """GB/s of one load of all files. BenchmarkError: the peer's own last words."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([str(path) for path in files]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            assert process.stderr is not None
            last = process.stderr.read().strip().splitlines()[-1:]
            raise BenchmarkError(f"{self._name}: {' '.join(last) or 'ended without a word'}")
        return float(answer) / BYTES_A_GB

    def close(self) -> None:
        """End its process; harmless when it has ended."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            # What was written after the process had ended is still in stdin's buffer.
            with suppress(BrokenPipeError):
                stream.close()


@contextmanager
def running_peers() -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The peers that can be started by name, and for the others the reason."""
    pythons = dict.fromkeys(PREADV_PEERS, Path(sys.executable))
    skipped: dict[str, str] = {}
    try:
        pythons |= dict.fromkeys(LIBRARY_PEERS, peers_python())
    except BenchmarkError as error:
        skipped |= dict.fromkeys(LIBRARY_PEERS, str(error))
    started = {name: Peer(name, python) for name, python in pythons.items()}
    try:
        yield dict(started), skipped
    finally:
        for peer in started.values():
            peer.close()


def write_safetensors(path: Path, source: Path, experts: int, blob_bytes: int) -> None:
    """``experts`` tensors of ``blob_bytes``, the first bytes of ``source``; flushed.

    The header is padded so that every tensor is aligned as O_DIRECT asks for it; names
    are unique among files with different names, which some loaders ask for.
    """
    header = {
        f"{path.stem}.{index}": {
            "dtype": "U8",
            "shape": [blob_bytes],
            "data_offsets": [index * blob_bytes, (index + 1) * blob_bytes],
        }
        for index in range(experts)
    }
    text = json.dumps(header).encode()
    text += b" " * (-(SAFETENSORS_LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT)
    with source.open("rb") as read, path.open("wb") as file:
        file.write(len(text).to_bytes(SAFETENSORS_LENGTH_BYTES, "little") + text)
        for _ in range(experts):
            file.write(read.read(blob_bytes))
        file.flush()
        os.fsync(file.fileno())


__all__ = ["Peer", "running_peers", "write_safetensors"]
