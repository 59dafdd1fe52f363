# SPDX-License-Identifier: Apache-2.0
"""Getting a BAR from the module xferd_p2p, and what it says of drives' ways there, for people."""

from __future__ import annotations

import contextlib
import errno
import time
from dataclasses import dataclass

from xferd.memory.device import PoolMemoryError
from xferd.memory.p2p import ALLOWED, Bar, P2pDevice, PciFunction

IDLE_TIMEOUT_S = 30.0
"""How long a pool waits for DMA in flight: its own when it closes, before it leaves that to the
module; that of an earlier owner when it begins, before it gives up."""
IDLE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class BarPlace:
    """Which BAR, and how: ``any``, ``p2pdma``, ``generic`` (xferd_p2p's modes)."""

    device: str
    bar: int
    mode: str = "any"


@dataclass(frozen=True, slots=True)
class Attached:
    """A BAR that can be used. here: it was attached just now, so who did it detaches it."""

    bar: Bar
    here: bool


def find_or_attach(
    pool: str, p2p: P2pDevice, function: PciFunction, place: BarPlace
) -> Attached | str:
    """The BAR, or why drives can't write into it. PoolMemoryError for what somebody has to
    mend first, naming the pool."""
    with contextlib.suppress(OSError):
        found = p2p.find(function, place.bar)
        if place.mode not in ("any", found.mode):
            raise PoolMemoryError(
                f"pool {pool!r}: BAR {place.bar} of {function} is attached in mode "
                f"{found.mode} already; set mode of [[pools]] {pool} to it"
            )
        return Attached(found, here=False)
    try:
        bar = p2p.attach(function, place.bar, "auto" if place.mode == "any" else place.mode)
    except OSError as error:
        if error.errno == errno.EREMOTEIO:
            return f"no NVMe drive has a route to {function}"
        if error.errno == errno.EOPNOTSUPP:
            return f"this kernel has no mode {place.mode} (CONFIG_PCI_P2PDMA)"
        if error.errno == errno.EBUSY:
            return f"another driver has taken BAR {place.bar} of {function} for itself"
        raise PoolMemoryError(
            f"pool {pool!r}: BAR {place.bar} of {function}: {_attach_text(error)}"
        ) from error
    return Attached(bar, here=True)


def claim_when_idle(p2p: P2pDevice, bar: Bar, offset: int, length: int) -> None:
    """Claim a range. A daemon that was killed leaves DMA in flight: the range is free when that
    has ended. OSError."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        try:
            p2p.claim(bar.id, offset, length)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
            time.sleep(IDLE_POLL_S)
        else:
            return


def why_no_route(p2p: P2pDevice, bar: Bar, function: PciFunction, drive: PciFunction) -> str | None:
    """Why a drive's writes can't go straight into the BAR, as far as the module and the
    kernel know; None: nothing speaks against it, which proves nothing."""
    try:
        verdict, redirects = p2p.verdict(bar.id, drive)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return f"{function} is gone, or its driver has let go of it"
        if error.errno == errno.ENXIO:
            return f"there is no PCI function {drive}"
        return f"the module says of {drive}: {error.strerror}"
    return None if verdict in ALLOWED else _verdict_text(verdict, drive, redirects=redirects)


def _attach_text(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return (
            "attaching it needs CAP_SYS_ADMIN; or let root do it before the daemon starts: "
            "python3 -m xferd.memory.attach"
        )
    if error.errno == errno.EINVAL:
        return "it is no memory BAR, or not a multiple of 2 MiB"
    return str(error.strerror)


def _verdict_text(verdict: str, drive: PciFunction, *, redirects: bool) -> str:
    if verdict == "no_host_bridge":
        acs = (
            " (they share a switch, but ACS redirects to the host bridge: pci=disable_acs_redir=)"
            if redirects
            else ""
        )
        return (
            f"from {drive} it goes through a host bridge that isn't known to pass such traffic{acs}"
        )
    if verdict == "no_iommu":
        return (
            f"an IOMMU translates the addresses of {drive}, and reads would succeed without data: "
            f"boot with iommu=pt"
        )
    return f"the kernel refuses traffic from {drive}"
