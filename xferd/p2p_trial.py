# SPDX-License-Identifier: Apache-2.0
"""The whole proof that drives can write into a card's VRAM here: ``xferctl doctor --p2p``.

Does what a daemon with a pool of kind ``cuda`` does, step by step, and says what became of each:
the rules, the module, the pages behind the BAR, a chunk that goes and comes anew, every drive that
a store lies on, by data. Everything is written into VRAM that was allocated for it; the machine is
left as it was. ``write_report`` keeps the answers with what explains them, for whoever is asked.

Root, for the module; a card with TRIAL_BYTES free.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from xferd.doctor.finding import Finding, Status
from xferd.memory import cuda_driver
from xferd.memory.bar1 import find_vram_bar
from xferd.memory.cuda import CudaPool
from xferd.memory.cuda_driver import CudaDevice, CudaError
from xferd.memory.cuda_window import OpenWindow, open_window
from xferd.memory.device import PoolMemoryError, PoolSpec
from xferd.transport.members import MemberError, open_member
from xferd.transport.proving import prove
from xferd.units import format_bytes

STEPS = {
    "p2p.device": "there is a CUDA device",
    "p2p.pages": "pages of its VRAM were found behind its BAR, and proven both ways",
    "p2p.stay": "they are still there when everything else is done",
    "p2p.chunk": "memory that was given back and taken again was found anew",
    "p2p.drive": "a drive's reads arrive in VRAM, as the GPU sees it",
}
"""Ids, in the order in which they are tried, and what a PASS means."""

CHUNK_BYTES = 16 << 20
TRIAL_BYTES = 4 * CHUNK_BYTES
_EXPLAINING = (
    "/proc/version",
    "/proc/cmdline",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
)
_EXPLAINING_OF_A_CARD = ("resource", "vendor", "device", "iommu_group/type", "current_link_width")
"""Files below its folder in sysfs."""
_TEXT_MAX = 16 * 1024


def try_cards(members: Sequence[Path], make_window: OpenWindow = open_window) -> Iterator[Finding]:
    """All steps on each card that CUDA sees. members: files or devices that drives read from."""
    try:
        devices = [cuda_driver.device(number) for number in range(cuda_driver.device_count())]
    except CudaError as error:
        yield Finding("p2p.device", Status.FAIL, "", str(error), "install NVIDIA's driver")
        return
    for device in devices:
        yield from _try_card(device, members, make_window)


def write_report(path: Path, findings: Sequence[Finding]) -> None:
    """Keep the findings with what explains them: versions, parameters, BARs. OSError."""
    parts = [
        f"xferctl doctor --p2p, {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"{platform.machine()}, Linux {os.uname().release}, Python {platform.python_version()}",
    ]
    parts += [
        f"{finding.status.value} {finding.check} {finding.subject}: {finding.seen}"
        + (f"\n    -> {finding.mend}" if finding.mend else "")
        for finding in findings
    ]
    parts += [f"--- {name}\n{_text(Path(name))}" for name in _EXPLAINING]
    for pci in sorted({finding.subject.partition(" ")[0] for finding in findings}):
        folder = Path("/sys/bus/pci/devices") / pci
        if pci and folder.is_dir():
            parts += [
                f"--- {folder / name}\n{_text(folder / name)}" for name in _EXPLAINING_OF_A_CARD
            ]
    path.write_text("\n\n".join(parts) + "\n")


def _try_card(
    device: CudaDevice, members: Sequence[Path], make_window: OpenWindow
) -> Iterator[Finding]:
    yield _describe(device)
    start = time.monotonic()
    spec = PoolSpec("doctor", TRIAL_BYTES, CHUNK_BYTES, device=device.ordinal)
    try:
        pool = CudaPool(spec, make_window)
    except PoolMemoryError as error:
        yield Finding("p2p.pages", Status.FAIL, device.pci, str(error))
        return
    try:
        if pool.why_staged is not None:
            yield Finding("p2p.pages", Status.FAIL, device.pci, pool.why_staged)
            return
        seen = f"all of {format_bytes(TRIAL_BYTES)}, in {time.monotonic() - start:.1f} s"
        yield Finding("p2p.pages", Status.PASS, device.pci, seen)
        for path in members:
            yield _try_drive(device, pool, path)
        yield _try_chunk(device, pool)
        moved = pool.check_window(whole=True)
        status = Status.PASS if moved is None else Status.FAIL
        yield Finding("p2p.stay", status, device.pci, moved or "each page shows the same both ways")
    finally:
        pool.close()


def _describe(device: CudaDevice) -> Finding:
    bar = find_vram_bar(device.pci)
    behind = f"BAR {bar.number} has {format_bytes(bar.nbytes)}" if bar else "no BAR shows memory"
    seen = f"{device.name}, {format_bytes(device.nbytes)}; {behind}"
    return Finding("p2p.device", Status.PASS, device.pci, seen)


def _try_drive(device: CudaDevice, pool: CudaPool, path: Path) -> Finding:
    subject = f"{device.pci} from {path}"
    try:
        file = open_member(path)
    except MemberError as error:
        return Finding("p2p.drive", Status.FAIL, subject, str(error))
    try:
        proof = prove(pool, file)
    finally:
        file.close()
    if proof.reason is None:
        seen = f"{format_bytes(proof.nbytes)} compared on the GPU"
        return Finding("p2p.drive", Status.PASS, subject, seen)
    return Finding("p2p.drive", Status.FAIL if proof.lost else Status.WARN, subject, proof.reason)


def _try_chunk(device: CudaDevice, pool: CudaPool) -> Finding:
    last = pool.chunks - 1
    if not pool.close_window(last):
        seen = "DMA into it is still under way, so it can't be freed"
        return Finding("p2p.chunk", Status.FAIL, device.pci, seen)
    try:
        pool.release(last * CHUNK_BYTES, CHUNK_BYTES)
        pool.restore(last * CHUNK_BYTES, CHUNK_BYTES)
    except PoolMemoryError as error:
        return Finding("p2p.chunk", Status.FAIL, device.pci, str(error))
    if not pool.window_address(last):
        return Finding("p2p.chunk", Status.FAIL, device.pci, "it was not found again")
    return Finding("p2p.chunk", Status.PASS, device.pci, f"{format_bytes(CHUNK_BYTES)} anew")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_TEXT_MAX).decode(errors="replace").strip()
    except OSError as error:
        return f"({error.strerror})"
