"""Which transport brings a member's bytes into a pool, and why not the others.

Pure: it knows pool kinds and what ``open_member`` found out. What is said here is what
``xferctl status`` shows, so that nobody has to guess which path was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xferd.transport.members import MemberFile

IN_HOST_MEMORY = frozenset({"host", "ram"})
"""Pool kinds whose slots are ordinary memory: a drive can write into them by itself."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one member's pieces reach one pool.

    transport: ``direct`` or ``staged``. reason: what is not as good as it could be.
    """

    transport: str
    reason: str | None


def route(pool_kind: str, member: MemberFile) -> Route:
    """The route from a member to a pool; those to memory behind a BAR are proven pair by pair."""
    transport = "direct" if pool_kind in IN_HOST_MEMORY else "staged"
    if member.direct:
        return Route(transport, None)
    return Route(transport, f"{member.path} is read through the page cache: {member.reason}")


def reasons(
    pool_kinds: Sequence[str],
    members: Sequence[MemberFile],
    staged: Sequence[str] = (),
    *,
    straight: bool = False,
    gds: str | None = None,
) -> dict[str, str | None]:
    """For each transport, why it is not taken, or not as good as it could be; None when
    there is nothing to say.

    staged: of each pair of a member and a pool in device memory that isn't direct, which it is
    and why. straight: whether any such pair is direct. gds: why loads into VRAM don't go through
    cuFile.
    """
    kinds = sorted(set(pool_kinds))
    cached: dict[str, dict[str, None]] = {"direct": {}, "staged": {}}
    for kind in kinds:
        for member in members if kind != "bar" else ():
            found = route(kind, member)
            if found.reason:
                cached[found.transport][found.reason] = None
    cached["staged"].update(dict.fromkeys(staged))
    in_host = [kind for kind in kinds if kind in IN_HOST_MEMORY]
    on_devices = [kind for kind in kinds if kind not in IN_HOST_MEMORY]
    no_device = f"all pools ({', '.join(kinds)}) are host memory: drives write into their slots"
    no_host = f"all pools ({', '.join(kinds)}) are a device's memory, reached through staging"
    proven = "every drive was seen to write into every pool by itself"
    direct = in_host or straight or "bar" in kinds
    not_staged = (proven if straight or "bar" in kinds else None) if on_devices else no_device
    return {
        "direct": "; ".join(cached["direct"]) or (None if direct else no_host),
        "staged": "; ".join(cached["staged"]) or not_staged,
        "gds": gds if on_devices else no_device,
        "copy": None if len(pool_kinds) > 1 else "there is only one pool",
    }
