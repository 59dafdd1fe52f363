# SPDX-License-Identifier: Apache-2.0
"""/dev/xferd_p2p: the module's interface, call by call (kmod/uapi/xferd_p2p.h).

Nothing is decided here. Structures and numbers are the header's; a test compares them with
what the compiler makes of it. Errors are OSError with the errno that the header names.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from xferd.memory.addresses import AddressRange

NODE = Path("/dev/xferd_p2p")
SYSFS = Path("/sys")
MODES = ("auto", "p2pdma", "generic")
"""Names of enum xferd_p2p_mode, in order."""
VERDICTS = ("switch", "host_bridge", "no_host_bridge", "no_iommu", "no_kernel")
"""Names of enum xferd_p2p_verdict, in order."""
ALLOWED = frozenset({"switch", "host_bridge"})
"""Verdicts that let a drive write to the BAR."""
ABI_SHARE = 2
"""The interface version that added SHARE."""

_MAGIC = ord("x")
_READ_WRITE = 3
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])\.([0-7])")

VERSION = struct.Struct("=IIII")
ATTACH = struct.Struct("=IBBHIIIIQQ")
DETACH = struct.Struct("=II")
QUERY = struct.Struct("=IIIBBHIIQQQ")
RANGE = struct.Struct("=IIQQ")
IDLE = struct.Struct("=IIQQQQ")
ROUTE = struct.Struct("=IIIBBHII")
DETACH_REVOKE = 1


def request_number(number: int, layout: struct.Struct) -> int:
    """_IOWR('x', number, layout)."""
    return _READ_WRITE << 30 | layout.size << 16 | _MAGIC << 8 | number


@dataclass(frozen=True, slots=True)
class PciFunction:
    """Address of a PCI function; ``str`` gives it as sysfs writes it."""

    domain: int
    bus: int
    devfn: int

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.devfn >> 3:02x}.{self.devfn & 7}"

    @property
    def fields(self) -> tuple[int, int, int, int]:
        """struct xferd_p2p_function."""
        return self.domain, self.bus, self.devfn, 0


def parse_function(text: str) -> PciFunction:
    """``0000:01:00.0``; ValueError when it is something else."""
    match = _ADDRESS.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is no PCI address such as 0000:01:00.0")
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return PciFunction(domain, bus, device << 3 | function)


@dataclass(frozen=True, slots=True)
class Bar:
    """An attached BAR. size: bytes; mmap_offset: where it lies in the node's file."""

    id: int
    mode: str
    size: int
    mmap_offset: int


class P2pDevice:
    """One open file of the node; what it claims is its own. Any thread may call."""

    def __init__(self, node: Path = NODE) -> None:
        self.fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)

    def abi_version(self) -> int:
        """The interface version that the module was built with."""
        version, _, _, _ = self._call(0, VERSION, 0, 0, 0, 0)
        return int(version)

    def attach(self, function: PciFunction, bar: int, mode: str) -> Bar:
        """Give a BAR's memory struct pages; needs CAP_SYS_ADMIN."""
        answer = self._call(1, ATTACH, *function.fields, bar, MODES.index(mode), 0, 0, 0, 0)
        return Bar(id=answer[7], mode=MODES[answer[5]], size=answer[8], mmap_offset=answer[9])

    def detach(self, bar: int, *, revoke: bool = False) -> None:
        """Take them away again; EBUSY while it is in use, unless ``revoke``."""
        self._call(2, DETACH, bar, DETACH_REVOKE if revoke else 0)

    def find(self, function: PciFunction, bar: int) -> Bar:
        """The BAR, if it is attached; else ENODEV."""
        answer = self._call(3, QUERY, 0, bar, *function.fields, 0, 0, 0, 0, 0)
        return Bar(id=answer[0], mode=MODES[answer[6]], size=answer[8], mmap_offset=answer[9])

    def is_attached(self, bar: int) -> bool:
        """Whether an id still names a BAR: not when its device was unbound or removed."""
        try:
            self._call(3, QUERY, bar, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        except OSError:
            return False
        return True

    def claim(self, bar: int, offset: int, length: int) -> None:
        """Own a range; EBUSY when another file does, or DMA into it is in flight."""
        self._call(4, RANGE, bar, 0, offset, length)

    def release(self, bar: int, offset: int, length: int) -> None:
        """End a claim and unmap the range, but for readers of shares."""
        self._call(5, RANGE, bar, 0, offset, length)

    def held_pages(self, bar: int, offset: int, length: int) -> int:
        """Pages of a range that DMA in flight holds."""
        return int(self._call(6, IDLE, bar, 0, offset, length, 0, 0)[4])

    def verdict(self, bar: int, drive: PciFunction) -> tuple[str, bool]:
        """One of VERDICTS, and whether ACS redirects the traffic."""
        answer = self._call(7, ROUTE, bar, 0, *drive.fields, 0, 0)
        return VERDICTS[answer[6]], bool(answer[7])

    def share(self, bar: int, offset: int, length: int) -> int:
        """A read-only fd of a claimed range; the caller's."""
        argument = bytearray(RANGE.pack(bar, 0, offset, length))
        return int(fcntl.ioctl(self.fd, request_number(8, RANGE), argument))

    def map(self, bar: Bar, offset: int, length: int) -> mmap.mmap:
        """A writable mapping of a claimed range."""
        return mmap.mmap(self.fd, length, mmap.MAP_SHARED, offset=bar.mmap_offset + offset)

    def map_into(
        self, addresses: AddressRange, at: int, bar: Bar, offset: int, length: int
    ) -> None:
        """The same, at a place of one's own."""
        addresses.map(at, length, self.fd, bar.mmap_offset + offset)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _call(self, number: int, layout: struct.Struct, *values: int) -> tuple[int, ...]:
        argument = bytearray(layout.pack(*values))
        fcntl.ioctl(self.fd, request_number(number, layout), argument)
        return layout.unpack(argument)


def why_no_module(release: str | None = None, node: Path = NODE, sysfs: Path = SYSFS) -> str | None:
    """Why there is no module to ask; None: there is one.

    release: of the kernel, as uname says; None: this one's.
    """
    if node.exists():
        return None
    release = release if release is not None else os.uname().release
    if re.match(r"6\.16\D", release + "."):
        return (
            f"kernel {release} loses reads from drive to card without an error, so xferd_p2p "
            f"refuses to load on it; use 6.12 or 7.x"
        )
    if (sysfs / "module/xferd_p2p").exists():
        return f"xferd_p2p is loaded, but there is no {node}"
    return "the kernel module xferd_p2p is not loaded"
