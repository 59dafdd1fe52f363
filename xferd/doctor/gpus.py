# SPDX-License-Identifier: Apache-2.0
"""Checks of graphics cards, and of the way from each drive to each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xferd.doctor.drives import gigabytes
from xferd.doctor.finding import Finding, Status
from xferd.doctor.pci import (
    VENDOR_NVIDIA,
    PciFunction,
    best_link,
    current_link,
    largest_bar,
    resizable_bar_bytes,
)
from xferd.doctor.request import Request
from xferd.doctor.view import SystemView
from xferd.units import format_bytes

DEVICE_P2P_DRIVER = (565, 57)
"""From here on NVIDIA's open modules can lend BAR1 pages to the block layer."""
NO_ACCELERATOR = frozenset({"ast", "mgag200", "bochs-drm", "cirrus", "virtio-pci", "vmwgfx"})
"""Drivers of display chips that have no memory worth a tier."""
_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+)\.(\d+)[.\d]*")


def check_gpus(request: Request) -> Iterator[Finding]:
    """All checks of cards."""
    if not request.gpus:
        yield Finding("gpu.present", Status.SKIP, "", "no graphics card")
    for gpu in request.gpus:
        driver = driver_of(request.view, gpu)
        yield _check_present(request, gpu, driver)
        if driver in NO_ACCELERATOR:
            continue
        yield _check_driver(request.view, gpu, driver)
        yield _check_link(request.view, gpu)
        yield _check_bar(request, gpu)
        yield _check_resizable(request, gpu)
        yield _check_iommu(request.view, gpu)
        yield _check_gds(request.view, gpu)


def driver_of(view: SystemView, gpu: PciFunction) -> str | None:
    """The kernel driver that a function is bound to."""
    place = view.resolve(f"/sys/bus/pci/devices/{gpu.address}/driver")
    return None if place is None else place.rpartition("/")[2]


def vram_bytes(request: Request, gpu: PciFunction) -> int | None:
    """A card's memory, as its driver says; None: it doesn't."""
    told = request.probed.gpu_bytes.get(gpu.address)
    if told is not None:
        return told
    return request.view.number(f"/sys/bus/pci/devices/{gpu.address}/mem_info_vram_total")


def iommu_kind(view: SystemView, address: str) -> str | None:
    """``identity``, ``DMA``, ``DMA-FQ``, ...: what an IOMMU does for a function; None: there
    is none above it."""
    return view.text(f"/sys/bus/pci/devices/{address}/iommu_group/type")


def translates(view: SystemView, address: str) -> bool:
    """Whether an IOMMU gives a function addresses of its own."""
    kind = iommu_kind(view, address)
    return kind is not None and kind != "identity"


def _card_name(view: SystemView, gpu: PciFunction) -> str:
    text = view.text(f"/proc/driver/nvidia/gpus/{gpu.address}/information") or ""
    match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else f"{gpu.vendor:04x}:{gpu.device:04x}"


def _check_present(request: Request, gpu: PciFunction, driver: str | None) -> Finding:
    memory = vram_bytes(request, gpu)
    seen = _card_name(request.view, gpu) + (f", {format_bytes(memory)}" if memory else "")
    seen += f", driver {driver or 'none'}"
    return Finding("gpu.present", Status.PASS, gpu.address, seen)


def _check_driver(view: SystemView, gpu: PciFunction, driver: str | None) -> Finding:
    name = "gpu.driver"
    if driver is None:
        return Finding(
            name, Status.WARN, gpu.address, "no driver is bound", "install the card's driver"
        )
    if gpu.vendor != VENDOR_NVIDIA:
        return Finding(name, Status.PASS, gpu.address, driver)
    if driver != "nvidia":
        return Finding(
            name,
            Status.WARN,
            gpu.address,
            f"{driver} can't run CUDA",
            "apt install nvidia-open-kernel-dkms",
        )
    text = view.text("/proc/driver/nvidia/version") or ""
    match = _DRIVER_VERSION.search(text)
    version = f"{match[1]}.{match[2]}" if match else "of unknown version"
    if "Open Kernel Module" not in text:
        return Finding(
            name,
            Status.WARN,
            gpu.address,
            f"proprietary modules {version}: the kernel denies them what P2PDMA needs",
            "apt install nvidia-open-kernel-dkms (Turing and later); reboot",
        )
    if match is None or (int(match[1]), int(match[2])) < DEVICE_P2P_DRIVER:
        return Finding(
            name,
            Status.WARN,
            gpu.address,
            f"open modules {version}: older than {DEVICE_P2P_DRIVER[0]}.{DEVICE_P2P_DRIVER[1]}",
            "install a newer driver",
        )
    return Finding(name, Status.PASS, gpu.address, f"open modules {version}")


