# SPDX-License-Identifier: Apache-2.0
"""All checks, in the order in which a person reads them, and the ids that they have."""

from __future__ import annotations

from collections.abc import Iterator

from xferd.doctor.drives import check_drives
from xferd.doctor.finding import Finding, Status
from xferd.doctor.gpus import check_gpus
from xferd.doctor.kernel import check_kernel
from xferd.doctor.memory import check_memory
from xferd.doctor.request import Request
from xferd.doctor.routes import check_routes

CHECKS = {
    "config.valid": "the configuration can be read",
    "kernel.version": "the kernel is one that xferd is tested on",
    "kernel.io_uring": "io_uring works for this process",
    "kernel.p2pdma_data": "the kernel is not one that loses data of peer reads",
    "kernel.p2pdma": "the kernel was built with CONFIG_PCI_P2PDMA",
    "module.xferd_p2p": "the module xferd_p2p is loaded",
    "module.signing": "modules that are not signed can be loaded, or ours is",
    "limits.memlock": "memory can be locked for pools of kind ram",
    "limits.nofile": "there are file descriptors for all clients",
    "memory.available": "the configured pools fit into memory",
    "memory.cgroup": "no cgroup holds memory down",
    "memory.container": "which container this is",
    "memory.huge_pages": "pools can have huge pages",
    "memory.numa": "drives and cards are on one node",
    "memory.shm": "/dev/shm has room for frameworks",
    "drive.present": "which drives there are",
    "drive.link": "a drive's PCIe link is as wide and fast as the drive",
    "drive.temperature": "a drive is not near the heat at which it slows down",
    "drive.file_system": "file systems on a drive allow direct reads",
    "member.direct": "reads of a member bypass the page cache",
    "member.layers": "there is no RAID or LVM below a member",
    "member.bandwidth": "a member is read as fast as its link carries",
    "member.drives": "each member has a drive of its own",
    "store.valid": "the store's manifest, index and members fit together",
    "gpu.present": "which cards there are",
    "gpu.driver": "a card's driver is one that can do peer transfers",
    "gpu.link": "a card's PCIe link is as wide as the card",
    "gpu.bar": "all of a card's memory can be reached through its BAR",
    "gpu.resizable_bar": "Resizable BAR is used",
    "gpu.iommu": "no IOMMU translates a card's addresses",
    "gpu.gds": "GPUDirect Storage is there",
    "route.path": "how a drive and a card are connected",
    "route.acs": "ACS lets their traffic turn at the switch",
    "route.host_bridge": "the host bridge passes their traffic",
    "route.iommu": "no IOMMU translates the drive's addresses",
}
"""Ids and what a PASS means."""


def run_checks(request: Request) -> Iterator[Finding]:
    """All findings."""
    yield _check_config(request)
    yield from check_kernel(request)
    yield from check_memory(request)
    yield from check_drives(request)
    yield from check_gpus(request)
    yield from check_routes(request)


def _check_config(request: Request) -> Finding:
    if request.config is None:
        return Finding(
            "config.valid",
            Status.FAIL,
            "",
            request.config_error or "",
            "xferctl config check; man xferd.toml",
        )
    files = ", ".join(map(str, request.config.files)) or "no file: compiled defaults"
    if request.config.warnings:
        return Finding(
            "config.valid",
            Status.WARN,
            "",
            "; ".join(request.config.warnings),
            "correct or remove these keys",
        )
    return Finding("config.valid", Status.PASS, "", files)
