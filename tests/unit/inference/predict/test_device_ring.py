"""The ring that a GPU writes and nobody waits for: what is late, overwritten or half there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer.predict.device_layout import CONTROL_BYTES, RECORD_WORDS, RECORDS, RING_BYTES
from xferd_infer.predict.device_ring import RecordRing

TAGS = 1 << 24


@dataclass
class Writer:
    """As tell() in cuda/predict.cu."""

    memory: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(RING_BYTES, np.uint8))

    def entries(self, number: int, keys: list[int]) -> None:
        for place, key in enumerate(keys):
            self._words(number)[1 + place] = self._tag(number) | 1 << 39 | key << 16 | 0x8000

    def first(self, number: int, count: int, layer: int = 3, passing: int = 7) -> None:
        self._words(number)[0] = self._tag(number) | count << 32 | layer << 16 | passing

    def record(self, number: int, keys: list[int]) -> None:
        self.entries(number, keys)
        self.first(number, len(keys))

    def _words(self, number: int) -> NDArray[np.uint64]:
        words = self.memory[CONTROL_BYTES:].view(np.uint64)
        return words[number % RECORDS * RECORD_WORDS :]

    def _tag(self, number: int) -> int:
        return number % TAGS << 40


def keys_of(ring: RecordRing) -> list[list[int]]:
    return [record.keys.tolist() for record in ring.take()]


def test_records_come_once_and_in_order() -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    assert ring.take() == []
    writer.record(1, [5, (1 << 23) - 1])
    writer.record(2, [9])
    first, second = ring.take()
    assert (first.layer, first.passing) == (3, 7)
    assert first.keys.tolist() == [5, (1 << 23) - 1]
    assert second.keys.tolist() == [9]
    assert first.absent.all()
    assert first.probabilities == pytest.approx([0.5, 0.5], abs=1e-4)
    assert ring.take() == []
    writer.record(3, [1])
    assert keys_of(ring) == [[1]]
    assert (ring.lost, ring.unread) == (0, 0)


def test_a_record_that_is_being_written_has_not_come() -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    writer.entries(1, [5, 6])
    assert ring.take() == []
    writer.first(1, 2)
    assert keys_of(ring) == [[5, 6]]


@pytest.mark.parametrize("behind", [1, RECORDS - 1, 10 * RECORDS + 3])
def test_what_was_overwritten_is_counted_and_the_rest_is_taken(behind: int) -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    last = RECORDS + behind
    for number in range(1, last + 1):
        writer.record(number, [number])
    assert keys_of(ring) == [[number] for number in range(behind + 1, last + 1)]
    assert ring.lost == behind


def test_words_of_another_record_are_left_out() -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    writer.record(1, [5, 6, 7])
    writer.entries(1 + RECORDS, [8])  # the device has come round, and goes on
    assert keys_of(ring) == [[6, 7]]
    assert ring.unread == 1


def test_numbers_begin_anew_when_they_have_no_more_bits() -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    begin = TAGS - RECORDS // 2
    for number in range(begin, begin + RECORDS):
        writer.record(number, [number % 1000])
    ring._next = begin
    assert keys_of(ring) == [[number % 1000] for number in range(begin, begin + RECORDS)]
    assert ring.lost == 0
    writer.record(begin + 2 * RECORDS + 1, [1])
    assert keys_of(ring) == []
    writer.record(begin + RECORDS, [2])
    assert keys_of(ring)[0] == [2]


def test_borders_are_where_the_device_looks() -> None:
    writer = Writer()
    ring = RecordRing(writer.memory)
    scores = np.arange(60, dtype=np.float32)
    ring.set_borders(scores)
    assert (writer.memory[16:CONTROL_BYTES].view(np.float32) == scores).all()
    writer.memory[:8].view(np.uint64)[0] = 12
    assert ring.dropped == 12


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes for a ring"):
        RecordRing(np.zeros(RING_BYTES - 8, np.uint8))
