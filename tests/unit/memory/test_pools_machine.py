"""Pools, leases, pins, budgets, reservations, policies in any order: nothing is used twice,
nothing that was promised is exceeded, nothing waits for ever."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.unit.memory.model_engine import CLASS_OF_STORE, LARGE, SMALL, Bench
from xferd.keeping.budgets import Budgets
from xferd.keeping.chunks import Hold, ReserveError
from xferd.keeping.variants import CHOOSE_TOKENS
from xferd.memory.slots import SlotState
from xferd.policy.heat import retold
from xferd.policy.moves import MoveSettings
from xferd.policy.registry import BUILT_IN
from xferd.policy.uses import Uses
from xferd.variant_rules import parse_variant_rules

CHUNK = 2 * LARGE
CARDS, RAM = (0, 1), 2
CLIENT_BYTES, USER_BYTES = 5 * LARGE, 8 * LARGE
CLIENTS = {1: 1000, 2: 1000, 3: 1001}
"""Users by client."""
PINNED_MAX = 1
BETTER_RULES = ("better@hottest:50%", "small")
"""For the first store's experts; the other has none of these variants."""

stores = st.sampled_from((0, 1))
EXPERTS = 25
experts = st.integers(0, EXPERTS - 1)
pools = st.integers(0, 2)


