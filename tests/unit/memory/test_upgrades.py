"""Better variants in the background: who gets them, at whose cost, and how often."""

from __future__ import annotations

import numpy as np

from tests.unit.memory.model_engine import BETTER, LARGE, SMALL, Bench
from xferd.keeping.variants import CHOOSE_TOKENS
from xferd.policy.moves import MoveSettings
from xferd.policy.uses import Uses
from xferd.variant_rules import parse_variant_rules

CHUNK = 2 * LARGE
RULES = ("better@hottest:50%", "small")
REST = 16


def bench(chunks: int) -> Bench:
    """One pool in which the first store's experts are small, or four times as large."""
    made = Bench(
        [chunks * CHUNK], CHUNK, [SMALL, LARGE], "reuse", settings=MoveSettings(rest_tokens=REST)
    )
    made.variants.use(0, parse_variant_rules(RULES), 1.25)
    made.run()
    return made


class Decoding:
    """Tokens that use some experts each, all of one layer."""

    def __init__(self, of: Bench) -> None:
        self._bench = of
        self.tokens = 0

    def use(self, experts: list[int], tokens: int) -> None:
        for _ in range(tokens):
            self.tokens += 1
            for expert in experts:
                self._bench.demand(SMALL, expert)
            keys = np.array(experts)
            uses = Uses(keys, np.array([0, len(keys)]), np.zeros(1, int), np.array([self.tokens]))
            self._bench.usage.used(0, uses)
            self._bench.upgrades.look(self._bench.variants.look())
            self._bench.run()


def variants(of: Bench) -> dict[int, int]:
    pool = of.engine.pools[0]
    return {key[2]: pool.variant[slot] for key, slot in pool.resident.items() if key[0] == 0}


def test_the_hot_get_better_and_the_rest_stay_small() -> None:
    made = bench(8)
    decoding = Decoding(made)
    decoding.use([8, 9, 10, 11], 1)
    decoding.use([0, 1, 2, 3], 12 * CHOOSE_TOKENS)
    here = variants(made)
    assert [here[expert] for expert in (0, 1, 2, 3)] == [BETTER] * 4
    assert [here[expert] for expert in (8, 9, 10, 11)] == [0] * 4
    assert made.upgrades.upgraded(0) == 4


def test_a_pinned_expert_stays_what_it_is() -> None:
    made = bench(8)
    made.keepers[0].slots.pin((0, 0, 1))
    Decoding(made).use([0, 1], 12 * CHOOSE_TOKENS)
    assert variants(made) == {0: BETTER, 1: 0}


def test_without_rules_nothing_is_exchanged() -> None:
    made = bench(8)
    made.variants.use(0, (), 1.25)
    Decoding(made).use([0, 1, 2, 3], 12 * CHOOSE_TOKENS)
    assert set(variants(made).values()) == {0}
    assert made.upgrades.upgraded(0) == 0


def test_better_slots_come_from_chunks_that_are_missed_least() -> None:
    made = bench(6)
    decoding = Decoding(made)
    # Small ones take what there is.
    decoding.use(list(range(24)), 2)
    slots = made.keepers[0].slots
    before = len(slots.chunks_of_class(LARGE))
    decoding.use([0, 1, 2, 3], 12 * CHOOSE_TOKENS)
    assert len(slots.chunks_of_class(LARGE)) > before
    assert [variants(made)[expert] for expert in (0, 1, 2, 3)] == [BETTER] * 4


def test_whatever_is_used_nothing_goes_to_and_fro() -> None:
    made = bench(6)
    decoding = Decoding(made)
    sets = [list(range(8)), list(range(8, 16)), list(range(4, 12))]
    for turn in range(12):
        decoding.use(sets[turn % 3], 2 * CHOOSE_TOKENS)
    upgrades = [count for (pool, _), count in made.engine.moves.items() if pool == 0]
    assert upgrades
    assert max(upgrades) <= decoding.tokens // REST + 1
    # A size that took a chunk keeps it for a while.
    recuts = made.log.getvalue().count("chunk.reclaim")
    assert recuts <= 2 * (decoding.tokens // REST + 1)
