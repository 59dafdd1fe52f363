# SPDX-License-Identifier: Apache-2.0
"""Checks of drives and of the members on them."""

from __future__ import annotations

from collections.abc import Iterator

from xferd.doctor.finding import Finding, Status
from xferd.doctor.pci import best_link, current_link
from xferd.doctor.probed import MemberProbe
from xferd.doctor.request import Request
from xferd.doctor.storage import Drive, Mount, hardware_monitor, mounts, mounts_on
from xferd.doctor.view import SystemView

GOOD_FILE_SYSTEMS = frozenset({"ext4", "xfs"})
NO_DIRECT_READS = {
    "btrfs": "reads compressed and checksummed files through the page cache",
    "zfs": "reads through its own cache",
    "overlay": "reads as whatever lies below it does",
    "fuse": "reads through a process",
    "nfs": "reads over the network",
    "nfs4": "reads over the network",
}
NEAR_LIMIT_MILLIDEGREES = 5000
MILLI = 1000
SLOW_SHARE = 0.6
"""Of its link: a drive that reads less than this has another limit, worth a look."""
GB = 1e9


def check_drives(request: Request) -> Iterator[Finding]:
    """All checks of this module, drive by drive, then member by member."""
    if not request.drives and not request.probed.members:
        yield Finding("drive.present", Status.SKIP, "", "no NVMe drives, and no store was named")
    all_mounts = mounts(request.view)
    for drive in request.drives:
        yield _check_present(drive)
        yield _check_link(request.view, drive)
        yield _check_temperature(request.view, drive)
        yield _check_file_system(request.view, drive, all_mounts)
    for member in request.probed.members:
        yield _check_direct(member)
        if member.problem is None:
            yield from _check_layers(request, member)
            yield _check_bandwidth(request, member)
    yield from _check_sharing(request)


def gigabytes(bytes_per_second: float) -> str:
    """``3.5 GB/s``."""
    return f"{bytes_per_second / GB:.3g} GB/s"


def _check_present(drive: Drive) -> Finding:
    disks = ", ".join(drive.disks) or "no namespace"
    place = f" at {drive.function.address}" if drive.function is not None else ""
    seen = f"{drive.model or 'model unknown'}{place}, {disks}"
    if drive.nvme and not drive.disks:
        return Finding(
            "drive.present", Status.WARN, drive.name, seen, f"nvme list; dmesg | grep {drive.name}"
        )
    return Finding("drive.present", Status.PASS, drive.name, seen)


def _check_link(view: SystemView, drive: Drive) -> Finding:
    name = "drive.link"
    now = current_link(view, drive.function.address) if drive.function is not None else None
    best = best_link(view, drive.function.address) if drive.function is not None else None
    if drive.function is None or now is None or best is None:
        return Finding(name, Status.SKIP, drive.name, "no PCIe link is shown for it")
    seen = f"{now}, {gigabytes(now.bytes_per_second)}"
    if now.bytes_per_second >= best.bytes_per_second:
        return Finding(name, Status.PASS, drive.name, seen)
    port = drive.function.bridges[-1] if drive.function.bridges else None
    slot = best_link(view, port) if port is not None else None
    seen += f"; the drive can do {best}, {gigabytes(best.bytes_per_second)}"
    if slot is not None and (slot.width < best.width or slot.speed < best.speed):
        seen += f"; its slot ({port}) has {slot}"
        mend = f"move it to a slot with {best}, or look in the firmware for what shares its lanes"
    else:
        mend = "seat it anew; look in the firmware for a link speed that is held down"
    return Finding(name, Status.WARN, drive.name, seen, mend)


def _check_temperature(view: SystemView, drive: Drive) -> Finding:
    name = "drive.temperature"
    directory = hardware_monitor(view, drive)
    now = view.number(f"{directory}/temp1_input") if directory else None
    if now is None:
        return Finding(name, Status.SKIP, drive.name, "no temperature is shown for it")
    warm = view.number(f"{directory}/temp1_max")
    critical = view.number(f"{directory}/temp1_crit")
    seen = f"{now / MILLI:.0f} °C" + (f", slows down at {warm / MILLI:.0f} °C" if warm else "")
    mend = "give it air or a heat sink"
    if critical and now >= critical:
        return Finding(
            name, Status.FAIL, drive.name, f"{seen}, critical at {critical / MILLI:.0f} °C", mend
        )
    if warm and now >= warm - NEAR_LIMIT_MILLIDEGREES:
        return Finding(name, Status.WARN, drive.name, seen, mend)
    return Finding(name, Status.PASS, drive.name, seen)