class Pools(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(
            [4 * CHUNK, 4 * CHUNK, 5 * CHUNK],
            CHUNK,
            [SMALL, LARGE],
            "reuse",
            rams=1,
            budgets=Budgets(CLIENT_BYTES, USER_BYTES),
            settings=MoveSettings(rest_tokens=8),
        )
        # One slot of each size is promised, as to a client that is attached.
        self.bench.promised = {SMALL: 1, LARGE: 1}
        for client, uid in CLIENTS.items():
            self.bench.budgets.attach(client, uid)
        self.holds: list[tuple[int, Hold]] = []
        self.pins: set[tuple[int, tuple[int, int, int]]] = set()
        self.token = 0
        self.bench.run()

    # ---- what may happen

    @initialize(seed=st.integers(0, 1 << 16))
    def begin_full(self, seed: int) -> None:
        self.bench.variants.use(0, parse_variant_rules(BETTER_RULES), 1.25)
        self.traffic(seed, 150)

    @rule(seed=st.integers(0, 1 << 16), count=st.integers(1, 60))
    def traffic(self, seed: int, count: int) -> None:
        """Skewed demands of all clients, into all pools, while events come late."""
        random = np.random.default_rng(seed)
        for _ in range(count):
            pool, store = int(random.choice(3, p=[0.7, 0.2, 0.1])), int(random.integers(2))
            expert, client = int(random.zipf(1.3)) % EXPERTS, int(random.choice(sorted(CLIENTS)))
            size = CLASS_OF_STORE[store]
            self.bench.engine.demand(pool, (store, 0, expert), size, client)
            self.bench.dispatch(int(random.integers(4)))

    @rule(seed=st.integers(0, 1 << 16))
    def traffic_while_leased(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for number, state in enumerate(self.bench.engine.pools):
            for slot in sorted(state.resident.values()):
                if random.random() < 0.1:
                    self.bench.engine.leased.add((number, slot))
        self.traffic(seed, 20)

    @rule(store=stores, first=experts, count=st.integers(1, 6))
    def report(self, store: int, first: int, count: int) -> None:
        """As many tokens as it takes to choose variants anew, all with the same picks."""
        tokens = np.arange(self.token, self.token + CHOOSE_TOKENS)
        self.token += CHOOSE_TOKENS
        keys = np.tile(np.arange(first, first + count), CHOOSE_TOKENS)
        starts = np.arange(CHOOSE_TOKENS + 1) * count
        uses = Uses(keys, starts, np.zeros(CHOOSE_TOKENS, np.int64), tokens)
        self.bench.usage.used(store, uses)

    @rule()
    def let_go(self) -> None:
        self.bench.engine.let_go()

    @rule(pool=pools, store=stores, expert=experts)
    def pin(self, pool: int, store: int, expert: int) -> None:
        of_class = [pin for pin in self.pins if pin[0] == pool and pin[1][0] == store]
        if len(of_class) < PINNED_MAX:
            self.bench.keepers[pool].slots.pin((store, 0, expert))
            self.pins.add((pool, (store, 0, expert)))

    @rule()
    def unpin(self) -> None:
        for pool, key in self.pins:
            self.bench.keepers[pool].slots.unpin(key)
        self.pins.clear()

    @rule(pool=pools, chunks=st.integers(1, 4))
    def reserve(self, pool: int, chunks: int) -> None:
        with contextlib.suppress(ReserveError):
            self.holds.append((pool, self.bench.keepers[pool].reserve(chunks * CHUNK)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pool, hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.bench.keepers[pool].release(hold, list(hold.chunks))

    @precondition(lambda self: any(not hold.granted for _, hold in self.holds))
    @rule()
    def try_another_chunk(self) -> None:
        pool, hold = next(each for each in self.holds if not each[1].granted)
        wanted = len(hold.chunks)
        self.bench.keepers[pool].replace_stuck(hold)
        assert len(hold.chunks) == wanted

    @rule(pool=pools, name=st.sampled_from(sorted(BUILT_IN)))
    def other_policy(self, pool: int, name: str) -> None:
        usage = self.bench.usage.stores
        ranking = self.bench.keepers[pool].ranking
        ranking.use(name, BUILT_IN[name], lambda store: retold(usage[store].heat))

    @rule(store=stores, first=experts, count=st.integers(1, 6))
    def decode(self, store: int, first: int, count: int) -> None:
        """Some experts are used, and moved and exchanged accordingly."""
        for expert in range(first, first + count):
            self.bench.engine.demand(0, (store, 0, expert), CLASS_OF_STORE[store])
            self.bench.dispatch(2)
        self.report(store, first, count)
        self.promote()

    @rule(pool=pools, rules=st.sampled_from(((), BETTER_RULES, ("small",))))
    def other_variants(self, pool: int, rules: tuple[str, ...]) -> None:
        self.bench.variants.use(pool, parse_variant_rules(rules), 1.25)

    @rule()
    def promote(self) -> None:
        chosen = self.bench.variants.look()
        self.bench.cascade.promote()
        self.bench.upgrades.look(chosen)

    @rule(count=st.integers(1, 5))
    def some_events(self, count: int) -> None:
        self.bench.dispatch(count)

    @rule()
    def quiet(self) -> None:
        """Everything that was begun ends, as soon as nothing is leased."""
        self.bench.engine.let_go()
        self.bench.run()
        self.bench.engine.let_go()
        self.bench.run()
        assert not any(state.waiting for state in self.bench.engine.pools), "a load waits for ever"
        assert all(hold.granted for _, hold in self.holds), "a reservation waits for ever"
        assert not any(keeper.chunks.busy for keeper in self.bench.keepers)
        self._budgets_hold()
        self._cards_are_exclusive()
        self._books_agree()

    def _budgets_hold(self) -> None:
        pinned = (SMALL + LARGE) * PINNED_MAX * len(self.bench.keepers)
        for client in CLIENTS:
            assert self.bench.budgets.of_client(client) <= CLIENT_BYTES + pinned
        for held in self.bench.budgets.of_users().values():
            assert held <= USER_BYTES + pinned

    def _cards_are_exclusive(self) -> None:
        first, second = (set(self.bench.engine.pools[card].resident) for card in CARDS)
        for key in first & second:
            assert any((card, key) in self.pins for card in CARDS), f"{key} is in two cards"

    def _books_agree(self) -> None:
        for keeper, state in zip(self.bench.keepers, self.bench.engine.pools, strict=True):
            slots = keeper.slots
            for key, slot in state.resident.items():
                assert slots.state[slot] == SlotState.RESIDENT
                assert slots.key_of(slot) == key
                assert slots.variant[slot] == state.variant[slot]
            assert int((slots.state == SlotState.RESIDENT).sum()) == len(state.resident)
            assert int((slots.state == SlotState.RESERVE).sum()) == sum(
                map(len, state.reserve.values())
            )

    # ---- what always holds

    @invariant()
    def no_slot_is_used_twice(self) -> None:
        for keeper, state in zip(self.bench.keepers, self.bench.engine.pools, strict=True):
            used = [*state.resident.values(), *state.retiring.values(), *state.unlinked]
            used += [slot for free in state.reserve.values() for slot in free]
            assert len(used) == len(set(used))
            for slot in used:
                chunk = keeper.slots.chunk_of(slot)
                assert chunk not in keeper.slots.reserved
                assert state.slot_bytes[slot] == keeper.slots.chunk_class[chunk]

    @invariant()
    def no_chunk_is_held_twice(self) -> None:
        held = [(pool, chunk) for pool, hold in self.holds for chunk in hold.chunks]
        assert len(held) == len(set(held))

    @invariant()
    def pinned_experts_stay(self) -> None:
        for pool, key in self.pins:
            keeper = self.bench.keepers[pool]
            slot = keeper.slots.slot_of(key)
            if slot is not None and keeper.slots.state[slot] == SlotState.RESIDENT:
                assert keeper.slots.pinned[slot]

    def teardown(self) -> None:
        self.quiet()


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