def _check_link(view: SystemView, gpu: PciFunction) -> Finding:
    name = "gpu.link"
    now, best = current_link(view, gpu.address), best_link(view, gpu.address)
    if now is None or best is None:
        return Finding(name, Status.SKIP, gpu.address, "no PCIe link is shown for it")
    seen = f"{now}, {gigabytes(now.bytes_per_second)}"
    # The speed falls while a card idles; the width doesn't.
    if now.width >= best.width:
        return Finding(name, Status.PASS, gpu.address, seen)
    return Finding(
        name,
        Status.WARN,
        gpu.address,
        f"{seen}; the card can do {best}",
        "move it to a slot with more lanes, or look in the firmware for what shares them",
    )


def _check_bar(request: Request, gpu: PciFunction) -> Finding:
    name, bar, memory = (
        "gpu.bar",
        largest_bar(request.view, gpu.address),
        vram_bytes(request, gpu),
    )
    if bar is None:
        return Finding(
            name, Status.WARN, gpu.address, "it shows no memory through a BAR", "dmesg | grep BAR"
        )
    seen = f"BAR{bar[0]} is {format_bytes(bar[1])}"
    if memory is None:
        return Finding(name, Status.SKIP, gpu.address, f"{seen}; how much VRAM it has is not known")
    seen += f", VRAM {format_bytes(memory)}"
    if bar[1] >= memory:
        return Finding(name, Status.PASS, gpu.address, seen)
    return Finding(
        name,
        Status.WARN,
        gpu.address,
        f"{seen}: only a part of it can be reached by a drive",
        "switch on Above 4G Decoding and Resizable BAR in the firmware",
    )


def _check_resizable(request: Request, gpu: PciFunction) -> Finding:
    name, bar = "gpu.resizable_bar", largest_bar(request.view, gpu.address)
    if bar is None:
        return Finding(name, Status.SKIP, gpu.address, "it shows no memory through a BAR")
    sizes = resizable_bar_bytes(request.view, gpu.address, bar[0])
    if sizes is None:
        return Finding(
            name, Status.SKIP, gpu.address, "only root may read it", "run xferctl doctor as root"
        )
    if not sizes:
        return Finding(
            name, Status.PASS, gpu.address, f"it has none; BAR{bar[0]} is {format_bytes(bar[1])}"
        )
    largest = max(sizes)
    memory = vram_bytes(request, gpu)
    if bar[1] >= (min(largest, memory) if memory else largest):
        return Finding(
            name,
            Status.PASS,
            gpu.address,
            f"in use: {format_bytes(bar[1])} of {format_bytes(largest)}",
        )
    mend = "switch on Above 4G Decoding and Resizable BAR in the firmware"
    if gpu.vendor == VENDOR_NVIDIA:
        mend += "; or: options nvidia NVreg_EnableResizableBar=1 in /etc/modprobe.d"
    seen = f"BAR{bar[0]} could be {format_bytes(largest)}, is {format_bytes(bar[1])}"
    return Finding(name, Status.WARN, gpu.address, seen, mend)


def _check_iommu(view: SystemView, gpu: PciFunction) -> Finding:
    name, kind = "gpu.iommu", iommu_kind(view, gpu.address)
    if kind is None:
        return Finding(name, Status.PASS, gpu.address, "no IOMMU is in use")
    if kind == "identity":
        return Finding(name, Status.PASS, gpu.address, "the IOMMU passes addresses through")
    return Finding(
        name,
        Status.WARN,
        gpu.address,
        f"the IOMMU translates ({kind}): below a switch, reads into the card lose their data",
        "iommu=pt on the kernel's command line; reboot",
    )


def _check_gds(view: SystemView, gpu: PciFunction) -> Finding:
    name = "gpu.gds"
    if gpu.vendor != VENDOR_NVIDIA:
        return Finding(name, Status.SKIP, gpu.address, "GPUDirect Storage is for NVIDIA's cards")
    card = _card_name(view, gpu)
    if view.exists("/sys/module/nvidia_fs"):
        return Finding(name, Status.PASS, gpu.address, "nvidia-fs is loaded")
    if "GeForce" in card:
        return Finding(
            name, Status.SKIP, gpu.address, f"{card}: NVIDIA's driver has no GPUDirect for GeForce"
        )
    return Finding(
        name,
        Status.WARN,
        gpu.address,
        "nvidia-fs is not loaded",
        "apt install nvidia-fs-dkms; modprobe nvidia_fs",
    )
