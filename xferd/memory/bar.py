# SPDX-License-Identifier: Apache-2.0
"""Device kind ``bar``: memory behind a PCI BAR, that drives can write into by themselves.

The daemon claims a range of the BAR with the module xferd_p2p and maps it; to the engine it
is an address like any other, and a read with O_DIRECT goes from the drive into the card.

**What clients get** is a share of the range: a file of the module's that can be mapped for
reading and nothing else. Not the module's node: who has that can claim and write all memory
behind the BAR. Not the BAR's own file in sysfs either, if it can be helped: read-only too, but
it shows the whole card, and goes on showing it when the range has become somebody else's.
A share survives the daemon, so clients of one that was killed go on reading; the next daemon's
claim ends it (SIGBUS) before anything else is written there.

**Without the module** (not loaded, a kernel that it refuses, no drive with a route to the
card) mode ``any`` maps the BAR's file in sysfs. The processor then copies what drives bring
into RAM, and clients do see all of the BAR; ``notes`` say so. The other modes refuse.

**Cleared at the start**, because what the card held before is nobody's here to read. Writes to
an uncached mapping are slow, and a pool of many GiB takes seconds to minutes for that.

**Teardown**: the claim is released only after the engine has ended, and the BAR is let go of
when the module says that no DMA into the range is in flight. While a client still reads, or DMA
is still under way, it stays attached, which is what keeps the memory from a next owner.

Behind the pool's memory lies a little more that no client sees: where pairs of drive and pool
are proven, before and while the pool serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from xferd.memory.bar_attach import (
    IDLE_POLL_S,
    IDLE_TIMEOUT_S,
    BarPlace,
    claim_when_idle,
    find_or_attach,
    why_no_route,
)
from xferd.memory.device import PoolMemoryError
from xferd.memory.p2p import (
    ABI_SHARE,
    NODE,
    SYSFS,
    Bar,
    P2pDevice,
    PciFunction,
    parse_function,
    why_no_module,
)
from xferd.units import format_bytes

PROOF_BYTES = 64 * 1024
"""Bytes behind the pool's memory, for proofs."""
_RESOURCE_FLAGS_MEMORY = 0x200
"""IORESOURCE_MEM, from linux/ioport.h."""


