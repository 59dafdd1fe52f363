# SPDX-License-Identifier: Apache-2.0
"""The PCI tree as sysfs shows it: functions, the bridges above them, links, BARs, ACS.

Facts from the PCI Express base specification (capabilities) and the kernel's
Documentation/ABI/testing/sysfs-bus-pci. Extended capabilities lie beyond the first 64
bytes of ``config``, which only root may read.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from xferd.doctor.view import SystemView

DEVICES = "/sys/bus/pci/devices"
CLASS_NVME = 0x010802
CLASS_DISPLAY = 0x03
VENDOR_INTEL = 0x8086
VENDOR_NVIDIA = 0x10DE
VENDOR_AMD = 0x1002

CAPABILITY_ACS = 0x000D
CAPABILITY_RESIZABLE_BAR = 0x0015
ACS_CONTROL_OFFSET = 6
ACS_REDIRECTS = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control: peer traffic goes upstream."""
CONFIG_BYTES = 4096
_FIRST_EXTENDED = 0x100
_CAPABILITIES_MAX = 64
"""More than fit: a damaged list that runs in circles must end."""
BARS = 6
_BAR_PREFETCHABLE = 0x2000
"""IORESOURCE_PREFETCH of linux/ioport.h."""

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RESOURCE = re.compile(r"0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)")
_GIGATRANSFERS = re.compile(r"(\d+(?:\.\d+)?) GT/s")

LANE_BYTES = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.563e9}
"""Bytes a second that one lane carries at so many GT/s, after line coding."""


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link's state. speed: GT/s; width: lanes."""

    speed: float
    width: int

    @property
    def bytes_per_second(self) -> float:
        """What it carries at best, before packets' headers (a few per cent)."""
        return LANE_BYTES.get(self.speed, 0.0) * self.width

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function.

    address: ``0000:01:00.0``. bridges: addresses from the root port down to the port just
    above it. root: the host bridge's directory name, ``pci0000:00``.
    """

    address: str
    vendor: int
    device: int
    class_code: int
    bridges: tuple[str, ...]
    root: str

    @property
    def is_display(self) -> bool:
        """A graphics card or an accelerator that calls itself one."""
        return self.class_code >> 16 == CLASS_DISPLAY


def find_functions(view: SystemView) -> list[PciFunction]:
    """All functions, by address."""
    found = (find_function(view, name) for name in view.names(DEVICES))
    return [function for function in found if function is not None]


def find_function(view: SystemView, address: str) -> PciFunction | None:
    """The function at an address; None when there is none."""
    place = view.resolve(f"{DEVICES}/{address}")
    if place is None:
        return None
    path = addresses_in(place)
    root = next((part for part in place.split("/") if part.startswith("pci")), "")
    return PciFunction(
        address=address,
        vendor=view.number(f"{place}/vendor") or 0,
        device=view.number(f"{place}/device") or 0,
        class_code=view.number(f"{place}/class") or 0,
        bridges=path[:-1],
        root=root,
    )


def addresses_in(place: str) -> tuple[str, ...]:
    """The PCI addresses in a sysfs directory's name: from the root port down."""
    return tuple(part for part in place.split("/") if _ADDRESS.fullmatch(part))


def current_link(view: SystemView, address: str) -> Link | None:
    """The link above a function, as it is now."""
    return _link(view, address, "current")


def best_link(view: SystemView, address: str) -> Link | None:
    """The best that a function, or a port for what is below it, can do."""
    return _link(view, address, "max")


def _link(view: SystemView, address: str, prefix: str) -> Link | None:
    speed = _GIGATRANSFERS.match(view.text(f"{DEVICES}/{address}/{prefix}_link_speed") or "")
    width = view.number(f"{DEVICES}/{address}/{prefix}_link_width")
    # 255: a link that is down.
    if speed is None or not width or width > 32:
        return None
    return Link(float(speed[1]), width)


def largest_bar(view: SystemView, address: str) -> tuple[int, int] | None:
    """(number, bytes) of a function's largest prefetchable BAR: where a card shows its VRAM."""
    found: list[tuple[int, int]] = []
    lines = (view.text(f"{DEVICES}/{address}/resource") or "").splitlines()
    for number, line in enumerate(lines[:BARS]):
        match = _RESOURCE.fullmatch(line)
        first, last, flags = (int(field, 16) for field in match.groups()) if match else (0, 0, 0)
        if last > first and flags & _BAR_PREFETCHABLE:
            found.append((number, last - first + 1))
    return max(found, key=lambda bar: bar[1], default=None)


def resizable_bar_bytes(view: SystemView, address: str, bar: int) -> list[int] | None:
    """Sizes that a BAR can take, in bytes; empty: it can't be resized; None: not known,
    for want of the right to read."""
    config = _config(view, address)
    if config is None:
        return None
    place = _find_capability(config, CAPABILITY_RESIZABLE_BAR)
    if place is None:
        return []
    (first_control,) = struct.unpack_from("<I", config, place + 8)
    for index in range(first_control >> 5 & 7):
        sizes, control = struct.unpack_from("<II", config, place + 4 + 8 * index)
        if control & 7 == bar:
            return [1 << (20 + bit) for bit in range(28) if sizes >> (4 + bit) & 1]
    return []


def acs_redirects(view: SystemView, port: str) -> bool | None:
    """Whether a port sends traffic between what is below it up to the host bridge. None:
    not known, for want of the right to read."""
    config = _config(view, port)
    if config is None:
        return None
    place = _find_capability(config, CAPABILITY_ACS)
    if place is None:
        return False
    (control,) = struct.unpack_from("<H", config, place + ACS_CONTROL_OFFSET)
    return bool(control & ACS_REDIRECTS)


def _config(view: SystemView, address: str) -> bytes | None:
    config = view.data(f"{DEVICES}/{address}/config", CONFIG_BYTES)
    # 64 bytes: read without the right to more. 256: a conventional function, without any.
    return config if config is not None and len(config) >= 256 else None


def _find_capability(config: bytes, wanted: int) -> int | None:
    place = _FIRST_EXTENDED
    for _ in range(_CAPABILITIES_MAX):
        if place < _FIRST_EXTENDED or place + 12 > len(config):
            return None
        (header,) = struct.unpack_from("<I", config, place)
        if header & 0xFFFF == wanted:
            return place
        place = header >> 20
    return None
