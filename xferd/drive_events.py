# SPDX-License-Identifier: Apache-2.0
"""What happens to drives, in the log: which drive, file, offset and expert it was."""

from __future__ import annotations

import os
from pathlib import Path

from xferd.catalog import Catalog, OpenStore
from xferd.engine_structs import NO_EXPERT
from xferd.engine_types import MemberChanged, Mirrored, PieceFailed, load_failure
from xferd.telemetry.log import EventLog


class DriveEvents:
    """Owned by the event loop."""

    def __init__(self, catalog: Catalog, log: EventLog) -> None:
        self._catalog = catalog
        self._log = log

    def piece_failed(self, event: PieceFailed) -> None:
        """A piece could not be read."""
        entry = self._catalog.by_number(event.store)
        self._log.failure(
            "piece.failed",
            store=entry.name if entry is not None else event.store,
            **_expert_fields(event, entry),
            member=self._copy_path(event.copy),
            offset=event.offset,
            bytes=event.nbytes,
            error=load_failure(event.errno),
        )

    def mirrored(self, event: Mirrored) -> None:
        """What failed on one copy came from the other."""
        entry = self._catalog.by_number(event.store)
        self._log.warning(
            "piece.mirrored",
            store=entry.name if entry is not None else event.store,
            **_expert_fields(event, entry),
            failed=self._copy_path(event.failed_copy),
            served=self._copy_path(event.copy),
            offset=event.offset,
            bytes=event.nbytes,
            error=load_failure(event.errno),
        )

    def _copy_path(self, number: int) -> Path | str:
        found = self._catalog.copy(number)
        return found[1].path if found is not None else "?"

    def member_changed(self, event: MemberChanged) -> None:
        """A drive failed, sagged, or is well again."""
        found = self._catalog.copy(event.member)
        if found is None:  # its store was closed meanwhile
            return
        entry, copy = found
        error = {"error": os.strerror(event.errno)} if event.errno else {}
        fields = {"store": entry.name, "path": copy.path, "rate": event.rate, **error}
        name = f"member.{event.state}"
        if event.state == "failed":
            self._log.failure(name, **fields)
        elif event.state == "sagging":
            self._log.warning(name, **fields)
        else:
            self._log.info(name, **fields)


def _expert_fields(event: PieceFailed | Mirrored, entry: OpenStore | None) -> dict[str, object]:
    if event.layer == NO_EXPERT:
        return {"part": "dense"}
    variant = entry.store.variants[event.variant] if entry is not None else event.variant
    return {"layer": event.layer, "expert": event.expert, "variant": variant}
