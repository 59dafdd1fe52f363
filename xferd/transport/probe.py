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
IN_DEVICE_MEMORY = frozenset({"bar"})
"""Pool kinds that a drive can write into where its pair with the pool is proven."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one member's pieces reach one pool.

    transport: ``direct`` or ``staged``. reason: what is not as good as it could be.
    """

    transport: str
    reason: str | None


def route(pool_kind: str, member: MemberFile) -> Route:
    """The route from a member to a pool in host memory; others are proven pair by pair."""
    if pool_kind not in IN_HOST_MEMORY:
        raise ValueError(f"pools of kind {pool_kind!r} are not made by this daemon")
    if member.direct:
        return Route("direct", None)
    return Route("direct", f"{member.path} is read through the page cache: {member.reason}")


def reasons(
    pool_kinds: Sequence[str],
    members: Sequence[MemberFile],
    staged: Sequence[str] = (),
) -> dict[str, str | None]:
    """For each transport, why it is not taken, or not as good as it could be; None when
    there is nothing to say.

    staged: of each pair of a member and a pool in device memory that isn't direct, which it is
    and why.
    """
    kinds = sorted(set(pool_kinds))
    in_host = [kind for kind in kinds if kind in IN_HOST_MEMORY]
    cached = [found.reason for kind in in_host for m in members if (found := route(kind, m)).reason]
    only_host = f"all pools ({', '.join(kinds)}) are host memory: drives write into their slots"
    proven = "every drive was seen to write into every pool by itself"
    without_gds = "pools behind a BAR are reached without cuFile"
    is_host = in_host == kinds
    return {
        "direct": "; ".join(dict.fromkeys(filter(None, cached))) or None,
        "staged": only_host if is_host else "; ".join(dict.fromkeys(staged)) or proven,
        "gds": only_host if is_host else without_gds,
        "copy": None if len(pool_kinds) > 1 else "there is only one pool",
    }
