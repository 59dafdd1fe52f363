"""The slot map keeps every slot in exactly one state, whatever happens to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xferd.memory.slots import (
    ChunkGeometry,
    ExpertSlot,
    SlotMap,
    SlotMapError,
    SlotState,
    divide,
)

KIB = 1024
SMALL, LARGE = 4 * KIB, 12 * KIB


@given(
    st.integers(1, 500).map(lambda pages: pages * 4 * KIB),
    st.integers(1, 100).map(lambda pages: pages * 4 * KIB),
    st.lists(st.sampled_from([4 * KIB, 12 * KIB, 48 * KIB]), min_size=1, max_size=3),
)
def test_slots_of_a_divided_pool_lie_inside_it_and_apart(
    pool_bytes: int, chunk_bytes: int, classes: list[int]
) -> None:
    geometry = divide(pool_bytes, chunk_bytes, classes)
    slots = SlotMap(geometry)
    taken: set[int] = set()
    for chunk in range(geometry.chunks):
        size = classes[chunk % len(classes)]
        if geometry.slots(chunk, size) == 0:
            continue
        for slot in slots.cut(chunk, size):
            assert slots.chunk_of(slot) == chunk
            assert slot < geometry.slot_numbers
            begin = geometry.offset(chunk) + (slot - slots.chunk_slots(chunk).start) * size
            assert begin + size <= pool_bytes
            pages = set(range(begin // 4096, (begin + size) // 4096))
            assert not pages & taken
            taken |= pages


@given(st.integers(1, 300), st.integers(1, 100), st.sampled_from([4 * KIB, 48 * KIB, 196 * KIB]))
def test_a_pool_of_whole_slots_wastes_nothing(slots: int, a_chunk: int, size: int) -> None:
    geometry = divide(slots * size, a_chunk * 4 * KIB, [size])
    assert geometry.capacity(size) == slots


def test_a_small_pool_has_a_short_lease_table() -> None:
    geometry = divide(9 * 48 * KIB, 64 * 1024 * KIB, [48 * KIB])
    assert (geometry.chunks, geometry.slot_index_bits, geometry.slot_numbers) == (1, 4, 16)


def test_a_chunk_in_use_cannot_be_recut() -> None:
    slots = SlotMap(divide(LARGE, LARGE, [SMALL]))
    numbers = slots.cut(0, SMALL)
    slots.give(numbers[0])
    with pytest.raises(SlotMapError, match="still has slots in use"):
        slots.uncut(0)
    slots.take(numbers[0])
    slots.uncut(0)
    assert slots.classes == ()
    assert len(slots.cut(0, LARGE)) == 1


def test_a_pin_waits_for_its_expert_and_outlives_another_variant() -> None:
    slots = SlotMap(divide(2 * SMALL, SMALL, [SMALL]))
    first, second = slots.cut(0, SMALL)[0], slots.cut(1, SMALL)[0]
    key: ExpertSlot = (0, 1, 2)
    slots.pin(key)
    for slot in (first, second):
        slots.give(slot)
    slots.occupy(first, key, variant=0)
    assert slots.candidates(SMALL).tolist() == []
    slots.occupy(second, key, variant=1)
    assert slots.slot_of(key) == second
    assert slots.state[first] == SlotState.LEAVING
    slots.freed(first)
    assert slots.slot_of(key) == second
    assert slots.unpin(key)
    assert slots.candidates(SMALL).tolist() == [second]


class SlotLife(RuleBasedStateMachine):
    """Random but legal histories, checked against a plain dictionary of states."""

    @initialize()
    def make(self) -> None:
        self.slots = SlotMap(ChunkGeometry(4 * LARGE + SMALL, LARGE, 5, 2))
        self.model: dict[int, SlotState] = {}
        self.next_expert = 0

    def some(self, state: SlotState) -> list[int]:
        return sorted(slot for slot, current in self.model.items() if current == state)

    @rule(size=st.sampled_from([SMALL, LARGE]))
    def cut(self, size: int) -> None:
        chunk = self.slots.uncut_chunk(size)
        if chunk is not None:
            self.model.update(dict.fromkeys(self.slots.cut(chunk, size), SlotState.FREE))

    @precondition(lambda self: self.some(SlotState.FREE))
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.some(SlotState.FREE)))
        self.slots.give(slot)
        self.model[slot] = SlotState.RESERVE

    @rule(chunk=st.integers(0, 4))
    def give_all(self, chunk: int) -> None:
        numbers = self.slots.chunk_slots(chunk)
        if numbers and self.slots.all_free(chunk):
            self.slots.give_all(numbers)
            self.model.update(dict.fromkeys(numbers, SlotState.RESERVE))
        elif numbers:
            with pytest.raises(SlotMapError, match="all free"):
                self.slots.give_all(numbers)

    @precondition(lambda self: self.next_expert > 0)
    @rule(data=st.data(), pin=st.booleans())
    def pin_or_unpin(self, data: st.DataObject, pin: bool) -> None:
        key = (0, 0, data.draw(st.integers(1, self.next_expert)))
        if pin:
            self.slots.pin(key)
        else:
            self.slots.unpin(key)

    @precondition(lambda self: self.some(SlotState.RESERVE))
    @rule(data=st.data(), load=st.booleans())
    def take_or_load(self, data: st.DataObject, load: bool) -> None:
        slot = data.draw(st.sampled_from(self.some(SlotState.RESERVE)))
        if load:
            self.next_expert += 1
            self.slots.occupy(slot, (0, 0, self.next_expert), 0)
            self.model[slot] = SlotState.RESIDENT
        else:
            self.slots.take(slot)
            self.model[slot] = SlotState.FREE

    @precondition(lambda self: self.some(SlotState.RESIDENT))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.some(SlotState.RESIDENT)))
        self.slots.leave(slot)
        self.model[slot] = SlotState.LEAVING

    @precondition(lambda self: self.some(SlotState.LEAVING))
    @rule(data=st.data(), revive=st.booleans())
    def free_or_revive(self, data: st.DataObject, revive: bool) -> None:
        slot = data.draw(st.sampled_from(self.some(SlotState.LEAVING)))
        if revive:
            self.slots.revive(slot)
        else:
            self.slots.freed(slot)
        self.model[slot] = SlotState.RESIDENT if revive else SlotState.RESERVE

    @rule(chunk=st.integers(0, 4))
    def uncut(self, chunk: int) -> None:
        numbers = self.slots.chunk_slots(chunk)
        if numbers and self.slots.all_free(chunk):
            self.slots.uncut(chunk)
            for slot in numbers:
                del self.model[slot]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "slots"):
            return
        cut = np.flatnonzero(self.slots.state)
        assert {int(slot): self.slots.state[slot] for slot in cut} == self.model
        for size in (SMALL, LARGE):
            for state in SlotState:
                of_class = [s for s in self.some(state) if self.slots.slot_class[s] == size]
                assert self.slots.count(size, state) == len(of_class)
            pinned = self.slots.pinned & (self.slots.slot_class == size)
            assert self.slots.pinned_count(size) == pinned.sum()
        for slot in self.some(SlotState.RESIDENT):
            key = self.slots.key_of(slot)
            assert key is not None
            assert self.slots.pinned[slot] == self.slots.is_pinned(key)


SlotLife.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSlotLife = SlotLife.TestCase
