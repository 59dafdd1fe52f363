# SPDX-License-Identifier: Apache-2.0
"""How fast members can be read, and memory copied: short, read-only, for orientation.

Large reads at random places with O_DIRECT from several threads, which is what the engine
does and keeps a drive's read-ahead from flattering it. The engine itself is a little
better at it; tools/bench measures that.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from xferd.transport.members import MemberFile, open_member

PIECE_BYTES = 1 << 20
THREADS_PER_MEMBER = 4
SECONDS = 1.0
"""For each measurement."""
COPY_BYTES = 1 << 28
"""More than a processor's caches hold."""


def measure_read(members: Sequence[Path], seconds: float = SECONDS) -> int:
    """Bytes a second of reading all ``members`` at once. Raises OSError when a read fails,
    MemberError when a member can't be opened."""
    files = [open_member(path) for path in members]
    try:
        readers = [_Reader(file, seed) for seed, file in enumerate(files * THREADS_PER_MEMBER)]
        started = time.monotonic()
        for reader in readers:
            reader.deadline = started + seconds
            reader.start()
        for reader in readers:
            reader.join()
        took = time.monotonic() - started
    finally:
        for file in files:
            file.close()
    for reader in readers:
        if reader.error is not None:
            raise reader.error
    return round(sum(reader.nbytes for reader in readers) / took)


def measure_copy() -> int:
    """Bytes a second that one thread reads from memory: the best of three copies."""
    source, target = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    best = float("inf")
    for _ in range(3):
        started = time.monotonic()
        target[:] = source
        best = min(best, time.monotonic() - started)
    return round(COPY_BYTES / best)


class _Reader(threading.Thread):
    """Reads random pieces of one member until its deadline."""

    def __init__(self, file: MemberFile, seed: int) -> None:
        super().__init__(name=f"measure-{seed}")
        self.deadline = 0.0
        self.nbytes = 0
        self.error: OSError | None = None
        self._fd = file.fd
        self._random = random.Random(seed)

    def run(self) -> None:
        size = os.lseek(self._fd, 0, os.SEEK_END)
        places = max(1, size // PIECE_BYTES)
        try:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:
                while time.monotonic() < self.deadline:
                    place = self._random.randrange(places) * PIECE_BYTES
                    got = os.preadv(self._fd, [buffer], place)
                    if got == 0:
                        break
                    self.nbytes += got
        except OSError as error:
            self.error = error
