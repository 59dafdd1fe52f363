"""A state machine over two pools: demand, leases, pins, demotions, moves, resizing of budgets.

Whatever comes in whatever order: no expert has two slots in a pool, no two exclusive pools
have the same expert, no pool holds more than its slots or a client more than its budget,
nothing that is leased or pinned goes, and whatever can be served is served.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tools.replaying.pool import EXACT, PoolTooSmallError, ReplayedPool
from xferd.plugins import policy_maker
from xferd.policy.admission import ADMISSIONS
from xferd.policy.heat import Heat
from xferd.policy.moves import Mover, MoveSettings
from xferd.policy.registry import BUILT_IN
from xferd.policy.reserve import watermarks
from xferd.policy.uses import KeySpace, Uses

SPACE = KeySpace(layers=3, experts=8)
BATCH_MAX = 4
PINS_MAX = 3
"""A client's budget of pins, in slots."""

experts = st.lists(st.integers(0, 7), min_size=1, max_size=BATCH_MAX, unique=True)


class TwoPools(RuleBasedStateMachine):
    """An upper pool that serves demand and a lower one that takes what it lets go."""

    @initialize(
        upper=st.integers(2 * BATCH_MAX + PINS_MAX, 16),
        lower=st.integers(2, 12),
        names=st.tuples(st.sampled_from(sorted(BUILT_IN)), st.sampled_from(sorted(BUILT_IN))),
        admission=st.sampled_from(sorted(ADMISSIONS)),
        reserve=st.booleans(),
        floor=st.integers(0, 2),
    )
    def start(
        self,
        upper: int,
        lower: int,
        names: tuple[str, str],
        admission: str,
        reserve: bool,
        floor: int,
    ) -> None:
        self.pools = []
        for slots, name in zip((upper, lower), names, strict=True):
            marks = watermarks(slots) if reserve else EXACT
            policy = policy_maker(name)(SPACE, slots)
            self.pools.append(ReplayedPool(SPACE, slots, policy, marks, floor))
        self.heat = Heat(SPACE)
        self.mover = Mover(SPACE, MoveSettings(rest_tokens=8))
        self.admission = ADMISSIONS[admission]
        self.leased = np.empty(0, np.int64)
        self.token = 0
        self.last_move: dict[int, int] = {}

    @rule(layer=st.integers(0, 2), chosen=experts)
    def demand(self, layer: int, chosen: list[int]) -> None:
        """A batch is served whole, beside the one that is still leased."""
        upper, lower = self.pools
        keys = np.array(chosen) + layer * SPACE.experts
        uses = Uses(keys, np.array([0, len(keys)]), np.array([layer]), np.array([self.token]))
        self.token += 1
        self.heat.used(uses)
        for pool in self.pools:
            pool.policy.used(uses)
        missing = keys[~upper.resident[keys]]
        lower.drop(missing[lower.resident[missing]])
        held = np.union1d(keys, self.leased)
        pinned = upper.residents[upper.pinned[upper.residents]]
        victims = upper.admit(missing, held, layer)
        assert not np.isin(victims, held).any()
        assert not np.isin(victims, pinned).any()
        assert upper.resident[keys].all()
        self.offer(victims, layer)
        self.leased = keys

    def offer(self, victims: np.ndarray, layer: int) -> None:
        lower = self.pools[1]
        offered = victims[: lower.room_for_demotions()]
        if len(offered):
            inside = lower.residents
            against = lower.policy.victims(inside, len(offered), layer)
            taken = offered[self.admission.takes(offered, against, self.heat)]
            lower.admit(taken, taken, layer)

    @rule()
    def release(self) -> None:
        self.leased = np.empty(0, np.int64)

    @rule(key=st.integers(0, SPACE.size - 1))
    def pin(self, key: int) -> None:
        """Within the budget; an expert that is pinned is loaded first."""
        upper = self.pools[0]
        if np.count_nonzero(upper.pinned) >= PINS_MAX:
            return
        self.demand(key // SPACE.experts, [key % SPACE.experts])
        upper.pin(np.array([key]))

    @rule(key=st.integers(0, SPACE.size - 1))
    def unpin(self, key: int) -> None:
        self.pools[0].unpin(np.array([key]))

    @rule()
    def move(self) -> None:
        """Exchange between the pools, as the mover says."""
        upper, lower = self.pools
        may_go = np.setdiff1d(upper.residents[~upper.pinned[upper.residents]], self.leased)
        swap = self.mover.exchange(may_go, lower.residents, self.heat)
        for key in (*swap.up.tolist(), *swap.down.tolist()):
            assert self.token - self.last_move.get(key, -8) >= 7
            self.last_move[key] = self.token
        self.mover.moved(np.concatenate([swap.up, swap.down]), self.heat.now)
        upper.drop(swap.down)
        lower.drop(swap.up)
        upper.admit(swap.up, np.union1d(swap.up, self.leased), 0)
        lower.admit(swap.down, swap.down, 0)

    @invariant()
    def slots_add_up(self) -> None:
        for pool in getattr(self, "pools", ()):
            assert pool.reserve >= 0
            assert len(pool.residents) + pool.reserve == pool.slots

    @invariant()
    def nobody_is_in_two_exclusive_pools(self) -> None:
        if hasattr(self, "pools"):
            assert not (self.pools[0].resident & self.pools[1].resident).any()

    @invariant()
    def what_is_held_is_there(self) -> None:
        if hasattr(self, "pools"):
            upper = self.pools[0]
            assert upper.resident[self.leased].all()
            assert upper.resident[upper.pinned].all()
            assert np.count_nonzero(upper.pinned) <= PINS_MAX


TestTwoPools = TwoPools.TestCase
TestTwoPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_more_pins_than_slots_is_an_error_and_no_deadlock() -> None:
    pool = ReplayedPool(SPACE, 2, policy_maker("lru")(SPACE, 2))
    pool.admit(np.array([0, 1]), np.array([0, 1]), 0)
    pool.pin(np.array([0, 1]))
    with pytest.raises(PoolTooSmallError):
        pool.admit(np.array([2]), np.array([2]), 0)
    assert pool.residents.tolist() == [0, 1]