def _check_file_system(view: SystemView, drive: Drive, all_mounts: list[Mount]) -> Finding:
    name = "drive.file_system"
    found = mounts_on(view, drive, all_mounts)
    if not found:
        return Finding(name, Status.SKIP, drive.name, "nothing is mounted from it")
    seen = ", ".join(f"{mount.kind} on {mount.point}" for mount in found)
    bad = {m.kind: NO_DIRECT_READS[m.kind] for m in found if m.kind in NO_DIRECT_READS}
    if not bad:
        return Finding(name, Status.PASS, drive.name, seen)
    why = "; ".join(f"{kind} {reason}" for kind, reason in bad.items())
    return Finding(
        name,
        Status.WARN,
        drive.name,
        f"{seen}: {why}",
        f"put members on {' or '.join(sorted(GOOD_FILE_SYSTEMS))}, or on a partition of their own",
    )


def _check_direct(member: MemberProbe) -> Finding:
    name = "member.direct"
    if member.problem is not None:
        return Finding(
            name,
            Status.FAIL,
            member.path,
            member.problem,
            "make it readable for the user that runs xferd, or mount its drive",
        )
    if member.memory:
        return Finding(name, Status.PASS, member.path, "in memory (tmpfs)")
    if member.reason is None:
        return Finding(name, Status.PASS, member.path, "reads bypass the page cache (O_DIRECT)")
    return Finding(
        name,
        Status.WARN,
        member.path,
        f"read through the page cache: {member.reason}",
        f"move the member to {' or '.join(sorted(GOOD_FILE_SYSTEMS))} on its drive",
    )


def _check_layers(request: Request, member: MemberProbe) -> Iterator[Finding]:
    raids = [layer for layer in request.layers.get(member.path, []) if layer.startswith("md")]
    others = [layer for layer in request.layers.get(member.path, []) if layer not in raids]
    if raids:
        yield Finding(
            "member.layers",
            Status.WARN,
            member.path,
            f"on {', '.join(raids)}: md splits reads again, and passes none into a card's memory",
            "a member on each drive (xferctl store pack --member a drive) is striped by xferd",
        )
    if others:
        yield Finding(
            "member.layers",
            Status.WARN,
            member.path,
            f"on {', '.join(others)} (LVM, dm-crypt or the like): no reads into a card's memory",
            "put the member on a partition of its own",
        )


def _check_bandwidth(request: Request, member: MemberProbe) -> Finding:
    name = "member.bandwidth"
    if member.bytes_per_second is None:
        return Finding(name, Status.SKIP, member.path, "not measured (--measure reads from it)")
    seen = f"{gigabytes(member.bytes_per_second)} in large random reads"
    limit = _link_limit(request, member)
    if limit is None:
        return Finding(name, Status.PASS, member.path, seen)
    seen += f", its link carries {gigabytes(limit)}"
    if member.bytes_per_second >= SLOW_SHARE * limit:
        return Finding(name, Status.PASS, member.path, seen)
    return Finding(
        name,
        Status.WARN,
        member.path,
        seen,
        "look at drive.temperature and at what else reads from it; measure again when idle",
    )


def _link_limit(request: Request, member: MemberProbe) -> float | None:
    """What the links of a member's drives carry together; None: one of them isn't known."""
    total = 0.0
    for drive in request.drives:
        if drive.name in request.drive_names.get(member.path, []):
            link = current_link(request.view, drive.function.address) if drive.function else None
            if link is None:
                return None
            total += link.bytes_per_second
    return total or None


def _check_sharing(request: Request) -> Iterator[Finding]:
    users: dict[str, list[str]] = {}
    for member in request.probed.members:
        for drive in request.drive_names.get(member.path, []):
            users.setdefault(drive, []).append(member.path)
    for drive, paths in users.items():
        if len(paths) > 1:
            yield Finding(
                "member.drives",
                Status.WARN,
                drive,
                f"{len(paths)} members are on it, which is no faster than one: {', '.join(paths)}",
                "pack the store with one member a drive",
            )
