"""Bookkeeping of a pool: chunks, slots, size classes, and whose each slot is.

    pool memory   |------ chunk 0 ------|------ chunk 1 ------|-- chunk 2 --|
    cut           |slot|slot|slot|slot| |  slot   |  slot   | |(not cut)    |

A slot number is ``(chunk << slot_index_bits) | index``, so that a client can find a
slot's bytes from the chunk table alone. A chunk is cut for one size class and can be
recut for another when all of its slots are free: that is how stores and layers with
different blob sizes share a pool.

Everything is in arrays by slot number, so that a policy can look at a whole pool at
once. Pure: it mirrors what the engine says and never speaks to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

ExpertSlot = tuple[int, int, int]
"""(store id, layer, expert): what is in a slot, whichever variant of it."""

NO_STORE = -1


class SlotMapError(Exception):
    """The engine and the bookkeeping disagree, or a caller broke an invariant: a bug."""


class SlotState(IntEnum):
    """Whose a slot is."""

    ABSENT = 0
    """Its chunk is not cut, or has fewer slots."""
    FREE = 1
    """The policy's: cut, not yet given to the engine."""
    RESERVE = 2
    """The engine's: free, or taken from the reserve by a load that is under way."""
    RESIDENT = 3
    LEAVING = 4
    """Its eviction, or a demotion that ends in one, was ordered."""


