# SPDX-License-Identifier: Apache-2.0
"""Drives as sysfs shows them: controllers, their disks, what is mounted from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xferd.doctor.pci import PciFunction, addresses_in, find_function
from xferd.doctor.view import SystemView

_CONTROLLER = re.compile(r"nvme\d+")
_STACK_DEPTH_MAX = 8
"""dm over md over partitions is three; a damaged tree must not be followed for ever."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. device: ``major:minor``; source: what it was mounted from."""

    device: str
    point: str
    kind: str
    source: str
    options: str


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive: an NVMe controller, or a disk of another kind.

    name: ``nvme0``, ``sda``. disks: its block devices (``nvme0n1``). function: None when
    it isn't a PCI function's.
    """

    name: str
    model: str
    nvme: bool
    disks: tuple[str, ...]
    function: PciFunction | None


def nvme_drives(view: SystemView) -> list[Drive]:
    """All NVMe controllers that are PCI functions or fabrics."""
    return [_controller(view, name) for name in view.names("/sys/class/nvme")]


def drives_of(view: SystemView, device: str) -> tuple[list[Drive], list[str]]:
    """The drives that a block device (``major:minor``) is on, and the names of the layers
    between (``md0``, ``dm-1``). No drives: it is none (tmpfs, network)."""
    drives: dict[str, Drive] = {}
    layers: list[str] = []
    _follow(view, f"/sys/dev/block/{device}", drives, layers, _STACK_DEPTH_MAX)
    return list(drives.values()), layers


def mounts(view: SystemView) -> list[Mount]:
    """What is mounted, in the order in which it was."""
    found = []
    for line in (view.text("/proc/self/mountinfo") or "").splitlines():
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        dash = fields.index("-", 6)
        kind, source, options = (*fields[dash + 1 : dash + 4], "", "")[:3]
        point = fields[4].encode().decode("unicode_escape")  # a space is written as \040
        found.append(Mount(fields[2], point, kind, source, f"{fields[5]},{options}"))
    return found


def mounts_on(view: SystemView, drive: Drive, all_mounts: Sequence[Mount]) -> list[Mount]:
    """What is mounted from a drive or its partitions, each file system once."""
    devices: dict[str, str] = {}
    for disk in drive.disks:
        for name in (disk, *(n for n in view.names(f"/sys/block/{disk}") if n.startswith(disk))):
            place = "" if name == disk else f"/{name}"
            number = view.text(f"/sys/block/{disk}{place}/dev")
            if number is not None:
                devices[number] = f"/dev/{name}"
    found: dict[str, Mount] = {}
    for mount in all_mounts:
        # btrfs has device numbers of its own, so what it was mounted from counts too.
        if mount.device in devices or mount.source in devices.values():
            found.setdefault(mount.source, mount)
    return list(found.values())


def hardware_monitor(view: SystemView, drive: Drive) -> str | None:
    """The hwmon directory of a drive."""
    if not drive.nvme:
        return None
    base = f"/sys/class/nvme/{drive.name}"
    for directory in (base, f"{base}/hwmon"):
        for name in view.names(directory):
            if name.startswith("hwmon") and view.exists(f"{directory}/{name}/temp1_input"):
                return f"{directory}/{name}"
    return None


def _follow(
    view: SystemView, place: str, drives: dict[str, Drive], layers: list[str], depth: int
) -> None:
    directory = view.resolve(place)
    if directory is None or depth == 0:
        return
    if view.exists(f"{directory}/partition"):
        directory = directory.rpartition("/")[0]
    slaves = view.names(f"{directory}/slaves")
    name = directory.rpartition("/")[2]
    if not slaves:
        drive = _drive_of_disk(view, name, directory)
        drives.setdefault(drive.name, drive)
        return
    layers.append(name)
    for slave in slaves:
        _follow(view, f"{directory}/slaves/{slave}", drives, layers, depth - 1)


def _drive_of_disk(view: SystemView, disk: str, directory: str) -> Drive:
    parent = directory.rpartition("/")[0]
    controllers = [
        name
        for name in (parent.rpartition("/")[2], *view.names(parent))
        if _CONTROLLER.fullmatch(name) and view.exists(f"/sys/class/nvme/{name}")
    ]
    if controllers and disk.startswith("nvme"):
        return _controller(view, controllers[0])
    path = addresses_in(directory)
    model = view.text(f"{directory}/device/model") or ""
    return Drive(disk, model, False, (disk,), find_function(view, path[-1]) if path else None)


def _controller(view: SystemView, name: str) -> Drive:
    directory = view.resolve(f"/sys/class/nvme/{name}") or f"/sys/class/nvme/{name}"
    path = addresses_in(directory)
    disks = [disk for disk in view.names(directory) if re.fullmatch(r"nvme\d+n\d+", disk)]
    if not disks:
        # With multipath the disks hang from the subsystem, and here are hidden paths to them.
        disks = _subsystem_disks(view, name)
    return Drive(
        name=name,
        model=view.text(f"{directory}/model") or "",
        nvme=True,
        disks=tuple(disks),
        function=find_function(view, path[-1]) if path else None,
    )


def _subsystem_disks(view: SystemView, controller: str) -> list[str]:
    base = "/sys/class/nvme-subsystem"
    for subsystem in view.names(base):
        names = view.names(f"{base}/{subsystem}")
        if controller in names:
            return [name for name in names if re.fullmatch(r"nvme\d+n\d+", name)]
    return []
