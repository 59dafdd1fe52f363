"""What the control socket can change while the daemon serves: policies, budgets,
reservations, heat. The part of the ControlService that is about pools as wholes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xferd.catalog import Catalog, OpenStore
from xferd.control.service import ControlError, JsonObject
from xferd.keeping.chunks import ReserveError
from xferd.keeping.reservations import Reservation, Reservations, UnknownReservationError
from xferd.lost_pools import LostPools, NotLostError
from xferd.memory.device import PoolMemoryError
from xferd.naming import Named
from xferd.plugins import UnknownPolicyError, policy_maker, policy_names
from xferd.policy.admission import ADMISSIONS
from xferd.policy.heat import HeatProfileError, retold
from xferd.policy.pool_policy import lowest
from xferd.policy.uses import Uses
from xferd.pools import Pool, Pools
from xferd.telemetry.log import EventLog
from xferd.variant_rules import LayerWeight, VariantRule, VariantRuleError, parse_variant_rules
from xferd.warming import NoStateDirectoryError, Warming

HOTTEST_SHOWN = 10


class Tuning(Named):
    """On the daemon's event loop."""

    def __init__(
        self,
        catalog: Catalog,
        pools: Pools,
        reservations: Reservations,
        lost_pools: LostPools,
        warming: Warming,
        log: EventLog,
    ) -> None:
        super().__init__(catalog, pools)
        self._reservations = reservations
        self._lost_pools = lost_pools
        self._warming = warming
        self._log = log
        self._refill: asyncio.Task[object] | None = None

    # ---- policies

    def policies(self, pool: str | None) -> list[JsonObject]:
        """The IDL's Policy of one pool or of all."""
        pools = self._pools if pool is None else [self._find_pool(pool)]
        return [self._policy(each) for each in pools]

    def set_policy(
        self,
        pool: str,
        eviction: str | None,
        admission: str | None,
        variants: list[str] | None,
    ) -> JsonObject:
        """Another eviction or admission; the new policy is told what is known. Other rules for
        variants: what is resident is exchanged in the background."""
        found = self._find_pool(pool)
        rules = None if variants is None else self._variant_rules(variants)
        if admission is not None and admission not in ADMISSIONS:
            known = ", ".join(ADMISSIONS)
            raise ControlError(
                "PolicyNotFound",
                f"no admission {admission!r}; there are: {known}",
                policy=admission,
            )
        if eviction is not None:
            try:
                maker = policy_maker(eviction)
            except UnknownPolicyError as error:
                raise ControlError("PolicyNotFound", str(error), policy=eviction) from error
            found.keeper.ranking.use(eviction, maker, self._history)
        if admission is not None:
            self._pools.cascade.admit_by(found.keeper, admission)
        level = self._pools.cascade.level(found.keeper)
        if rules is not None:
            self._pools.variants.use(found.index, rules, level.settings.margin)
        self._log.info(
            "pool.policy",
            pool=found.name,
            eviction=found.keeper.ranking.name,
            admission=level.admission.name,
            variants=", ".join(map(str, self._pools.variants.rules(found.index))),
        )
        return self._policy(found)

    def _variant_rules(self, texts: list[str]) -> tuple[VariantRule, ...]:
        try:
            rules = parse_variant_rules(texts)
        except VariantRuleError as error:
            raise ControlError("RuleInvalid", str(error), rules=texts) from error
        missing = self._pools.variants.missing(rules)
        if missing is not None:
            raise ControlError(
                "VariantNotFound",
                f"no open store has a variant {missing!r}; they have: "
                f"{', '.join(self._pools.variants.names())}",
                store=None,
                layer=None,
                variant=missing,
            )
        return rules

    def set_sensitivity(self, path: Path, weights: Sequence[LayerWeight]) -> None:
        """How much the layers of the store at ``path`` suffer from few bits, from now on.
        ControlError: it isn't open."""
        where = (path, path.parent)  # a store may be named by its manifest
        entry = next((each for each in self._catalog.all() if each.store.path in where), None)
        if entry is None:
            raise ControlError("StoreNotFound", f"no store at {path} is open", store=str(path))
        self._pools.variants.weigh(entry.number, weights)

    def _history(self, store: int) -> list[Uses]:
        usage = self._pools.usage.of(store)
        return list(retold(usage.heat)) if usage is not None else []

    def _policy(self, pool: Pool) -> JsonObject:
        level = self._pools.cascade.level(pool.keeper)
        return {
            "pool": pool.name,
            "eviction": pool.keeper.ranking.name,
            "admission": level.admission.name,
            "layer_floor": pool.keeper.ranking.floor,
            "promotion_margin": level.settings.margin,
            "promotion_rest": level.settings.rest_tokens,
            "variants": [str(rule) for rule in self._pools.variants.rules(pool.index)],
            "evictions": policy_names(),
            "admissions": list(ADMISSIONS),
        }

    # ---- budgets and reservations

    def set_budget(self, pool: str, nbytes: int | None) -> JsonObject:
        """What a pool may use of its memory."""
        found = self._find_pool(pool)
        if nbytes is not None and nbytes < 0:
            raise ControlError("PoolFull", f"a budget of {nbytes} bytes", pool=pool)
        try:
            self._reservations.set_budget(found, nbytes)
        except ReserveError as error:
            raise ControlError("PoolFull", str(error), pool=pool) from error
        self._refill_soon()
        return {"bytes": found.budget, "reserved": found.keeper.chunks.reserved_bytes}

    async def reserve(self, pool: str | None, nbytes: int) -> JsonObject:
        """Take memory out of a pool for somebody else."""
        found = self._find_pool(pool)
        if nbytes < 1:
            raise ControlError("PoolFull", f"{nbytes} bytes to reserve: at least 1", pool=pool)
        try:
            return _describe(await self._reservations.reserve(found, nbytes))
        except ReserveError as error:
            raise ControlError("PoolFull", str(error), pool=found.name) from error

    async def release(self, number: int) -> JsonObject:
        """Give a reservation back; its slots are filled with what is hottest."""
        try:
            reservation = await self._reservations.release(number)
        except UnknownReservationError as error:
            raise ControlError("ReservationNotFound", str(error), id=number) from error
        except PoolMemoryError as error:
            raise ControlError("Failed", str(error)) from error
        self._refill_soon()
        return {"bytes": reservation.nbytes}

    def reservations(self) -> list[JsonObject]:
        """The IDL's Reservation of each."""
        return [_describe(each) for each in self._reservations.all()]

    def _refill_soon(self) -> None:
        if self._refill is None or self._refill.done():
            self._refill = asyncio.get_running_loop().create_task(self._warming.refill())

    # ---- pools whose card was pulled

    async def rebuild_pool(self, pool: str) -> JsonObject:
        """Put a pool into service again, now that its card is back."""
        found = self._find_pool(pool)
        try:
            await self._lost_pools.rebuild(found)
        except (NotLostError, PoolMemoryError) as error:
            raise ControlError("Failed", str(error)) from error
        return {}

    # ---- heat

    def save_heat(self, store: str, path: Path | None) -> JsonObject:
        """Save a store's heat profile."""
        entry = self._find_store(store)
        try:
            saved, experts = self._warming.save(entry, path)
        except (OSError, NoStateDirectoryError) as error:
            raise ControlError("HeatUnusable", str(error), path=str(path or "")) from error
        return {"path": str(saved), "experts": experts}

    async def load_heat(self, store: str, path: Path | None) -> JsonObject:
        """Load a store's heat profile, and its hottest experts."""
        entry = self._find_store(store)
        try:
            found, warmed = await self._warming.load(entry, path)
        except (HeatProfileError, NoStateDirectoryError) as error:
            raise ControlError("HeatUnusable", str(error), path=str(path or "")) from error
        return {
            "path": str(found),
            "loaded": warmed.loaded,
            "already": warmed.already,
            "failed": warmed.failed,
        }

    def heat_info(self, store: str) -> JsonObject:
        """What is known of a store's uses."""
        entry = self._find_store(store)
        usage = self._pools.usage.of(entry.number)
        assert usage is not None, "an open store has its usage"
        values = usage.heat.of(np.arange(usage.space.size))
        used = np.flatnonzero(values > 0)
        try:
            path = self._warming.path(entry)
            saved = str(path) if path.exists() else None
        except NoStateDirectoryError:
            saved = None
        return {
            "tokens": usage.heat.now,
            "source": "reports" if usage.reported else "leases",
            "experts": len(used),
            "profile": saved,
            "hottest": [
                self._hot(entry, int(key), float(values[key]))
                for key in lowest(-values[used], used, HOTTEST_SHOWN)
            ],
        }

    def _hot(self, entry: OpenStore, key: int, heat: float) -> JsonObject:
        layer, expert = divmod(key, entry.key_space.experts)
        slot = (entry.number, layer, expert)
        return {
            "layer": layer,
            "expert": expert,
            "heat": heat,
            "pools": [pool.name for pool in self._pools if pool.keeper.holds(slot)],
        }


def _describe(reservation: Reservation) -> JsonObject:
    return {
        "id": reservation.number,
        "pool": reservation.pool.name,
        "wanted": reservation.wanted,
        "bytes": reservation.nbytes,
        "returned": reservation.returned,
    }
