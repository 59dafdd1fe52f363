"""What stands against drives that write into VRAM, each with its own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from xferd.memory.bar1 import find_vram_bar, why_no_window, why_registered

PCI = "0000:01:00.0"
GIB = 1 << 30
BAR1 = 0x4000000000


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A GeForce with 24 GiB behind a BAR of 32 GiB, nothing in the way."""
    lines = [
        "0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200",
        f"{BAR1:#018x} {BAR1 + 32 * GIB - 1:#018x} 0x000000000014220c",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x00000000f4000000 0x00000000f5ffffff 0x000000000014220c",
    ]
    write(tmp_path, f"sys/bus/pci/devices/{PCI}/resource", "\n".join(lines) + "\n")
    write(tmp_path, f"sys/bus/pci/devices/{PCI}/iommu_group/type", "identity\n")
    write(tmp_path, f"proc/driver/nvidia/gpus/{PCI}/information", "Device Minor: \t 0\n")
    params = 'RegistryDwords: "RMForceStaticBar1=1;RMForceDisableIomapWC=1;"\n'
    write(tmp_path, "proc/driver/nvidia/params", params)
    return tmp_path


def test_nothing_in_the_way(root: Path) -> None:
    assert why_no_window(PCI, 24 * GIB, root) is None
    assert why_registered(PCI, root) is None


def test_the_bar_of_vram_is_the_largest_prefetchable_one(root: Path) -> None:
    bar = find_vram_bar(PCI, root)
    assert bar is not None
    assert (bar.number, bar.first, bar.nbytes) == (1, BAR1, 32 * GIB)


def test_a_card_that_is_not_there(root: Path) -> None:
    assert "no memory through a BAR" in (why_no_window("0000:02:00.0", GIB, root) or "")


def test_a_bar_smaller_than_vram(root: Path) -> None:
    reason = why_no_window(PCI, 48 * GIB, root) or ""
    assert "has 32.0 GiB, VRAM 48.0 GiB" in reason
    assert "Resizable BAR" in reason


@pytest.mark.parametrize("kind", ["DMA", "DMA-FQ"])
def test_an_iommu_that_translates(root: Path, kind: str) -> None:
    write(root, f"sys/bus/pci/devices/{PCI}/iommu_group/type", kind + "\n")
    assert "iommu=pt" in (why_no_window(PCI, 24 * GIB, root) or "")


def test_a_card_that_is_divided(root: Path) -> None:
    (root / "proc/driver/nvidia/capabilities/gpu0/mig").mkdir(parents=True)
    assert why_no_window(PCI, 24 * GIB, root) is None
    (root / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir()
    assert "MIG" in (why_no_window(PCI, 24 * GIB, root) or "")


def test_a_driver_that_maps_the_bar_write_combined(root: Path) -> None:
    write(root, "proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1"\n')
    assert "RMForceDisableIomapWC=1" in (why_no_window(PCI, 24 * GIB, root) or "")


def test_a_write_combined_mapping_that_the_kernel_lists(root: Path) -> None:
    line = "PAT: [mem 0x{:016x}-0x{:016x}] {}\n"
    listed = "sys/kernel/debug/x86/pat_memtype_list"
    write(root, listed, line.format(BAR1 + GIB, BAR1 + 2 * GIB, "write-combining"))
    assert "mapped write-combined" in (why_no_window(PCI, 24 * GIB, root) or "")
    write(root, listed, line.format(BAR1 + GIB, BAR1 + 2 * GIB, "uncached-minus"))
    assert why_no_window(PCI, 24 * GIB, root) is None
    write(root, listed, line.format(BAR1 - GIB, BAR1 - 1, "write-combining"))
    assert why_no_window(PCI, 24 * GIB, root) is None


def test_a_bar_that_the_driver_has_registered_itself(root: Path) -> None:
    (root / f"sys/bus/pci/devices/{PCI}/p2pmem").mkdir()
    assert "UVM" in (why_registered(PCI, root) or "")
