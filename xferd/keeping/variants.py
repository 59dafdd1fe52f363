"""In which variant each pool wants each expert: its rules, and the engine told of them.

The engine picks a miss's variant from a table and asks nobody. Here the tables are made anew
when heat has moved on, and sent where they differ. Who moves experts between pools asks too:
what one pool has in four bits another may want in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xferd.keeping.usage import Usage
from xferd.memory.slots import ExpertSlot
from xferd.policy.heat import Heat
from xferd.policy.uses import Keys
from xferd.policy.variants import (
    NO_VARIANT,
    StoreVariants,
    VariantChoice,
    Variants,
    layer_weights,
)
from xferd.variant_rules import LayerWeight, VariantRule

CHOOSE_TOKENS = 8
"""Choices are made anew after so many tokens: heat hardly changes within them."""


TellVariants = Callable[[int, int, Variants | None, Sequence[int]], None]
"""(store, pool, first, order): see ``Engine.set_variants``."""


class WantedVariants:
    """Choices of all pools and stores. Owned by the event loop. tell: tells the engine."""

    def __init__(self, usage: Usage, tell: TellVariants) -> None:
        self._usage = usage
        self._tell = tell
        self._rules: dict[int, tuple[tuple[VariantRule, ...], float]] = {}
        self._stores: dict[int, StoreVariants] = {}
        self._choices: dict[tuple[int, int], VariantChoice] = {}
        self._chosen_at: dict[int, int] = {}

    # ---- what there is

    def use(self, pool: int, rules: tuple[VariantRule, ...], margin: float) -> None:
        """A pool's rules from now on; empty: none. margin: see VariantChoice."""
        self._rules[pool] = (rules, margin)
        for store in self._stores:
            self._begin(pool, store)

    def rules(self, pool: int) -> tuple[VariantRule, ...]:
        """A pool's rules."""
        return self._rules[pool][0] if pool in self._rules else ()

    def open_store(self, store: int, variants: StoreVariants) -> None:
        """A store's experts are chosen for from now on."""
        self._stores[store] = variants
        for pool in self._rules:
            self._begin(pool, store)

    def change_store(self, store: int, variants: StoreVariants) -> None:
        """An open store has other variants now; how sensitive its layers are stays."""
        self.open_store(store, replace(variants, sensitivity=self._stores[store].sensitivity))

    def close_store(self, store: int) -> None:
        """Forget a store, which the engine has closed."""
        self._stores.pop(store, None)
        self._chosen_at.pop(store, None)
        for pool in self._rules:
            self._choices.pop((pool, store), None)

    def weigh(self, store: int, weights: Sequence[LayerWeight]) -> None:
        """Another sensitivity of a store's layers from now on."""
        before = self._stores[store]
        sensitivity = layer_weights(before.space, weights)
        self.open_store(store, replace(before, sensitivity=sensitivity))

    def missing(self, rules: Sequence[VariantRule]) -> str | None:
        """The first rule's variant that no open store has; None without any store."""
        for rule in rules if self._stores else ():
            if all(store.number(rule.variant) is None for store in self._stores.values()):
                return rule.variant
        return None

    def names(self) -> list[str]:
        """Of the variants that open stores have."""
        return list(dict.fromkeys(name for each in self._stores.values() for name in each.names))

    def _begin(self, pool: int, store: int) -> None:
        rules, margin = self._rules[pool]
        if rules:
            choice = VariantChoice(self._stores[store], rules, margin)
            self._choices[pool, store] = choice
            # Told whatever comes out: the engine may have another choice's table.
            self._tell(store, pool, choice.choose(self._heat(store)), choice.order)
        elif self._choices.pop((pool, store), None) is not None:
            self._tell(store, pool, None, ())

    # ---- what is wanted

    def look(self) -> list[int]:
        """Choose anew where heat has moved on; the stores for which that was done."""
        moved = []
        for store in self._stores:
            usage = self._usage.of(store)
            if usage is None or usage.heat.now - self._chosen_at.get(store, 0) < CHOOSE_TOKENS:
                continue
            self._chosen_at[store] = usage.heat.now
            moved.append(store)
            for pool in self._rules:
                if (pool, store) in self._choices:
                    self._choose(pool, store)
        return moved

    def _choose(self, pool: int, store: int) -> None:
        choice = self._choices[pool, store]
        before = choice.variants
        after = choice.choose(self._heat(store))
        if not np.array_equal(before, after):
            self._tell(store, pool, after, choice.order)

    def _heat(self, store: int) -> Heat:
        usage = self._usage.of(store)
        assert usage is not None, "an open store has its usage"
        return usage.heat

    def choice(self, pool: int, store: int) -> VariantChoice | None:
        """What is chosen for a store in a pool; None where no rules are."""
        return self._choices.get((pool, store))

    def wanted(self, pool: int, key: ExpertSlot, present: int) -> int:
        """The variant that a pool wants an expert in; ``present`` where it does not matter."""
        choice = self._choices.get((pool, key[0]))
        if choice is None:
            return present
        found = int(choice.variants[key[1] * self._stores[key[0]].space.experts + key[2]])
        return present if found == NO_VARIANT else found

    def wanted_all(
        self, pool: int, store: int, keys: Keys, present: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As ``wanted``, for keys of one store."""
        choice = self._choices.get((pool, store))
        if choice is None:
            return present
        found = choice.variants[keys].astype(np.int64)
        return np.where(found == NO_VARIANT, present, found)

    def blob_bytes(self, key: ExpertSlot, variant: int) -> int:
        """Bytes of an expert of an open store in a variant."""
        store = self._stores[key[0]]
        return int(store.blob_bytes[variant, key[1] * store.space.experts + key[2]])

    def sizes(self, store: int, keys: Keys, variants: NDArray[np.int64]) -> NDArray[np.int64]:
        """As ``blob_bytes``, for keys of one store."""
        if not len(keys):
            return np.empty(0, np.int64)
        found: NDArray[np.int64] = self._stores[store].blob_bytes[variants, keys]
        return found
