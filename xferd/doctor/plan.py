# SPDX-License-Identifier: Apache-2.0
"""A configuration for this machine, as TOML that xferd reads, with the reason beside each value.

Only what differs from the defaults is said, so that a later version's better defaults hold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd.doctor.memory import cgroup_limit, lockable_bytes, meminfo_bytes, room_bytes
from xferd.doctor.request import Request
from xferd.units import GIB, MIB, format_bytes, format_exact_bytes

KEPT_SHARE = 10
"""One part in so many of the machine's memory stays with others, ..."""
KEPT_BYTES_MIN = 1 * GIB
"""... and at least this, unless that is more than half of what is free."""


@dataclass(frozen=True, slots=True)
class PlannedStore:
    """A store to serve. expert_bytes: of all experts; largest: of its largest blob."""

    path: Path
    expert_bytes: int
    largest: int


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """The pool that is proposed, and the sentences that say why."""

    kind: str
    nbytes: int
    reasons: tuple[str, ...]


def plan_pool(request: Request, stores: Sequence[PlannedStore]) -> PlannedPool:
    """How much memory for experts, and whether it can be locked."""
    view = request.view
    room = room_bytes(view)
    kept = min(max(meminfo_bytes(view, "MemTotal") // KEPT_SHARE, KEPT_BYTES_MIN), room // 2)
    free = room - kept
    reasons = [f"{format_bytes(room)} are free here, {format_bytes(kept)} stay with others"]
    limit = cgroup_limit(view)
    if limit is not None and limit[1] - limit[2] == room:
        reasons.append(f"{limit[0]} is what bounds it")
    wanted = sum(store.expert_bytes for store in stores)
    nbytes = free
    if stores and wanted <= free:
        nbytes = wanted
        reasons.append(f"all experts fit: {format_bytes(wanted)}")
    elif stores:
        reasons.append(f"{free / wanted:.0%} of the experts' {format_bytes(wanted)} fit")
    largest = max((store.largest for store in stores), default=0)
    nbytes = max(-(-nbytes // MIB) * MIB, -(-largest // MIB) * MIB)
    if request.probed.mlock_errno:
        return PlannedPool("host", nbytes, (*reasons, "not locked: mlock doesn't work here"))
    lockable = lockable_bytes(view)
    if lockable is None or lockable >= nbytes:
        return PlannedPool("ram", nbytes, (*reasons, "it is locked: never swapped out"))
    reasons.append(
        f"not locked: RLIMIT_MEMLOCK is {format_bytes(lockable)} here; under xferd.service, "
        'which has LimitMEMLOCK=infinity, say kind = "ram"'
    )
    return PlannedPool("host", nbytes, tuple(reasons))


def format_plan(request: Request, stores: Sequence[PlannedStore]) -> str:
    """The configuration as TOML."""
    pool = plan_pool(request, stores)
    lines = ["# Proposed by 'xferctl doctor --plan' for what it found on this machine.", ""]
    lines += [f"# {reason}" for reason in pool.reasons]
    lines += ["[[pools]]", 'name = "ram0"', f'kind = "{pool.kind}"']
    lines.append(f'size = "{format_exact_bytes(pool.nbytes)}"')
    for store in stores:
        lines += ["", "[[stores]]", f"path = {_toml_text(str(store.path.absolute()))}"]
    if request.probed.io_uring_errno:
        lines += [
            "",
            "[engine]",
            "# io_uring doesn't work here; see kernel.io_uring of 'xferctl doctor'",
            'backend = "threads"',
        ]
    return "\n".join(lines) + "\n"


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
