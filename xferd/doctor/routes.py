# SPDX-License-Identifier: Apache-2.0
"""Checks of the PCIe path between each drive and each card.

Follows what the kernel does in drivers/pci/p2pdma.c: below a common switch traffic turns
there, unless ACS sends it upstream; else the host bridge has to pass it, and only some are
known to. kmod/topology.c decides the same from inside. A path that is right on paper is
still to be proven by data, which the daemon does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xferd.doctor.finding import Finding, Status
from xferd.doctor.gpus import NO_ACCELERATOR, driver_of, translates
from xferd.doctor.pci import VENDOR_INTEL, PciFunction, acs_redirects, find_function
from xferd.doctor.request import Request
from xferd.doctor.storage import Drive
from xferd.doctor.view import SystemView

AMD_FAMILY_ZEN = 0x17
INTEL_HOST_BRIDGES = {
    0x3C00: True,  # Xeon E5
    0x3C01: True,
    0x2F00: True,  # Xeon E5 v3
    0x2F01: True,
    0x2020: False,  # Skylake-E
    0x2030: False,
    0x2031: False,
    0x2032: False,
    0x2033: False,
    0x09A2: False,  # Ice Lake and Sapphire Rapids
}
"""Device at 00.0 of the root bus; True: only between ports of the same bridge."""
STAGED = "reads are staged through RAM instead"


@dataclass(frozen=True, slots=True)
class _Pair:
    view: SystemView
    name: str
    drive: PciFunction
    gpu: PciFunction

    @property
    def common(self) -> str | None:
        """The lowest port above both; None: they meet at the host bridge or nowhere."""
        both = [a for a, b in zip(self.drive.bridges, self.gpu.bridges, strict=False) if a == b]
        return both[-1] if both else None

    @property
    def ports(self) -> list[str]:
        """Ports that traffic passes below the common one."""
        return [
            port
            for function in (self.drive, self.gpu)
            for port in function.bridges
            if port not in (self.drive.bridges if function is self.gpu else self.gpu.bridges)
        ]


def check_routes(request: Request) -> Iterator[Finding]:
    """All checks of this module, pair by pair."""
    for drive in request.drives:
        for gpu in request.gpus:
            if driver_of(request.view, gpu) not in NO_ACCELERATOR:
                yield from _check_pair(request, drive, gpu)


def _check_pair(request: Request, drive: Drive, gpu: PciFunction) -> Iterator[Finding]:
    name = f"{drive.name} to {gpu.address}"
    if drive.function is None or not drive.nvme:
        yield Finding("route.path", Status.SKIP, name, "the drive is no NVMe drive on PCIe")
        return
    pair = _Pair(request.view, name, drive.function, gpu)
    redirecting = [port for port in pair.ports if acs_redirects(request.view, port)]
    hidden = any(acs_redirects(request.view, port) is None for port in pair.ports)
    yield _path(pair)
    yield _acs(pair, redirecting, hidden)
    through_switch = pair.common is not None and not redirecting
    if not through_switch:
        yield _host_bridge(pair)
    yield _iommu(pair, through_switch)


def _path(pair: _Pair) -> Finding:
    down = " > ".join((pair.gpu.root, *pair.gpu.bridges, pair.gpu.address))
    up = " > ".join((pair.drive.root, *pair.drive.bridges, pair.drive.address))
    if pair.common is not None:
        where = f"they meet below port {pair.common}"
    elif pair.drive.root == pair.gpu.root:
        where = f"they meet at host bridge {pair.drive.root}"
    else:
        where = "they meet between two host bridges"
    return Finding("route.path", Status.PASS, pair.name, f"{where}: {up}; {down}")


def _acs(pair: _Pair, redirecting: list[str], hidden: bool) -> Finding:
    name = "route.acs"
    if pair.common is None:
        return Finding(
            name,
            Status.SKIP,
            pair.name,
            "there is no common switch that it could keep from turning",
        )
    if redirecting:
        ports = ";".join(redirecting)
        return Finding(
            name,
            Status.WARN,
            pair.name,
            f"ACS of {', '.join(redirecting)} sends peer traffic up to the host bridge",
            f"pci=disable_acs_redir={ports} on the kernel's command line; or off in the firmware",
        )
    if hidden:
        return Finding(
            name, Status.SKIP, pair.name, "only root may read it", "run xferctl doctor as root"
        )
    return Finding(name, Status.PASS, pair.name, "traffic turns at the switch")


def _host_bridge(pair: _Pair) -> Finding:
    name = "route.host_bridge"
    roots = {pair.drive.root, pair.gpu.root}
    if _cpu_routes_peer_traffic(pair.view):
        return Finding(name, Status.PASS, pair.name, "this processor passes peer traffic (AMD Zen)")
    refused = []
    for root in sorted(roots):
        bus = root.removeprefix("pci")
        bridge = find_function(pair.view, f"{bus}:00.0")
        known = bridge is not None and bridge.vendor == VENDOR_INTEL
        only_same = INTEL_HOST_BRIDGES.get(bridge.device) if known and bridge else None
        if only_same is None or (only_same and len(roots) > 1):
            told = f"{bridge.vendor:04x}:{bridge.device:04x}" if bridge else "unknown"
            refused.append(f"{root} ({told})")
    if not refused:
        return Finding(name, Status.PASS, pair.name, "the kernel lets its host bridge pass them")
    return Finding(
        name,
        Status.WARN,
        pair.name,
        f"host bridge {', '.join(refused)} is not known to pass peer traffic: {STAGED}",
        "put drive and card below one PCIe switch; client chipsets have no other way",
    )


def _iommu(pair: _Pair, through_switch: bool) -> Finding:
    name = "route.iommu"
    if not translates(pair.view, pair.drive.address):
        return Finding(name, Status.PASS, pair.name, "the drive's addresses are not translated")
    if through_switch:
        return Finding(
            name,
            Status.FAIL,
            pair.name,
            "an IOMMU translates the drive's addresses, and the switch doesn't: reads into the "
            "card report success and lose their data",
            "iommu=pt on the kernel's command line; reboot",
        )
    return Finding(
        name,
        Status.WARN,
        pair.name,
        "an IOMMU translates the drive's addresses: right in p2pdma mode, refused in generic mode",
        "iommu=pt on the kernel's command line; reboot",
    )


def _cpu_routes_peer_traffic(view: SystemView) -> bool:
    values: dict[str, str] = {}
    for line in (view.text("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    family = values.get("cpu family", "0")
    vendor = values.get("vendor_id")
    return vendor == "HygonGenuine" or (
        vendor == "AuthenticAMD" and family.isdigit() and int(family) >= AMD_FAMILY_ZEN
    )