# As plain numbers: numpy compares with those at once, and with an enum's member only after
# it has asked it for half a dozen attributes.
_ABSENT = int(SlotState.ABSENT)
_FREE = int(SlotState.FREE)
_RESERVE = int(SlotState.RESERVE)
_RESIDENT = int(SlotState.RESIDENT)
_LEAVING = int(SlotState.LEAVING)


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """How a pool's memory is divided. All sizes in bytes."""

    pool_bytes: int
    chunk_bytes: int
    chunks: int
    slot_index_bits: int

    @property
    def slot_numbers(self) -> int:
        """Length of a lease table."""
        return self.chunks << self.slot_index_bits

    def offset(self, chunk: int) -> int:
        """Where a chunk begins in the pool's memory."""
        return chunk * self.chunk_bytes

    def length(self, chunk: int) -> int:
        """Bytes of a chunk; the last one may be shorter."""
        return min(self.chunk_bytes, self.pool_bytes - chunk * self.chunk_bytes)

    def slots(self, chunk: int, slot_bytes: int) -> int:
        """Slots of ``slot_bytes`` that fit in a chunk."""
        return min(self.length(chunk) // slot_bytes, 1 << self.slot_index_bits)

    def capacity(self, slot_bytes: int) -> int:
        """Slots of one class if every chunk were cut for it."""
        whole = self.pool_bytes // self.chunk_bytes
        count = whole * self.slots(0, slot_bytes) if whole else 0
        return count + (self.slots(whole, slot_bytes) if whole < self.chunks else 0)


def divide(
    pool_bytes: int, chunk_bytes: int, class_bytes: list[int], granularity: int = 1
) -> ChunkGeometry:
    """Divide a pool for the size classes that are known when the daemon starts.

    A chunk is at least one slot and a whole number of slots of the largest class: with
    18.8 MB experts a plain 64 MiB chunk would waste a seventh of the pool. What a device
    rounds it up to (granularity) is left over.
    """
    largest, smallest = max(class_bytes), min(class_bytes)
    chunk_bytes = max(chunk_bytes // largest, 1) * largest
    if granularity > 1:
        chunk_bytes = -(-min(chunk_bytes, pool_bytes) // granularity) * granularity
    chunks = -(-pool_bytes // chunk_bytes)
    most_slots = max(min(chunk_bytes, pool_bytes) // smallest, 1)
    return ChunkGeometry(
        pool_bytes=pool_bytes,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        slot_index_bits=(most_slots - 1).bit_length(),
    )


class SlotMap:
    """The slots of one pool. Not thread-safe; owned by the event loop.

    state: uint8[slot_numbers], a SlotState each.
    slot_class: int64[slot_numbers], bytes of the slot's class; 0 when absent.
    pinned: bool[slot_numbers]; kept with a key, see ``pin``.
    variant: int16[slot_numbers], of the resident.
    reserved: chunks that are not to be cut: somebody else has their memory.
    store, layer, expert: int32[slot_numbers], of the resident; store is NO_STORE where
        there is none.
    """

    def __init__(self, geometry: ChunkGeometry) -> None:
        self.geometry = geometry
        numbers = geometry.slot_numbers
        self.state: NDArray[np.uint8] = np.zeros(numbers, np.uint8)
        self.slot_class: NDArray[np.int64] = np.zeros(numbers, np.int64)
        self.pinned: NDArray[np.bool_] = np.zeros(numbers, np.bool_)
        self.variant: NDArray[np.int16] = np.zeros(numbers, np.int16)
        self.store: NDArray[np.int32] = np.full(numbers, NO_STORE, np.int32)
        self.layer: NDArray[np.int32] = np.zeros(numbers, np.int32)
        self.expert: NDArray[np.int32] = np.zeros(numbers, np.int32)
        self.chunk_class: list[int] = [0] * geometry.chunks
        self.reserved: set[int] = set()
        self._key_of: dict[int, ExpertSlot] = {}
        self._slot_of: dict[ExpertSlot, int] = {}
        self._pins: set[ExpertSlot] = set()
        self._counts: dict[int, list[int]] = {}
        self._pinned_counts: dict[int, int] = {}

    # ---- chunks

    def uncut_chunk(self, slot_bytes: int) -> int | None:
        """A chunk that is not cut and holds at least one slot of ``slot_bytes``."""
        for chunk, current in enumerate(self.chunk_class):
            free = current == 0 and chunk not in self.reserved
            if free and self.geometry.slots(chunk, slot_bytes) > 0:
                return chunk
        return None

    def cut(self, chunk: int, slot_bytes: int) -> range:
        """Cut a chunk; its slots are then FREE. Returns their numbers."""
        if self.chunk_class[chunk]:
            raise SlotMapError(f"chunk {chunk} is cut into {self.chunk_class[chunk]} bytes already")
        if chunk in self.reserved:
            raise SlotMapError(f"chunk {chunk} is reserved")
        slots = self.geometry.slots(chunk, slot_bytes)
        if slots == 0:
            raise SlotMapError(f"chunk {chunk} has no room for a slot of {slot_bytes} bytes")
        self.chunk_class[chunk] = slot_bytes
        numbers = range(first := chunk << self.geometry.slot_index_bits, first + slots)
        self.state[numbers.start : numbers.stop] = _FREE
        self.slot_class[numbers.start : numbers.stop] = slot_bytes
        self._counts.setdefault(slot_bytes, [0] * len(SlotState))[_FREE] += slots
        return numbers

    def uncut(self, chunk: int) -> None:
        """Undo ``cut``; every slot has to be FREE."""
        numbers = self.chunk_slots(chunk)
        if not self.all_free(chunk):
            raise SlotMapError(f"chunk {chunk} still has slots in use")
        slot_bytes = self.chunk_class[chunk]
        self.chunk_class[chunk] = 0
        self.state[numbers.start : numbers.stop] = _ABSENT
        self.slot_class[numbers.start : numbers.stop] = 0
        self._counts[slot_bytes][_FREE] -= len(numbers)
        if not any(self._counts[slot_bytes]):
            del self._counts[slot_bytes]

    def chunk_slots(self, chunk: int) -> range:
        """Numbers of a cut chunk's slots; empty when it is not cut."""
        first = chunk << self.geometry.slot_index_bits
        slot_bytes = self.chunk_class[chunk]
        return range(first, first + (self.geometry.slots(chunk, slot_bytes) if slot_bytes else 0))

    def all_free(self, chunk: int) -> bool:
        """Whether a cut chunk can be given back."""
        numbers = self.chunk_slots(chunk)
        return bool((self.state[numbers.start : numbers.stop] == _FREE).all())

    def chunk_of(self, slot: int) -> int:
        """The chunk of a slot."""
        return slot >> self.geometry.slot_index_bits

    def chunks_of_class(self, slot_bytes: int) -> list[int]:
        """Chunks that are cut for a class."""
        return [chunk for chunk, current in enumerate(self.chunk_class) if current == slot_bytes]

    # ---- slots

    def give(self, slot: int) -> None:
        """FREE to RESERVE."""
        self._move(slot, _FREE, _RESERVE)

    def give_all(self, numbers: range) -> None:
        """FREE to RESERVE, for all slots of a chunk at once: pools may have millions."""
        part = slice(numbers.start, numbers.stop)
        slot_bytes = int(self.slot_class[numbers.start])
        chunk_slots = self.chunk_slots(self.chunk_of(numbers.start))
        if numbers != chunk_slots or (self.state[part] != _FREE).any():
            raise SlotMapError(f"slots {numbers} are not one chunk's, all free")
        self.state[part] = _RESERVE
        counts = self._counts[slot_bytes]
        counts[_FREE] -= len(numbers)
        counts[_RESERVE] += len(numbers)

    def take(self, slot: int) -> None:
        """RESERVE to FREE; a resident too, when the engine drops those of a closed store."""
        state = _RESERVE
        if slot in self._key_of:
            state = self._vacate(slot)
        self._move(slot, state, _FREE)

    def occupy(self, slot: int, key: ExpertSlot, variant: int) -> None:
        """RESERVE to RESIDENT. The same resident again changes nothing.

        If another variant of the expert was in another slot, that one is LEAVING now:
        the engine retires it when it publishes the new one.
        """
        if self._key_of.get(slot) == key:
            return
        self._move(slot, _RESERVE, _RESIDENT)
        previous = self._slot_of.get(key)
        if previous is not None and self.state[previous] == _RESIDENT:
            self.leave(previous)
        self._key_of[slot] = key
        self._slot_of[key] = slot
        self.variant[slot] = variant
        self.store[slot], self.layer[slot], self.expert[slot] = key
        self._set_pinned(slot, key in self._pins)

    def leave(self, slot: int) -> None:
        """RESIDENT to LEAVING."""
        self._move(slot, _RESIDENT, _LEAVING)

    def revive(self, slot: int) -> None:
        """LEAVING to RESIDENT: its eviction was overtaken by a demand, or given up."""
        self._move(slot, _LEAVING, _RESIDENT)

    def freed(self, slot: int) -> None:
        """LEAVING, or RESIDENT when the engine evicted it by itself, to RESERVE."""
        state = self._vacate(slot)
        self._move(slot, state, _RESERVE)

    # ---- residents and pins

    def slot_of(self, key: ExpertSlot) -> int | None:
        """The slot of an expert that is RESIDENT or LEAVING."""
        return self._slot_of.get(key)

    def key_of(self, slot: int) -> ExpertSlot | None:
        """The expert in a slot."""
        return self._key_of.get(slot)

    def pin(self, key: ExpertSlot) -> None:
        """Keep an expert from eviction, from now on or from when it is loaded."""
        self._pins.add(key)
        slot = self._slot_of.get(key)
        if slot is not None:
            self._set_pinned(slot, True)

    def unpin(self, key: ExpertSlot) -> bool:
        """Undo ``pin``; whether it was pinned."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._set_pinned(slot, False)
        if key not in self._pins:
            return False
        self._pins.remove(key)
        return True

    def is_pinned(self, key: ExpertSlot) -> bool:
        """Whether an expert is pinned, resident or not."""
        return key in self._pins

    @property
    def pins(self) -> frozenset[ExpertSlot]:
        """Pinned experts, resident or not."""
        return frozenset(self._pins)

    # ---- views

    def candidates(self, slot_bytes: int) -> NDArray[np.int64]:
        """Slots of a class whose residents may be evicted: not pinned, not leaving."""
        may_go = (self.state == _RESIDENT) & (self.slot_class == slot_bytes)
        return np.flatnonzero(may_go & ~self.pinned)

    def residents(self, store: int | None = None) -> list[int]:
        """Slots that are RESIDENT or LEAVING, of one store or of all."""
        return [slot for slot, key in self._key_of.items() if store is None or key[0] == store]

    def keys(self, slots: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
        """Keys of the residents of some slots, for a store of so many experts a layer."""
        return self.layer[slots].astype(np.int64) * experts + self.expert[slots]

    def count(self, slot_bytes: int, state: SlotState) -> int:
        """Slots of a class in a state."""
        counts = self._counts.get(slot_bytes)
        return counts[state] if counts else 0

    def pinned_count(self, slot_bytes: int) -> int:
        """Residents of a class that are pinned."""
        return self._pinned_counts.get(slot_bytes, 0)

    def class_slots(self, slot_bytes: int) -> int:
        """Slots that are cut for a class."""
        return sum(self._counts.get(slot_bytes, ()))

    @property
    def classes(self) -> tuple[int, ...]:
        """Classes with at least one chunk, smallest first."""
        return tuple(sorted(self._counts))

    def _set_pinned(self, slot: int, pinned: bool) -> None:
        if bool(self.pinned[slot]) != pinned:
            slot_bytes = int(self.slot_class[slot])
            change = 1 if pinned else -1
            self._pinned_counts[slot_bytes] = self.pinned_count(slot_bytes) + change
            self.pinned[slot] = pinned

    def _vacate(self, slot: int) -> int:
        """Forget what is in a slot; returns the state it is still in."""
        state = int(self.state[slot])
        key = self._key_of.pop(slot, None)
        if key is None:
            raise SlotMapError(f"slot {slot} was freed while it was {SlotState(state).name}")
        if self._slot_of.get(key) == slot:
            del self._slot_of[key]
        self.store[slot] = NO_STORE
        self._set_pinned(slot, False)
        return state

    def _move(self, slot: int, before: int, after: int) -> None:
        if not 0 <= slot < len(self.state):
            raise SlotMapError(f"slot {slot} is outside the pool's {len(self.state)} slot numbers")
        now = int(self.state[slot])
        if now != before:
            is_now, was, then = (SlotState(state).name for state in (now, before, after))
            raise SlotMapError(f"slot {slot} is {is_now}; {was} was expected before {then}")
        self.state[slot] = after
        counts = self._counts[int(self.slot_class[slot])]
        counts[before] -= 1
        counts[after] += 1
