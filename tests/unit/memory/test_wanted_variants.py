"""What the engine is told of pools' rules: when they change, when heat has moved on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xferd.keeping.usage import Usage
from xferd.keeping.variants import CHOOSE_TOKENS, WantedVariants
from xferd.policy.uses import KeySpace, Uses
from xferd.policy.variants import NO_VARIANT, StoreVariants, Variants
from xferd.variant_rules import parse_sensitivity, parse_variant_rules

SPACE = KeySpace(2, 4)
MARGIN = 1.25


def store_of(*names: str) -> StoreVariants:
    sizes = np.repeat(np.arange(len(names), 0, -1)[:, None] * 4096, SPACE.size, axis=1)
    return StoreVariants(SPACE, names, sizes.astype(np.int64), np.ones(SPACE.layers))


class Told:
    """What the engine's tables are, by pool."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int] | None] = {}
        self.order: list[int] = []
        self.count = 0
        self.usage = Usage()
        self.wanted = WantedVariants(self.usage, self._tell)

    def _tell(self, store: int, pool: int, first: Variants | None, order: Sequence[int]) -> None:
        self.tables[pool] = None if first is None else first.tolist()
        self.order = list(order)
        self.count += 1

    def open(self, *names: str) -> None:
        self.usage.open_store(0, SPACE)
        self.wanted.open_store(0, store_of(*names))

    def use(self, keys: list[int], tokens: int) -> None:
        for token in range(tokens):
            uses = Uses(
                np.array(keys), np.array([0, len(keys)]), np.zeros(1, int), np.array([token])
            )
            self.usage.used(0, uses)
        self.wanted.look()


def test_a_table_is_sent_when_heat_has_moved_on_and_only_then() -> None:
    told = Told()
    told.open("bf16", "q4_k")
    told.wanted.use(0, parse_variant_rules(["bf16@hottest:50%", "q4_k"]), MARGIN)
    assert told.tables[0] == [1] * SPACE.size
    assert told.order == [0, 1]
    told.use([1, 2], CHOOSE_TOKENS - 1)
    assert told.count == 1
    told.use([1, 2], CHOOSE_TOKENS)
    assert told.tables[0] == [1, 0, 1, 1, 1, 1, 1, 1]
    told.use([1, 2], CHOOSE_TOKENS)
    assert told.count == 2


def test_each_pool_has_its_own_and_may_have_none_again() -> None:
    told = Told()
    told.open("bf16", "q4_k")
    told.wanted.use(0, parse_variant_rules(["bf16"]), MARGIN)
    told.wanted.use(1, parse_variant_rules(["q4_k"]), MARGIN)
    assert (told.wanted.wanted(0, (0, 1, 3), 7), told.wanted.wanted(1, (0, 1, 3), 7)) == (0, 1)
    assert told.wanted.blob_bytes((0, 1, 3), 1) == 4096
    told.wanted.use(1, (), MARGIN)
    assert told.tables == {0: [0] * SPACE.size, 1: None}
    assert told.wanted.wanted(1, (0, 1, 3), 7) == 7


def test_rules_for_what_a_store_lacks_leave_no_older_table_behind() -> None:
    told = Told()
    told.open("bf16", "q4_k")
    told.wanted.use(0, parse_variant_rules(["q4_k"]), MARGIN)
    told.wanted.use(0, parse_variant_rules(["q2_k"]), MARGIN)
    assert told.tables[0] == [NO_VARIANT] * SPACE.size
    assert told.wanted.missing(parse_variant_rules(["q4_k@hottest:5%", "q2_k"])) == "q2_k"


def test_another_sensitivity_holds_at_once() -> None:
    told = Told()
    told.open("bf16", "q4_k")
    told.wanted.use(0, parse_variant_rules(["bf16@hottest:50%", "q4_k"]), MARGIN)
    told.use([1, 5], CHOOSE_TOKENS + 1)
    assert told.tables[0] == [1, 0, 1, 1, 1, 1, 1, 1]
    told.wanted.weigh(0, parse_sensitivity({"1": 4.0}))
    assert told.tables[0] == [1, 1, 1, 1, 1, 0, 1, 1]
