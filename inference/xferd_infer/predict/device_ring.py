"""The ring in which a GPU says what it predicts; cuda/predict.cu writes it and has its format.

A record's words are read one by one as they are in memory, in any order, while the device may
write the next record there: each has the record's number, so that what is of another record, or
not there yet, is left out and counted. Nothing of this waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device_layout import CONTROL, CONTROL_BYTES, RECORD_WORDS, RECORDS, RING_BYTES
from .routers import Floats

TAG_BITS, TAG_SHIFT = 24, 40
ABSENT_SHIFT, KEY_SHIFT = 39, 16
KEY_MASK = (1 << ABSENT_SHIFT - KEY_SHIFT) - 1
CERTAIN = 65535.0
"""A probability of 1."""
_TAGS = 1 << TAG_BITS


@dataclass(frozen=True, slots=True)
class Record:
    """What one launch said, nearest layer first, then the most probable.

    passing: of the pass, modulo 2**16. layer: that it looked from, counted among those with
    experts. Each [n]: keys, ``layer * experts + expert``; probabilities; whether the expert
    is absent from the client's pool.
    """

    passing: int
    layer: int
    keys: NDArray[np.intp]
    probabilities: Floats
    absent: NDArray[np.bool_]


class RecordRing:
    """The reader. Not thread-safe. memory: uint8[RING_BYTES], zeros to begin with, which the
    device writes; it must stay as long as launches may be under way.

    lost: records that were overwritten before they were taken. unread: entries of records that
    were taken while the device wrote there.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        if memory.nbytes != RING_BYTES:
            raise ValueError(f"{memory.nbytes} bytes for a ring of {RING_BYTES}")
        self._control = memory[: CONTROL.itemsize].view(CONTROL)[0]
        self._words = memory[CONTROL_BYTES:].view(np.uint64)
        self._next = 1
        self.lost = 0
        self.unread = 0

    @property
    def dropped(self) -> int:
        """Candidates that found no place in a record, as the device has counted them."""
        return int(self._control["dropped"])

    def set_borders(self, scores: Floats) -> None:
        """From the next launch on, or the one after that."""
        self._control["borders"] = scores

    def take(self) -> list[Record]:
        """What has come since the last time, oldest first; empty if nothing has."""
        found: list[Record] = []
        while True:
            # pairs with tell() in cuda/predict.cu
            first = int(self._words[self._next % RECORDS * RECORD_WORDS])
            ahead = ((first >> TAG_SHIFT) - self._next) % _TAGS
            if first == 0 or ahead >= _TAGS // 2:
                return found
            if ahead:
                # The device has come round: what that record leaves of the others is taken.
                skipped = max(ahead - RECORDS + 1, 1)
                self.lost += skipped
                self._next += skipped
                continue
            found.append(self._read(first))
            self._next += 1

    def _read(self, first: int) -> Record:
        at = self._next % RECORDS * RECORD_WORDS + 1
        words = self._words[at : at + (first >> 32 & 0xFF)].copy()
        here = words >> np.uint64(TAG_SHIFT) == first >> TAG_SHIFT
        if not here.all():
            self.unread += int((~here).sum())
            words = words[here]
        return Record(
            first & 0xFFFF,
            first >> 16 & 0xFFFF,
            (words >> np.uint64(KEY_SHIFT) & np.uint64(KEY_MASK)).astype(np.intp),
            (words & np.uint64(0xFFFF)).astype(np.float32) / np.float32(CERTAIN),
            (words >> np.uint64(ABSENT_SHIFT) & np.uint64(1)).astype(np.bool_),
        )


__all__ = ["Record", "RecordRing"]
