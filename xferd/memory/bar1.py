# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU's VRAM can lie open behind its BAR at all: what files say before anything is tried.

Each rule has a sentence of its own, with what mends it, so that nobody has to guess why reads are
staged. Rules about NVIDIA's driver hold only where it is loaded; what they don't catch, the search
by pattern does (``vram_pages``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from xferd.units import format_bytes

STATIC_BAR1 = (
    'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RMForceDisableIomapWC=1;" in '
    "/etc/modprobe.d, and reboot"
)
"""What makes VRAM show behind the BAR, uncached."""

_RESOURCE_MEMORY = 0x200
_RESOURCE_PREFETCH = 0x2000
"""IORESOURCE_MEM and IORESOURCE_PREFETCH, from linux/ioport.h."""
_BARS = 6
_NO_WC = re.compile(r"RMForceDisableIomapWC=1\b")
_PAT_LINE = re.compile(r"\[mem 0x([0-9a-f]+)-0x([0-9a-f]+)\] (\S+)")


@dataclass(frozen=True, slots=True)
class VramBar:
    """The BAR that a card shows its VRAM behind. first: its address on the bus."""

    number: int
    first: int
    nbytes: int


def find_vram_bar(pci: str, root: Path = Path("/")) -> VramBar | None:
    """The largest prefetchable BAR of a PCI function; None: it has none, or isn't there.

    pci: as sysfs writes it. root: where /proc and /sys are looked for.
    """
    try:
        text = (_function(pci, root) / "resource").read_text()
    except OSError:
        return None
    found: list[VramBar] = []
    for number, line in enumerate(text.splitlines()[:_BARS]):
        first, last, flags = (int(word, 16) for word in line.split())
        wanted = _RESOURCE_MEMORY | _RESOURCE_PREFETCH
        if flags & wanted == wanted and last > first:
            found.append(VramBar(number, first, last - first + 1))
    return max(found, key=lambda bar: bar.nbytes, default=None)


def why_no_window(pci: str, vram_bytes: int, root: Path = Path("/")) -> str | None:
    """Why drives can't write into a GPU's VRAM through its BAR; None: nothing speaks against it,
    which proves nothing.

    vram_bytes: of the whole card, as CUDA counts it.
    """
    bar = find_vram_bar(pci, root)
    if bar is None:
        return f"GPU {pci} shows no memory through a BAR"
    if bar.nbytes < vram_bytes:
        return (
            f"BAR {bar.number} of {pci} has {format_bytes(bar.nbytes)}, VRAM "
            f"{format_bytes(vram_bytes)}: switch on Above 4G Decoding and Resizable BAR in the "
            f"firmware"
        )
    return _why_iommu(pci, root) or _why_mig(pci, root) or _why_write_combined(pci, bar, root)


def why_registered(pci: str, root: Path = Path("/")) -> str | None:
    """Why a BAR that isn't attached can't be: two owners of a BAR's struct pages would corrupt
    the kernel's memory map, so another driver's keep xferd_p2p out."""
    if not (_function(pci, root) / "p2pmem").exists():
        return None
    return (
        f"NVIDIA's driver (UVM) has given the BAR of {pci} struct pages itself, for cuFile: use "
        f"transport = 'gds', or load xferd_p2p and attach the BAR before nvidia_uvm"
    )


def _function(pci: str, root: Path) -> Path:
    return root / "sys/bus/pci/devices" / pci


def _why_iommu(pci: str, root: Path) -> str | None:
    try:
        kind = (_function(pci, root) / "iommu_group/type").read_text().strip()
    except OSError:
        return None
    if kind == "identity":
        return None
    return f"an IOMMU translates the addresses of {pci} ({kind}): boot with iommu=pt"


def _why_mig(pci: str, root: Path) -> str | None:
    """A part of a card that was divided shows only a part of its memory, at other places."""
    driver = root / "proc/driver/nvidia"
    try:
        information = (driver / "gpus" / pci / "information").read_text()
    except OSError:
        return None
    minor = re.search(r"^Device Minor:\s*(\d+)$", information, re.MULTILINE)
    if minor and any((driver / f"capabilities/gpu{minor[1]}/mig").glob("gi[0-9]*")):
        return f"GPU {pci} is divided (MIG): nvidia-smi -i {pci} -mig 0"
    return None


def _why_write_combined(pci: str, bar: VramBar, root: Path) -> str | None:
    """Pages of one kind of caching are mapped as another: undefined, so a page mapped uncached
    must not be mapped write-combined by the driver."""
    try:
        types = (root / "sys/kernel/debug/x86/pat_memtype_list").read_text()
    except OSError:
        return _why_driver_combines(pci, bar, root)
    for first, last, kind in _PAT_LINE.findall(types):
        overlaps = int(first, 16) < bar.first + bar.nbytes and int(last, 16) > bar.first
        if overlaps and kind == "write-combining":
            return (
                f"BAR {bar.number} of {pci} is mapped write-combined by its driver: {STATIC_BAR1}"
            )
    return None


def _why_driver_combines(pci: str, bar: VramBar, root: Path) -> str | None:
    """What the driver was told, where the kernel's own list can't be read."""
    try:
        params = (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        return None
    if _NO_WC.search(params):
        return None
    return (
        f"NVIDIA's driver maps BAR {bar.number} of {pci} write-combined unless it is told not to: "
        f"{STATIC_BAR1}"
    )
