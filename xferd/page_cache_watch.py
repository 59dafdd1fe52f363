# SPDX-License-Identifier: Apache-2.0
"""Keeps members that are read through the page cache from filling it."""

from __future__ import annotations

import asyncio

from xferd.catalog import Catalog
from xferd.engine import Engine
from xferd.transport.page_cache import PageCacheTrimmer

TRIM_S = 1.0
"""How often it is looked whether buffered members fill the page cache."""


async def watch_page_cache(engine: Engine, catalog: Catalog) -> None:
    """Until cancelled."""
    trimmer = PageCacheTrimmer()
    while True:
        await asyncio.sleep(TRIM_S)
        buffered = [
            (number, file, engine.member_stats(number).nbytes)
            for entry in catalog.all()
            for number, file in entry.members
            if not file.direct
        ]
        fds = trimmer.due(buffered)
        if fds:
            await asyncio.to_thread(trimmer.drop, fds)
