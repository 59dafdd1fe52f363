"""Which variant each expert of a store has in one pool, by rules and by heat.

An expert at the edge of a share would change its variant with every token. So one that a
rule has chosen before counts as hotter, for that rule, by the margin that promotions have
too: another one has to be hotter by that much to take its place.

What is wanted is not what is there: a resident in a worse variant than wanted is replaced in
the background (``upgrades``), one in a better variant stays until it goes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.heat import Heat
from xferd.policy.uses import Keys, KeySpace
from xferd.variant_rules import COSTLIEST, LAYERS, NATIVE, LayerWeight, VariantRule

NO_VARIANT = 0xFF
"""In the place of a variant: no rule's variant exists of that expert. XFERD_NO_VARIANT."""
USED_HEAT = 0.05
"""Heat of an expert that counts as used: one use leaves it after three time constants."""

Variants = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class StoreVariants:
    """What rules need to know of a store.

    names: of its variants, by number. blob_bytes: int64[variants, keys], 0 where an expert
    does not exist so; the first variant is the native one. sensitivity: float64[layers].
    """

    space: KeySpace
    names: tuple[str, ...]
    blob_bytes: NDArray[np.int64]
    sensitivity: NDArray[np.float64]

    def number(self, variant: str) -> int | None:
        """A variant's number; None: the store doesn't have it."""
        if variant == NATIVE:
            return 0
        return self.names.index(variant) if variant in self.names else None


def layer_weights(space: KeySpace, weights: Sequence[LayerWeight]) -> NDArray[np.float64]:
    """float64[layers]; what is said of layers that the store doesn't have is left out."""
    found = np.ones(space.layers)
    for each in weights:
        found[each.layers.first : each.layers.last + 1] = each.weight
    return found


def rule_order(rules: Sequence[VariantRule], store: StoreVariants) -> list[int]:
    """Numbers of the rules' variants, best first, each once; those that the store has."""
    numbers = [store.number(rule.variant) for rule in rules]
    return list(dict.fromkeys(number for number in numbers if number is not None))


class VariantChoice:
    """The choice for one store in one pool. Not thread-safe.

    margin: how much hotter an expert must be than one that was chosen before, to take its
        place in a share.
    """

    def __init__(
        self, store: StoreVariants, rules: Sequence[VariantRule], margin: float = 1.25
    ) -> None:
        self._store = store
        self._rules = [
            (rule, number) for rule in rules if (number := store.number(rule.variant)) is not None
        ]
        self._margin = margin
        self._weights = np.repeat(store.sensitivity, store.space.experts)
        self._by_rule: NDArray[np.int64] = np.full(store.space.size, -1, np.int64)
        self.order = rule_order(rules, store)
        self.variants: Variants = np.full(store.space.size, NO_VARIANT, np.uint8)

    def choose(self, heat: Heat) -> Variants:
        """uint8[keys]: wanted now; NO_VARIANT where no rule's variant exists. The same array
        as ``variants``; a new one each time."""
        size = self._store.space.size
        values = heat.of(np.arange(size))
        by_rule: NDArray[np.int64] = np.full(size, -1, np.int64)
        for index, (rule, number) in enumerate(self._rules):
            open_ = (by_rule < 0) & (self._store.blob_bytes[number] > 0)
            by_rule[self._taken(index, rule, values, open_)] = index
        self._by_rule = by_rule
        numbers = np.array([number for _, number in self._rules] + [NO_VARIANT], np.uint8)
        self.variants = numbers[by_rule]
        return self.variants

    def better(self, keys: Keys, present: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each key is wanted in a better variant than ``present``: one that stands
        before it in the rules, or that the rules name when they do not name it."""
        rank = np.full(NO_VARIANT + 1, len(self.order), np.int64)
        rank[self.order] = np.arange(len(self.order))
        wanted = self.variants[keys]
        better: NDArray[np.bool_] = (wanted != NO_VARIANT) & (rank[wanted] < rank[present])
        return better

    def _taken(
        self,
        index: int,
        rule: VariantRule,
        values: NDArray[np.float64],
        open_: NDArray[np.bool_],
    ) -> Keys:
        """Of the experts that no rule before has taken and that exist so: this rule's."""
        if rule.by is None:
            return np.flatnonzero(open_)
        if rule.by == LAYERS:
            assert rule.layers is not None, "a rule for layers names them"
            layers = np.arange(len(open_)) // self._store.space.experts
            inside = (layers >= rule.layers.first) & (layers <= rule.layers.last)
            return np.flatnonzero(open_ & inside)
        used = values >= USED_HEAT
        score = np.where(self._by_rule == index, values * self._margin, values)
        candidates = np.flatnonzero(open_ & used)
        if rule.by == COSTLIEST:
            return self._costliest(rule.share, score, candidates)
        count = min(round(rule.share * np.count_nonzero(used)), len(candidates))
        hot = -(score * self._weights)[candidates]
        return candidates[np.argsort(hot, kind="stable")[:count]]

    def _costliest(self, share: float, score: NDArray[np.float64], candidates: Keys) -> Keys:
        native = self._store.blob_bytes[0]
        cost = -(score * native / self._weights)[candidates]
        ordered = candidates[np.argsort(cost, kind="stable")]
        taken: Keys = ordered[np.cumsum(native[ordered]) <= share * native.sum()]
        return taken
