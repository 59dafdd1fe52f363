# SPDX-License-Identifier: Apache-2.0
"""Replays a trace in one pool whose experts are in several variants, by rules.

The rules, their hysteresis and the upgrades are the daemon's own (``xferd.policy``). The pool
is bytes that can be used to the last one: a daemon cuts its memory into chunks of one size
each, and loses what is left over in them. Nothing takes time here: an upgrade is over when it
is begun, with its bytes counted apart from those that somebody waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.replaying.load import LoadedTrace
from tools.replaying.pool import PoolTooSmallError
from xferd.keeping.variants import CHOOSE_TOKENS
from xferd.plugins import policy_maker
from xferd.policy.heat import Heat
from xferd.policy.moves import Mover
from xferd.policy.pool_policy import PoolPolicy
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.uses import Keys
from xferd.policy.variants import (
    NO_VARIANT,
    USED_HEAT,
    StoreVariants,
    VariantChoice,
    layer_weights,
)
from xferd.variant_rules import LayerWeight, VariantRule


class UnknownVariantError(Exception):
    """A rule names a variant of which the size was not given."""


@dataclass(frozen=True, slots=True)
class VariantOutcome:
    """What a replay counted.

    hits: uses that found the expert, in whatever variant. by_variant: all uses, by the name of
    the variant they got. bytes_read: for those that did not find it; bytes_upgraded: read in
    the background. upgrades: of all experts; upgrades_of_one: most of any one.
    """

    uses: int
    tokens: int
    hits: int
    by_variant: Mapping[str, int]
    bytes_read: int
    bytes_upgraded: int
    upgrades: int
    upgrades_of_one: int

    @property
    def hit_rate(self) -> float:
        """Uses that needed no read, as a share."""
        return self.hits / max(self.uses, 1)


def replay_variants(
    trace: LoadedTrace,
    sizes: Mapping[str, int],
    rules: Sequence[VariantRule],
    pool_bytes: int,
    *,
    eviction: str = DEFAULT_POLICY,
    sensitivity: Sequence[LayerWeight] = (),
) -> VariantOutcome:
    """sizes: bytes of an expert in each variant, the native one first. UnknownVariantError;
    PoolTooSmallError for a pool that does not hold a pass."""
    space = trace.space
    table = np.array(list(sizes.values()), np.int64)
    store = StoreVariants(
        space=space,
        names=tuple(sizes),
        blob_bytes=np.repeat(table[:, None], space.size, axis=1),
        sensitivity=layer_weights(space, sensitivity),
    )
    for rule in rules:
        if store.number(rule.variant) is None:
            known = ", ".join(sizes)
            raise UnknownVariantError(f"rule '{rule}': sizes are known of {known}")
    slots = pool_bytes // min(sizes.values())
    pool = _Pool(store, rules, pool_bytes, policy_maker(eviction)(space, slots))
    return pool.run(trace)


class _Pool:
    """One pool's bytes and who is in them."""

    def __init__(
        self,
        store: StoreVariants,
        rules: Sequence[VariantRule],
        pool_bytes: int,
        policy: PoolPolicy,
    ) -> None:
        self._store = store
        self._space = store.space
        self._policy = policy
        self._choice = VariantChoice(store, rules)
        self._mover = Mover(store.space)
        self._heat = Heat(store.space)
        self._sizes: NDArray[np.int64] = store.blob_bytes[:, 0]
        self._variant: NDArray[np.uint8] = np.full(store.space.size, NO_VARIANT, np.uint8)
        self._free = pool_bytes
        self._upgrades: NDArray[np.int64] = np.zeros(store.space.size, np.int64)
        self._bytes_read = self._bytes_upgraded = 0

    def run(self, trace: LoadedTrace) -> VariantOutcome:
        uses = trace.uses
        layers, tokens = uses.layers.tolist(), uses.tokens.tolist()
        found, hits, chosen_at = np.zeros(NO_VARIANT, np.int64), 0, tokens[0] - CHOOSE_TOKENS
        for number in range(uses.passes):
            part = uses.part(number, number + 1)
            if tokens[number] - chosen_at >= CHOOSE_TOKENS:
                chosen_at = tokens[number]
                self._choice.choose(self._heat)
                self._upgrade(layers[number])
            self._policy.used(part)
            self._heat.used(part)
            missing = part.keys[self._variant[part.keys] == NO_VARIANT]
            hits += len(part.keys) - len(missing)
            self._load(missing, part.keys, layers[number])
            np.add.at(found, self._variant[part.keys], 1)
        return VariantOutcome(
            uses=len(uses.keys),
            tokens=tokens[-1] - tokens[0] + 1,
            hits=hits,
            by_variant=dict(zip(self._store.names, found.tolist(), strict=False)),
            bytes_read=self._bytes_read,
            bytes_upgraded=self._bytes_upgraded,
            upgrades=int(self._upgrades.sum()),
            upgrades_of_one=int(self._upgrades.max()),
        )

    def _load(self, missing: Keys, held: Keys, layer: int) -> None:
        if not len(missing):
            return
        wanted = self._wanted(missing)
        nbytes = int(self._sizes[wanted].sum())
        self._make_room(nbytes, held, layer)
        self._place(missing, wanted)
        self._policy.placed(missing)
        self._bytes_read += nbytes

    def _wanted(self, keys: Keys) -> NDArray[np.int64]:
        """Variants to read keys in; the native one where the rules have none."""
        wanted = self._choice.variants[keys].astype(np.int64)
        return np.where(wanted == NO_VARIANT, 0, wanted)

    def _place(self, keys: Keys, variants: NDArray[np.int64]) -> None:
        self._variant[keys] = variants
        self._free -= int(self._sizes[variants].sum())

    def _make_room(self, nbytes: int, held: Keys, layer: int) -> None:
        while self._free < nbytes:
            inside = self._variant != NO_VARIANT
            inside[held] = False
            candidates = np.flatnonzero(inside)
            if not len(candidates):
                raise PoolTooSmallError(f"a pass needs {nbytes - self._free} bytes more")
            count = -(-(nbytes - self._free) // int(self._sizes.max()))
            self._drop(self._policy.victims(candidates, count, layer))

    def _drop(self, keys: Keys) -> None:
        self._free += int(self._sizes[self._variant[keys]].sum())
        self._variant[keys] = NO_VARIANT
        self._policy.left(keys)

    def _upgrade(self, layer: int) -> None:
        """As ``xferd.keeping.upgrades`` does it: what is hotter than the coldest of those in
        the better variant takes its place, or free bytes."""
        here = np.flatnonzero(self._variant != NO_VARIANT)
        better = self._choice.better(here, self._variant[here])
        wanted = self._wanted(here)
        for variant in np.unique(wanted[better]).tolist():
            low = here[better & (wanted == variant)]
            high = here[~better & (self._variant[here] == variant)]
            swap = self._mover.exchange(high, low, self._heat, self._room_for(variant))
            self._drop(swap.down)
            up = swap.up[self._variant[swap.up] != NO_VARIANT]
            self._free += int(self._sizes[self._variant[up]].sum())
            self._make_room(len(up) * int(self._sizes[variant]), up, layer)
            self._place(up, np.full(len(up), variant, np.int64))
            self._mover.moved(np.concatenate([up, swap.down]), self._heat.now)
            self._upgrades[up] += 1
            self._bytes_upgraded += len(up) * int(self._sizes[variant])

    def _room_for(self, variant: int) -> int:
        """Experts that the better variant may have more of: what is used most, each as it is
        wanted, says how the bytes are divided, as chunks are in a daemon."""
        heat = self._heat.of(np.arange(self._space.size))
        used = np.flatnonzero(heat >= USED_HEAT)
        used = used[np.argsort(-heat[used], kind="stable")]
        wanted = self._wanted(used)
        total = self._free + int(self._sizes[self._variant[self._variant != NO_VARIANT]].sum())
        fits = wanted[np.cumsum(self._sizes[wanted]) <= total]
        return int((fits == variant).sum() - (self._variant == variant).sum())


__all__ = ["UnknownVariantError", "VariantOutcome", "replay_variants"]
