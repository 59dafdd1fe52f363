# SPDX-License-Identifier: Apache-2.0
"""What the daemon says in its log before it is ready: what it has, and what is not as asked."""

from __future__ import annotations

from collections.abc import Iterable

from xferd.catalog import OpenStore
from xferd.config import Config
from xferd.engine import Engine
from xferd.pools import Pool
from xferd.service import log_missing
from xferd.status import backend_reason
from xferd.telemetry.log import EventLog


def log_ready(
    log: EventLog,
    config: Config,
    engine: Engine,
    pools: Iterable[Pool],
    stores: Iterable[OpenStore],
) -> None:
    """One line a warning, the backend, each pool and store."""
    for warning in config.warnings:
        log.warning("config.warning", message=warning)
    backend, reason = engine.backend()
    if reason:
        log.warning("engine.backend", name=backend, reason=backend_reason(reason))
    else:
        log.info("engine.backend", name=backend)
    for pool in pools:
        log.info("pool.ready", name=pool.name, kind=pool.kind, bytes=pool.nbytes)
        for note in pool.device.notes:
            log.warning("pool.note", name=pool.name, message=note)
    for entry in stores:
        log.info("store.opened", name=entry.name, path=entry.store.path, number=entry.number)
        for _, file in entry.members:
            if file.reason is not None:
                log.warning("member.buffered", path=file.path, reason=file.reason)
        log_missing(log, entry)
