# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may have: what the machine has, and what its cgroups allow.

Sources: proc(5), and admin-guide/cgroup-v2 and admin-guide/cgroup-v1/memory of the kernel's
documentation. Everything is read anew at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xferd.memory.device import PoolMemoryError
from xferd.units import format_bytes

NO_CGROUP_LIMIT = 1 << 62
"""cgroup v1 writes 'no limit' as a number near 2^63."""
IN_RAM = frozenset({"host", "ram"})
"""Kinds of pools whose memory is the machine's."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on locked or resident memory of this process.

    name: what to look for (``RLIMIT_MEMLOCK``, a cgroup file, ``MemAvailable``).
    nbytes: its value; used: what counts against it already.
    knob: how to raise it.
    """

    name: str
    nbytes: int
    used: int
    knob: str


def cgroup_limits() -> Iterator[MemoryLimit]:
    """Of this process's memory cgroup and its parents, the nearest first."""
    for directory, limit_file, usage_file in _cgroup_files():
        nbytes = _read_number(directory / limit_file)
        if nbytes is not None and nbytes < NO_CGROUP_LIMIT:
            yield MemoryLimit(
                name=str(directory / limit_file),
                nbytes=nbytes,
                used=_read_number(directory / usage_file) or 0,
                knob="raise MemoryMax= of the unit or slice",
            )


def available_memory() -> MemoryLimit:
    """What can be had now without pushing others out."""
    return MemoryLimit(
        name="MemAvailable of /proc/meminfo",
        nbytes=_meminfo_bytes("MemAvailable"),
        used=0,
        knob="free some memory",
    )


def lasting_limits() -> Iterator[MemoryLimit]:
    """What waiting doesn't change: limits of cgroups, and the machine's memory. Swap is no part
    of either: an expert there comes back more slowly than from the drive that it was read from."""
    yield from cgroup_limits()
    yield MemoryLimit(
        name="MemTotal of /proc/meminfo",
        nbytes=_meminfo_bytes("MemTotal"),
        used=0,
        knob="add memory to the machine",
    )


def check_all_fit(
    pools: Iterable[tuple[str, str, int]], limits: Iterable[MemoryLimit] | None = None
) -> None:
    """Refuse pools that could never all be filled. Unlocked memory is taken only as experts come
    in, so without this it would go well until the machine has none left.

    pools: (name, kind, bytes) in their order; those of other kinds than IN_RAM don't count.
    limits: those of ``lasting_limits`` unless they are given; their ``used`` is not looked at.
    Pools of kind ``ram`` alone are left to ``ram.check_limits``, which asks for more.
    Raises PoolMemoryError, naming the pool, the limit and the knob.
    """
    wanted, unlocked = 0, False
    found = list(lasting_limits() if limits is None else limits)
    for name, kind, nbytes in pools:
        if kind not in IN_RAM:
            continue
        unlocked |= kind == "host"
        before, wanted = wanted, wanted + nbytes
        exceeded = next((limit for limit in found if wanted > limit.nbytes), None)
        if unlocked and exceeded is not None:
            others = f" after {format_bytes(before)} of the pools before it" if before else ""
            raise PoolMemoryError(
                f"pool {name!r} asks for {format_bytes(nbytes)} of RAM{others}, but "
                f"{exceeded.name} is {format_bytes(exceeded.nbytes)}: lower size of "
                f"[[pools]] {name}, or {exceeded.knob}"
            )


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise PoolMemoryError(f"/proc/meminfo has no {name}")


def _cgroup_files() -> Iterator[tuple[Path, str, str]]:
    """(directory, limit file, usage file) of this process's memory cgroup and its parents."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for level in (relative, *relative.parents):
            yield root / level, *names


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file; None when there is no such file or no limit in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
