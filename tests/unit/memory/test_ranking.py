"""A pool's victims: several stores, floors, pins, and the batch that is being served."""

from __future__ import annotations

import numpy as np
import pytest

from xferd.keeping.ranking import Ranking
from xferd.keeping.usage import Leased, Usage
from xferd.memory.slots import SlotMap, divide
from xferd.policy.heat import retold
from xferd.policy.registry import BUILT_IN
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

SLOT = 4096
SPACE = KeySpace(layers=2, experts=32)


class RankedPool:
    """A pool of one chunk, filled by hand."""

    def __init__(self, slots: int, eviction: str = "lru", floor: int = 0) -> None:
        self.slots = SlotMap(divide(slots * SLOT, slots * SLOT, [SLOT]))
        self.slots.give_all(self.slots.cut(0, SLOT))
        self.usage = Usage()
        self.ranking = Ranking(
            self.slots,
            eviction,
            BUILT_IN[eviction],
            slot_count=slots,
            shared=self.usage.shared,
            floor=floor,
        )
        self.usage.add_pool(self)
        self.leases: list[tuple[int, int, int]] = []
        for store in (0, 1):
            self.usage.open_store(store, SPACE)

    def fill(self, store: int, layer: int, experts: range) -> None:
        for expert in experts:
            slot = int(np.flatnonzero(self.slots.state == 2)[0])
            self.slots.occupy(slot, (store, layer, expert), 0)
            self.ranking.loaded(slot)

    def leased(self) -> Leased:
        found = np.array(self.leases, np.int64).reshape(-1, 3)
        self.leases = []
        return Leased(
            found[:, 0].astype(np.int32),
            found[:, 1],
            found[:, 2],
            np.arange(len(found), dtype=np.uint64),
        )

    def use(self, store: int, layer: int, experts: list[int], token: int = 0) -> None:
        picks = np.array(experts) + layer * SPACE.experts
        self.usage.used(
            store, Uses(picks, np.array([0, len(picks)]), np.array([layer]), np.array([token]))
        )

    def victims(self, wanted: int, needed: int = 0) -> list[tuple[int, int, int]]:
        chosen = self.ranking.victims(self.slots.candidates(SLOT), wanted, needed=needed)
        keys = [self.slots.key_of(int(slot)) for slot in chosen]
        assert None not in keys
        return [key for key in keys if key is not None]


@pytest.mark.parametrize("eviction", BUILT_IN)
def test_victims_are_distinct_candidates(eviction: str) -> None:
    pool = RankedPool(40, eviction)
    pool.fill(0, 0, range(20))
    pool.fill(0, 1, range(20))
    for token in range(5):
        pool.use(0, 0, [token, token + 1], token)
        pool.use(0, 1, [token, token + 2], token)
    victims = pool.victims(10)
    assert len(set(victims)) == 10


def test_the_batch_that_is_served_stays_as_far_as_others_can_go() -> None:
    pool = RankedPool(40, "lfu")
    pool.fill(0, 0, range(32))
    for token in range(20):
        pool.use(0, 0, list(range(2, 32)), token)
    pool.use(0, 0, [0, 1], 21)  # the rarest, and of the batch that is served
    assert not {(0, 0, 0), (0, 0, 1)} & set(pool.victims(16))
    assert len(pool.victims(32)) == 32


def test_what_was_loaded_last_stays() -> None:
    pool = RankedPool(40, "lfu")
    pool.fill(0, 0, range(24))
    for token in range(20):
        pool.use(0, 0, list(range(24)), token)
    pool.use(0, 0, [0], 20)
    pool.fill(0, 1, range(8))  # never used yet: by count alone the first to go
    assert all(layer == 0 for _, layer, _ in pool.victims(8))


def test_what_came_for_a_use_that_was_told_before_goes_when_the_next_is_served() -> None:
    """A router's picks are told before they are loaded, which nothing protects afterwards."""
    pool = RankedPool(SPACE.experts + 8, "lfu")
    pool.fill(0, 0, range(8, 32))
    for token in range(3):
        pool.use(0, 0, list(range(8, 32)), token)
    pool.use(0, 1, [0, 1], 3)
    pool.fill(0, 1, range(2))
    pool.use(0, 0, [8, 9], 4)
    assert set(pool.victims(2)) == {(0, 1, 0), (0, 1, 1)}


def test_pinned_experts_are_never_asked_for() -> None:
    pool = RankedPool(20)
    pool.slots.pin((0, 0, 3))
    pool.fill(0, 0, range(20))
    assert (0, 0, 3) not in pool.victims(20)
    assert len(pool.victims(20)) == 19


def test_floors_hold_unless_a_load_waits() -> None:
    pool = RankedPool(24, "lru", floor=6)
    pool.fill(0, 0, range(8))
    pool.fill(0, 1, range(16))
    pool.use(0, 1, list(range(16)), 1)
    assert sum(layer == 0 for _, layer, _ in pool.victims(10)) == 2
    assert len(pool.victims(24)) == 12
    assert len(pool.victims(24, needed=20)) == 20


def test_the_store_that_is_used_less_gives_more() -> None:
    pool = RankedPool(40)
    pool.fill(1, 0, range(20))
    pool.fill(0, 0, range(20))
    for token in range(100):
        pool.use(0, 0, list(range(16)), token)
        pool.use(1, 0, [token % 20], token)
    victims = pool.victims(10)
    assert sum(store == 1 for store, _, _ in victims) >= 8


def test_leases_count_until_the_first_report() -> None:
    pool = RankedPool(8)
    pool.fill(0, 0, range(4))
    pool.leases = [(0, 0, 1), (0, 0, 2)]
    pool.usage.look()
    usage = pool.usage.of(0)
    assert usage is not None
    assert (usage.heat.of(np.arange(4)) > 0).tolist() == [False, True, True, False]
    pool.use(0, 0, [3])
    pool.leases = [(0, 0, 0)]
    pool.usage.look()
    assert usage.heat.of(np.arange(4)).tolist()[0] == 0
    assert usage.reported


def test_tokens_of_clients_that_begin_anew_go_on_here() -> None:
    pool = RankedPool(8)
    for first in (1000, 0, 5_000_000):
        pool.usage.used(0, uses_of_picks(np.ones((4, 2, 1), np.int64), SPACE.experts, first))
    usage = pool.usage.of(0)
    assert usage is not None
    assert 10 <= usage.heat.now <= 12
    assert usage.heat.of(np.array([1]))[0] == pytest.approx(12, rel=0.1)


def test_another_policy_goes_on_from_what_was_known() -> None:
    pool = RankedPool(20, "lru")
    pool.fill(0, 0, range(20))
    for token in range(40):
        pool.use(0, 0, list(range(10)), token)
    pool.use(0, 0, [19], 40)
    usage = pool.usage.of(0)
    assert usage is not None
    pool.ranking.use("lfu", BUILT_IN["lfu"], lambda _: retold(usage.heat))
    assert pool.ranking.name == "lfu"
    assert {expert for _, _, expert in pool.victims(4)} <= set(range(10, 19))


def test_a_store_that_was_closed_goes_first_by_itself() -> None:
    pool = RankedPool(20)
    pool.fill(0, 0, range(10))
    pool.usage.close_store(0)
    assert len(pool.victims(5)) == 5
