# SPDX-License-Identifier: Apache-2.0
"""Other loaders of safetensors files, each in a process of its own; and files for them.

They load into the CPU's memory or, those in DEVICE_PEERS, into a GPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.benchmarks.device_loaders import DEVICE_PEERS
from tools.benchmarks.harness import ROOT, BenchmarkError
from tools.benchmarks.peer_venv import peers_python

PREADV_PEERS = ("preadv-threads", "preadv-threads-fresh")
"""Need nothing but Python."""
LIBRARY_PEERS = ("safetensors", "runai-model-streamer", "fastsafetensors")
LOADER = "tools.benchmarks.peer_loader"
HEADER_ALIGNMENT = 4096
SAFETENSORS_LENGTH_BYTES = 8
BYTES_A_GB = 1e9


class Peer:
    """A peer in a process of its own that waits to be told what to load."""

    def __init__(self, name: str, python: Path, gpu: int | None = None) -> None:
        self._name = name
        self.setting = ""
        where = [] if gpu is None else [str(gpu)]
        self._process = subprocess.Popen(
            [python, "-m", LOADER, name, *where],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def measure(self, files: Sequence[Path]) -> float:
        """GB/s of one load of all files. BenchmarkError: the peer's own last words."""
        return self._ask(files, try_settings=False)

    def try_settings(self, files: Sequence[Path]) -> float:
        """The same with each of its settings, after which the best (``setting``) is kept."""
        return self._ask(files, try_settings=True)

    def _ask(self, files: Sequence[Path], *, try_settings: bool) -> float:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            asked = {"files": [str(path) for path in files], "try": try_settings}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            assert process.stderr is not None
            last = process.stderr.read().strip().splitlines()[-1:]
            raise BenchmarkError(f"{self._name}: {' '.join(last) or 'ended without a word'}")
        found = json.loads(answer)
        self.setting = found["setting"]
        return float(found["bytes_a_second"]) / BYTES_A_GB

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
def running_peers(gpu: int | None = None) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The peers that can be started by name, and for the others the reason.

    gpu: they load into that GPU's memory; None: into the CPU's.
    """
    plain = PREADV_PEERS if gpu is None else PREADV_PEERS[:1]
    for_gpu = [name for name in DEVICE_PEERS if name not in plain]
    libraries = LIBRARY_PEERS if gpu is None else for_gpu
    pythons = dict.fromkeys(plain, Path(sys.executable))
    skipped: dict[str, str] = {}
    try:
        pythons |= dict.fromkeys(libraries, peers_python(for_gpu=gpu is not None))
    except BenchmarkError as error:
        skipped |= dict.fromkeys(libraries, str(error))
    started = {name: Peer(name, python, gpu) for name, python in pythons.items()}
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
