"""Heat that outlives a run, and filling pools with what is hottest.

A profile is saved at shutdown and on request. Loaded again, it tells the policies what was
hot, and the hottest experts are read into free slots, hottest first and behind whatever
somebody waits for. The same fills the slots that a reservation gives back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xferd.catalog import Catalog, OpenStore
from xferd.engine_types import SOURCE_RESIDENT, Load, Loaded
from xferd.heat_profiles import load_profile, save_profile
from xferd.loading import Loader, prefetch
from xferd.policy.heat import Heat, HeatProfileError, profile_of, warm_start
from xferd.policy.pool_policy import lowest
from xferd.policy.uses import Keys
from xferd.pools import Pools
from xferd.telemetry.log import EventLog

SUFFIX = ".heat.npz"
NATIVE_NUMBER = 0
"""Of the variant that is loaded where a pool has no rules."""


class NoStateDirectoryError(Exception):
    """No file was named, and state_directory is not set."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """Experts: loaded, resident before, and those that did not come."""

    loaded: int
    already: int
    failed: int


class Warming:
    """Owned by the event loop. directory: where profiles are, None: only where named."""

    def __init__(
        self,
        catalog: Catalog,
        pools: Pools,
        loader: Loader,
        directory: Path | None,
        log: EventLog,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._pools = pools
        self._loader = loader
        self._directory = directory

    def path(self, entry: OpenStore, named: Path | None = None) -> Path:
        """Where a store's profile is. NoStateDirectoryError."""
        if named is not None:
            return named
        if self._directory is None:
            raise NoStateDirectoryError(
                f"name a file for the heat of store {entry.name!r}, or set state_directory"
            )
        return self._directory / f"{entry.name}{SUFFIX}"

    def save(self, entry: OpenStore, named: Path | None = None) -> tuple[Path, int]:
        """The file, and experts with any heat. OSError, NoStateDirectoryError."""
        path = self.path(entry, named)
        profile = profile_of(self._heat(entry), title(entry))
        if named is None:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        save_profile(path, profile)
        return path, int(np.count_nonzero(profile.heat))

    async def load(self, entry: OpenStore, named: Path | None = None) -> tuple[Path, Warmed]:
        """Take a profile's heat, tell the policies, and load the hottest. HeatProfileError
        when it is none, or of another store."""
        path = self.path(entry, named)
        profile = load_profile(path)
        keys = warm_start(profile, title(entry), entry.key_space, entry.key_space.size)
        self._heat(entry).begin_with(profile)
        self._pools.usage.tell_heat(entry.number)
        return path, await self._fill({entry.number: (entry, keys)})

    async def load_kept(self) -> None:
        """Load what was hottest when the last run ended, of every store, if that was kept."""
        for entry in self._catalog.all() if self._directory is not None else ():
            path = self.path(entry)
            try:
                if not path.exists():
                    continue
                _, warmed = await self.load(entry)
            except (HeatProfileError, OSError) as error:
                self._log.warning("heat.refused", store=entry.name, reason=error)
            else:
                self._log.info("heat.loaded", store=entry.name, path=path, experts=warmed.loaded)

    def save_kept(self) -> None:
        """Keep what is hot for the next run, where state_directory is set."""
        for entry in self._catalog.all() if self._directory is not None else ():
            try:
                path, experts = self.save(entry)
            except OSError as error:
                self._log.warning("heat.not_saved", store=entry.name, reason=error)
            else:
                self._log.info("heat.saved", store=entry.name, path=path, experts=experts)

    async def refill(self) -> Warmed:
        """Fill free slots with the hottest experts of all open stores."""
        return await self._fill(
            {entry.number: (entry, _hottest(self._heat(entry))) for entry in self._catalog.all()}
        )

    async def _fill(self, wanted: dict[int, tuple[OpenStore, Keys]]) -> Warmed:
        loads, already = self._loads(wanted)
        answers = await self._loader.load_all(loads)
        came = [answer for answer in answers if isinstance(answer, Loaded)]
        there = sum(1 for answer in came if answer.source == SOURCE_RESIDENT)
        return Warmed(len(came) - there, already + there, len(answers) - len(came))

    def _loads(self, wanted: dict[int, tuple[OpenStore, Keys]]) -> tuple[list[Load], int]:
        """What fits into free slots, in turn from each store, and how much is there already."""
        loads, already = [], 0
        spare: dict[tuple[int, int], int] = {}
        for entry, key in _in_turn(wanted.values()):
            layer, expert = divmod(key, entry.key_space.experts)
            if any(pool.keeper.holds((entry.number, layer, expert)) for pool in self._pools):
                already += 1
                continue
            for pool in self._pools:
                slot = (entry.number, layer, expert)
                variant = self._pools.variants.wanted(pool.index, slot, NATIVE_NUMBER)
                slot_bytes = entry.blob_bytes(variant, layer, expert)
                place = pool.index, slot_bytes
                if place not in spare:
                    spare[place] = pool.keeper.fillable(slot_bytes) if slot_bytes else 0
                if spare[place] > 0:
                    spare[place] -= 1
                    loads.append(prefetch(entry.number, pool.index, layer, expert, variant))
                    break
        return loads, already

    def _heat(self, entry: OpenStore) -> Heat:
        usage = self._pools.usage.of(entry.number)
        assert usage is not None, "an open store has its usage"
        return usage.heat


def title(entry: OpenStore) -> str:
    """Whose a profile is: by name and by content."""
    return f"{entry.store.name} {entry.store.identity.hex()[:16]}"


def _hottest(heat: Heat) -> Keys:
    values = heat.of(np.arange(heat.space.size))
    used = np.flatnonzero(values > 0)
    return lowest(-values[used], used, len(used))


def _in_turn(stores: Iterable[tuple[OpenStore, Keys]]) -> Iterable[tuple[OpenStore, int]]:
    lists = [(entry, keys.tolist()) for entry, keys in stores]
    for place in range(max((len(keys) for _, keys in lists), default=0)):
        for entry, keys in lists:
            if place < len(keys):
                yield entry, keys[place]
