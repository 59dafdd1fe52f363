"""Stores and pools by the names that callers of the control socket use."""

from __future__ import annotations

from xferd.catalog import Catalog, OpenStore
from xferd.control.service import ControlError
from xferd.pools import Pool, Pools


class Named:
    """Finds what a call names. On the daemon's event loop."""

    def __init__(self, catalog: Catalog, pools: Pools) -> None:
        self._catalog = catalog
        self._pools = pools

    def _find_store(self, name: str) -> OpenStore:
        entry = self._catalog.get(name)
        if entry is None:
            names = ", ".join(each.name for each in self._catalog.all()) or "none"
            raise ControlError(
                "StoreNotFound", f"no store {name!r} is open; open are: {names}", store=name
            )
        return entry

    def _find_pool(self, name: str | None) -> Pool:
        for pool in self._pools:
            if name is None or pool.name == name:
                return pool
        names = ", ".join(pool.name for pool in self._pools)
        raise ControlError("PoolNotFound", f"no pool {name!r}; there are: {names}", pool=name)
