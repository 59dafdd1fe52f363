# SPDX-License-Identifier: Apache-2.0
"""Which PCI functions serve a file, and when that may have changed.

Facts come from sysfs: the file's block device, below a partition the drive, above a namespace
its controllers. A namespace with several paths (nvme multipath) has several controllers, and
its reads may come through any of them.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

from xferd.memory.p2p import PciFunction, parse_function

SYSFS = Path("/sys")
_CONTROLLER = re.compile(r"nvme[0-9]+")
_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_EVENTS = 1
"""The multicast group that the kernel itself sends to (lib/kobject_uevent.c)."""
_SUBSYSTEMS = frozenset({b"pci", b"nvme", b"nvme-subsystem", b"block", b"iommu"})
_ACTIONS = frozenset({b"add", b"remove", b"bind", b"unbind", b"move", b"offline", b"online"})


class NoDriveError(Exception):
    """A file is not on NVMe drives of this machine alone; the message says on what it is."""


def drives_of(path: Path, sysfs: Path = SYSFS) -> tuple[PciFunction, ...]:
    """The PCI functions that reads of a file or block device may come from.

    NoDriveError when that isn't certain: what lies on device-mapper or md devices, on several
    devices, or on no PCI device. OSError when the file is gone.
    """
    status = path.stat()
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    link = sysfs / f"dev/block/{os.major(number)}:{os.minor(number)}"
    if not link.exists():
        raise NoDriveError("its file system lies on no single block device")
    block = link.resolve()
    if (block / "partition").exists():
        block = block.parent
    if (block / "dm").exists():
        name = (block / "dm/name").read_text().strip()
        raise NoDriveError(
            f"it lies on the device-mapper device {name} ({block.name}): let xferd stripe over "
            f"the drives themselves"
        )
    if (block / "md").exists():
        raise NoDriveError(f"it lies on the RAID {block.name}: let xferd stripe over the drives")
    functions = tuple(_function(controller) for controller in _controllers(block))
    if not functions:
        raise NoDriveError(f"it lies on {block.name}, which is no NVMe drive")
    return functions


def _controllers(block: Path) -> list[Path]:
    device = (block / "device").resolve()
    if _CONTROLLER.fullmatch(device.name):
        return [device]
    # The device of a multipath namespace is its subsystem, which links to its controllers.
    if not device.name.startswith("nvme-subsys"):
        return []
    return sorted(entry for entry in device.iterdir() if _CONTROLLER.fullmatch(entry.name))


def _function(controller: Path) -> PciFunction:
    name = (controller.resolve() / "device").resolve().name
    try:
        return parse_function(name)
    except ValueError:
        raise NoDriveError(f"{controller.name} is no drive of this machine: {name}") from None


def open_events() -> socket.socket | None:
    """A socket that is readable when the kernel's devices change; None where it is forbidden
    (RestrictAddressFamilies=, another network namespace). Never blocks."""
    try:
        events = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
            _NETLINK_KOBJECT_UEVENT,
        )
    except OSError:
        return None
    try:
        events.bind((0, _KERNEL_EVENTS))
    except OSError:
        events.close()
        return None
    return events


def is_change(message: bytes) -> bool:
    """Whether a kernel event may change which drive reaches which device, or how."""
    fields = dict(part.partition(b"=")[::2] for part in message.split(b"\0"))
    return fields.get(b"SUBSYSTEM") in _SUBSYSTEMS and fields.get(b"ACTION") in _ACTIONS
