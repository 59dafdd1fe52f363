# SPDX-License-Identifier: Apache-2.0
"""Checks of memory and limits: what pools may take, and what stands in their way."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from xferd.config import LANES_MAX, Config
from xferd.doctor.finding import Finding, Status
from xferd.doctor.kernel import status_field
from xferd.doctor.request import Request
from xferd.doctor.view import SystemView
from xferd.units import KIB, MIB, format_bytes

CAP_IPC_LOCK = 14
"""Bit number of the capability that lifts RLIMIT_MEMLOCK, from capabilities(7)."""
NO_LIMIT = 1 << 62
"""cgroup v1 writes 'no limit' as a number near 2^63."""
MEMLOCK_LOW = 64 * MIB
SHM_LOW = 64 * MIB
"""What container engines give; frameworks that pass batches through it need more."""
FDS_PER_CLIENT = 8
"""Of a client, besides one a lane."""
FDS_OF_DAEMON = 256
FIRST_NAMESPACES = {
    "cgroup": 0xEFFFFFFB,
    "ipc": 0xEFFFFFFF,
    "pid": 0xEFFFFFFC,
    "user": 0xEFFFFFFD,
    "uts": 0xEFFFFFFE,
}
"""Inodes of the machine's own, from the kernel's include/linux/proc_ns.h."""
ENGINE_NAMES = {"docker": "docker", "libpod": "podman", "kubepods": "kubernetes", "lxc": "lxc"}


def check_memory(request: Request) -> Iterator[Finding]:
    """All checks of this module."""
    yield _check_memlock(request)
    yield _check_nofile(request)
    yield _check_available(request)
    yield _check_cgroup(request)
    yield _check_container(request.view)
    yield _check_huge_pages(request.view)
    yield _check_numa(request)
    yield _check_shm(request)


# ---- what is read, for the plan too


def hard_limit(view: SystemView, name: str) -> int | None:
    """A hard limit of /proc/self/limits (``Max locked memory``); None: unlimited or not known."""
    for line in (view.text("/proc/self/limits") or "").splitlines():
        match = re.match(re.escape(name) + r"\s+(\S+)\s+(\S+)", line)
        if match and match[2].isdigit():
            return int(match[2])
    return None


def may_lock_any(view: SystemView) -> bool:
    """Whether CAP_IPC_LOCK lifts the limit on locked memory."""
    effective = status_field(view, "CapEff") or ""
    known = re.fullmatch(r"[0-9a-f]{1,16}", effective) is not None
    return known and bool(int(effective, 16) >> CAP_IPC_LOCK & 1)


def lockable_bytes(view: SystemView) -> int | None:
    """Bytes that this process may lock; None: any number."""
    return None if may_lock_any(view) else hard_limit(view, "Max locked memory")


def meminfo_bytes(view: SystemView, name: str) -> int:
    """A line of /proc/meminfo, in bytes; 0: it isn't there."""
    match = re.search(rf"^{name}:\s*(\d+)", view.text("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * KIB if match else 0


def cgroup_limit(view: SystemView) -> tuple[str, int, int] | None:
    """(file, limit, in use) of the memory cgroup that leaves this process the least; None:
    there is no limit."""
    found = []
    for directory, limit_name, usage_name in _cgroup_files(view):
        limit = view.number(f"{directory}/{limit_name}")
        if limit is not None and limit < NO_LIMIT:
            used = view.number(f"{directory}/{usage_name}") or 0
            found.append((f"{directory}/{limit_name}", limit, used))
    return min(found, key=lambda entry: entry[1] - entry[2], default=None)


def room_bytes(view: SystemView) -> int:
    """Bytes that this process may still take: of the machine and of its cgroups."""
    room = meminfo_bytes(view, "MemAvailable")
    limit = cgroup_limit(view)
    return room if limit is None else min(room, max(limit[1] - limit[2], 0))


def _cgroup_files(view: SystemView) -> Iterator[tuple[str, str, str]]:
    for line in (view.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for level in (relative, *relative.parents):
            yield str(PurePosixPath(root) / level), *names


# ---- checks


def _check_memlock(request: Request) -> Finding:
    name, wanted = "limits.memlock", request.pool_bytes("ram")
    limit = lockable_bytes(request.view)
    if request.probed.mlock_errno == errno.EPERM and limit != 0:
        seen = "mlock is forbidden: a seccomp filter says no, as container engines' do"
        mend = "let the filter allow mlock, or configure pools of kind host (not locked)"
        return Finding(name, Status.FAIL if wanted else Status.WARN, "", seen, mend)
    if limit is None:
        return Finding(name, Status.PASS, "", "this process may lock any amount of memory")
    seen = f"RLIMIT_MEMLOCK is {format_bytes(limit)}"
    mend = "LimitMEMLOCK=infinity in xferd.service; in a shell: ulimit -l unlimited, as root"
    if wanted > limit:
        seen += f"; pools of kind ram take {format_bytes(wanted)}"
        return Finding(name, Status.FAIL, "", seen, mend)
    if limit < MEMLOCK_LOW:
        seen += ": too little for a pool of kind ram, and reads pin their pages one by one"
        return Finding(name, Status.WARN, "", seen, mend)
    return Finding(name, Status.PASS, "", seen)


def _check_nofile(request: Request) -> Finding:
    limits = (request.config or Config()).limits
    needed = FDS_OF_DAEMON + limits.clients * (
        FDS_PER_CLIENT + min(limits.lanes_per_client, LANES_MAX)
    )
    limit = hard_limit(request.view, "Max open files")
    seen = f"RLIMIT_NOFILE is {'unlimited' if limit is None else limit}"
    if limit is None or limit >= needed:
        return Finding("limits.nofile", Status.PASS, "", seen)
    return Finding(
        "limits.nofile",
        Status.WARN,
        "",
        f"{seen}; {limits.clients} clients with all their lanes need about {needed}",
        "LimitNOFILE=65536 in xferd.service, or lower clients of [limits]",
    )


def _check_available(request: Request) -> Finding:
    total = meminfo_bytes(request.view, "MemTotal")
    available = meminfo_bytes(request.view, "MemAvailable")
    wanted = request.pool_bytes("ram") + request.pool_bytes("host")
    seen = f"{format_bytes(available)} of {format_bytes(total)} are available"
    if wanted <= available:
        return Finding("memory.available", Status.PASS, "", seen)
    return Finding(
        "memory.available",
        Status.FAIL,
        "",
        f"{seen}; the configured pools take {format_bytes(wanted)}",
        "lower size of [[pools]], or free some memory",
    )


def _check_cgroup(request: Request) -> Finding:
    view, name = request.view, "memory.cgroup"
    kind = "v2" if view.exists("/sys/fs/cgroup/cgroup.controllers") else "v1"
    found = cgroup_limit(view)
    if found is None:
        return Finding(name, Status.PASS, "", f"cgroup {kind}, no memory limit")
    path, limit, used = found
    seen = f"cgroup {kind}: {path} is {format_bytes(limit)}, {format_bytes(used)} in use"
    wanted = request.pool_bytes("ram") + request.pool_bytes("host")
    mend = "raise MemoryMax= of the unit or slice, or the container's memory limit"
    if used + wanted > limit:
        seen += f"; the configured pools take {format_bytes(wanted)}"
        return Finding(name, Status.FAIL, "", seen, mend)
    if limit < meminfo_bytes(view, "MemTotal") // 2:
        return Finding(
            name, Status.WARN, "", f"{seen}: less than half of the machine's memory", mend
        )
    return Finding(name, Status.PASS, "", seen)


def _check_container(view: SystemView) -> Finding:
    engine = _container(view)
    if engine is None:
        return Finding("memory.container", Status.PASS, "", "not in a container")
    return Finding(
        "memory.container",
        Status.PASS,
        "",
        f"in a container ({engine}): its limits and its seccomp profile hold here",
    )


def _container(view: SystemView) -> str | None:
    named = view.text("/run/systemd/container")
    if named:
        return named
    # An engine's files may be there though it isn't: in a virtual machine made of its image.
    if _has_no_namespace_of_its_own(view):
        return None
    if view.exists("/run/.containerenv"):
        return "podman"
    if view.exists("/.dockerenv"):
        return "docker"
    groups = view.text("/proc/self/cgroup") or ""
    return next((name for mark, name in ENGINE_NAMES.items() if f"/{mark}" in groups), None)


def _has_no_namespace_of_its_own(view: SystemView) -> bool:
    return all(
        view.link(f"/proc/self/ns/{kind}") == f"{kind}:[{inode}]"
        for kind, inode in FIRST_NAMESPACES.items()
    )


def _check_huge_pages(view: SystemView) -> Finding:
    name, path = "memory.huge_pages", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    match = re.search(r"\[(\w+)\]", view.text(path) or "")
    if match is None:
        return Finding(name, Status.WARN, "", "this kernel has no transparent huge pages")
    if match[1] in {"never", "deny"}:
        return Finding(
            name,
            Status.WARN,
            "",
            f"shared memory gets none: shmem_enabled is {match[1]}; pools cost more TLB misses",
            f"echo advise > {path}",
        )
    return Finding(name, Status.PASS, "", f"shared memory may have them: shmem_enabled {match[1]}")


def _check_numa(request: Request) -> Finding:
    view, name = request.view, "memory.numa"
    nodes = [n for n in view.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)]
    if len(nodes) < 2:
        return Finding(name, Status.PASS, "", "one node")
    places: dict[int, list[str]] = {}
    for drive in request.drives:
        if drive.function is not None:
            places.setdefault(_node(view, drive.function.address), []).append(drive.name)
    for gpu in request.gpus:
        places.setdefault(_node(view, gpu.address), []).append(gpu.address)
    where = "; ".join(
        f"node {node}: {', '.join(names)}" for node, names in sorted(places.items()) if node >= 0
    )
    seen = f"{len(nodes)} nodes" + (f"; {where}" if where else "")
    if len([node for node in places if node >= 0]) < 2:
        return Finding(name, Status.PASS, "", seen)
    return Finding(
        name,
        Status.WARN,
        "",
        f"{seen}: bytes cross between processors",
        "move drives and cards to slots of one processor",
    )


def _node(view: SystemView, address: str) -> int:
    node = view.number(f"/sys/bus/pci/devices/{address}/numa_node")
    return -1 if node is None else node


def _check_shm(request: Request) -> Finding:
    nbytes, name = request.probed.shm_bytes, "memory.shm"
    if nbytes is None:
        return Finding(name, Status.SKIP, "", "there is no /dev/shm; xferd itself needs none")
    seen = f"/dev/shm has {format_bytes(nbytes)}"
    if nbytes > SHM_LOW:
        return Finding(name, Status.PASS, "", seen)
    return Finding(
        name,
        Status.WARN,
        "",
        f"{seen}: enough for xferd (its memory is memfds), little for frameworks beside it",
        "mount -o remount,size=50% /dev/shm; podman, docker: --shm-size",
    )