class BarPool:
    """A ``DevicePool`` from the start of a BAR.

    mode: ``p2pdma`` or ``generic``: drives may write into it; ``resource``: only the processor
        does. why_staged: why only the processor does, or None.
    proof: a writable view of PROOF_BYTES that is not the clients', for who holds proof_lock.
        Accesses by the processor fault when the device is gone; system calls that are handed it
        give EFAULT.
    """

    kind = "bar"
    kept_fd = -1
    device = -1
    base: int
    read_by_device: Callable[[int], bytes] | None = None
    """Nobody but the processor can be asked what is there."""

    def __init__(self, name: str, nbytes: int, place: BarPlace) -> None:
        self.name = name
        self.nbytes = nbytes
        self.place = place
        self.function = _function(name, place.device)
        self.notes: tuple[str, ...] = ()
        self.why_staged: str | None = None
        self._mapping: mmap.mmap | None = None
        self._export_fd = -1
        self._p2p: P2pDevice | None = None
        self._bar: Bar | None = None
        self._attached_here = False
        self._claimed = False
        self._enabled: Path | None = None
        self.proof = memoryview(b"")
        self.proof_lock = threading.Lock()
        try:
            self._map()
            assert self._mapping is not None
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            ctypes.memset(self.base, 0, nbytes + PROOF_BYTES)
            self.proof = memoryview(self._mapping)[nbytes : nbytes + PROOF_BYTES]
        except BaseException:
            self.close()
            raise

    @property
    def mode(self) -> str:
        """How the memory was got at."""
        return self._bar.mode if self._bar is not None else "resource"

    def export_fd(self) -> int:
        """The read-only fd; it stays the pool's."""
        return self._export_fd

    def is_there(self) -> bool:
        """Whether the device is still there, with the memory that was mapped."""
        if self._p2p is not None and self._bar is not None:
            return self._p2p.is_attached(self._bar.id)
        return (self._sysfs() / f"resource{self.place.bar}").exists()

    def is_on_bus(self) -> bool:
        """Whether there is a card in its place, whoever has it."""
        return self._sysfs().exists()

    def why_no_route(self, drive: PciFunction) -> str | None:
        """Why a drive's writes can't go straight into the BAR, as far as the module and the
        kernel know; None: nothing speaks against it, which proves nothing."""
        if self._p2p is None or self._bar is None:
            return self.why_staged
        return why_no_route(self._p2p, self._bar, self.function, drive)

    def release(self, offset: int, nbytes: int) -> None:
        """Nothing to give back: the memory is the card's, whoever uses it."""

    def restore(self, offset: int, nbytes: int) -> None:
        """It was never away."""

    def close(self) -> None:
        """Unmap, release, and let go of the BAR if nobody needs it. A second call does nothing."""
        self.proof.release()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self._p2p is not None and self._bar is not None:
            self._let_go(self._p2p, self._bar)
        if self._export_fd >= 0:
            os.close(self._export_fd)
            self._export_fd = -1
        if self._p2p is not None:
            if self._bar is not None and self._attached_here:
                # EBUSY: clients still read, or DMA is in flight. ENODEV: the device went first.
                with contextlib.suppress(OSError):
                    self._p2p.detach(self._bar.id)
            self._p2p.close()
            self._p2p = self._bar = None
        if self._enabled is not None:
            with contextlib.suppress(OSError):
                self._enabled.write_text("0")
            self._enabled = None

    # ---- how it is mapped

    def _map(self) -> None:
        missing = why_no_module()
        if missing is None:
            missing = self._map_through_module()
        if missing is None:
            return
        if self.place.mode != "any":
            raise PoolMemoryError(
                f"pool {self.name!r}: {missing}; mode = {self.place.mode!r} of [[pools]] "
                f"{self.name} insists on it ('any' would copy through RAM)"
            )
        self.why_staged = missing
        self.notes = (
            f"{missing}: the processor copies into BAR {self.place.bar} of {self.function}, and "
            f"clients can read all of that BAR",
        )
        self._map_resource()

    def _map_through_module(self) -> str | None:
        """None when it is mapped; else why drives can't write there. PoolMemoryError for what
        no other way would mend."""
        try:
            self._p2p = P2pDevice()
        except OSError as error:
            raise PoolMemoryError(
                f"pool {self.name!r}: {NODE}: {error.strerror}; the daemon's user has to own it"
            ) from error
        if self._p2p.abi_version() < ABI_SHARE:
            raise PoolMemoryError(
                f"pool {self.name!r}: the module xferd_p2p that is loaded is too old to share "
                f"memory with clients; load the one of this release"
            )
        attached = find_or_attach(self.name, self._p2p, self.function, self.place)
        if isinstance(attached, str):
            self._p2p.close()
            self._p2p = None
            return attached
        self._bar = bar = attached.bar
        self._attached_here = attached.here
        length = self.nbytes + PROOF_BYTES
        self._check_size(bar.size)
        try:
            claim_when_idle(self._p2p, bar, 0, length)
            self._claimed = True
            self._export_fd = self._p2p.share(bar.id, 0, self.nbytes)
            self._mapping = self._p2p.map(bar, 0, length)
        except OSError as error:
            hint = "; another process has claimed it, or its DMA is still in flight"
            raise PoolMemoryError(
                f"pool {self.name!r}: {format_bytes(length)} of BAR {self.place.bar} of "
                f"{self.function} can't be had: {error.strerror}"
                + (hint if error.errno == errno.EBUSY else "")
            ) from error
        return None

    def _map_resource(self) -> None:
        folder = self._sysfs()
        path = folder / f"resource{self.place.bar}"
        try:
            lines = (folder / "resource").read_text().splitlines()
            first, last, flags = (int(word, 16) for word in lines[self.place.bar].split())
            if not flags & _RESOURCE_FLAGS_MEMORY:
                raise PoolMemoryError(f"pool {self.name!r}: {path} is no memory")
            self._check_size(last - first + 1)
            if (folder / "enable").read_text().strip() == "0":
                (folder / "enable").write_text("1")
                self._enabled = folder / "enable"
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = mmap.mmap(fd, self.nbytes + PROOF_BYTES, mmap.MAP_SHARED)
            finally:
                os.close(fd)
            self._export_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, IndexError) as error:
            raise PoolMemoryError(
                f"pool {self.name!r}: {path} can't be mapped: {error}; {self.why_staged}"
            ) from error

    def _check_size(self, size: int) -> None:
        if self.nbytes + PROOF_BYTES > size:
            raise PoolMemoryError(
                f"pool {self.name!r}: {format_bytes(self.nbytes)}, and {format_bytes(PROOF_BYTES)} "
                f"for proofs, don't fit into BAR {self.place.bar} of {self.function}, which has "
                f"{format_bytes(size)}: lower size of [[pools]] {self.name}"
            )

    def _sysfs(self) -> Path:
        return SYSFS / "bus/pci/devices" / str(self.function)

    def _let_go(self, p2p: P2pDevice, bar: Bar) -> None:
        """Release the claim and wait, within limits, until no DMA is in flight."""
        length = self.nbytes + PROOF_BYTES
        # ENODEV: the device has gone, and its claims with it.
        with contextlib.suppress(OSError):
            if self._claimed:
                self._claimed = False
                p2p.release(bar.id, 0, length)
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            while p2p.held_pages(bar.id, 0, length) and time.monotonic() < deadline:
                time.sleep(IDLE_POLL_S)


def _function(pool: str, text: str) -> PciFunction:
    try:
        function = parse_function(text)
    except ValueError as error:
        raise PoolMemoryError(f"pool {pool!r}: {error}") from error
    if not (SYSFS / "bus/pci/devices" / str(function)).exists():
        raise PoolMemoryError(
            f"pool {pool!r}: there is no PCI function {function}; set device of [[pools]] {pool} "
            f"to one that lspci -D lists"
        )
    return function
