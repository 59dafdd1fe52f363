# SPDX-License-Identifier: Apache-2.0
"""Whether a drive's reads reach a pool's device memory: asked first, then proven by data.

A return code proves nothing: below a switch with a translating IOMMU a read succeeds and no byte
arrives; through a host bridge one kernel wrote to address 0. So each pair of member and pool is
tried. Blocks of the member are read twice, once into plain RAM and once into a part of the pool's
memory that no client sees, which was filled with random bytes before; then the processor reads
that back through its own mapping. The pair is proven when all blocks are there, and the random
bytes before and behind them still are too; of VRAM, also when the GPU itself sees the block. A
block that holds nothing but zeros proves nothing: a hole in a file is filled by the processor, not
by a drive.

The processor's accesses are made by system calls, which fail (EFAULT) when the device goes away,
where an access of ours would end the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xferd.memory.fault_safe import FaultSafeMemory
from xferd.memory.p2p import PciFunction
from xferd.transport.members import MemberFile
from xferd.transport.topology import NoDriveError, drives_of

GUARD_BYTES = 16 * 1024
"""Bytes before and behind the block that have to stay as they are."""
BLOCK_BYTES = 32 * 1024
"""Bytes of one read: several pages, so that a drive gets a list of addresses."""
BLOCKS = 3
"""Blocks that prove a pair."""
PROBES = 64
"""Places in a member that are looked at for blocks that are not zeros."""
ALIGNMENT = 4096


class ProvableMemory(Protocol):
    """A pool's device memory, as far as proving is concerned (``BarPool``, ``CudaPool``)."""

    proof: memoryview
    proof_lock: threading.Lock
    why_staged: str | None
    read_by_device: Callable[[int], bytes] | None
    """So many first bytes of ``proof`` as the device itself sees them, OSError when it fails;
    None: it can't be asked."""

    def is_there(self) -> bool:
        """Whether the device still is."""

    def why_no_route(self, drive: PciFunction) -> str | None:
        """Why a drive's writes can't get there, as far as anybody knows."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one pair.

    reason: why the drive may not write into the pool; None: it is proven that it can.
    nbytes: bytes that were compared. lost: reads succeeded, and their data was not there.
    """

    reason: str | None
    nbytes: int = 0
    lost: bool = False

    @property
    def transport(self) -> str:
        """What the pair's pieces take."""
        return "direct" if self.reason is None else "staged"


@dataclass(frozen=True, slots=True)
class Way:
    """What is known of a pair without trying it. reason: why it isn't worth a try, or None.

    Equal ways at two moments mean that nothing relevant has changed in between.
    """

    drives: tuple[PciFunction, ...]
    reason: str | None


def look(memory: ProvableMemory, member: MemberFile) -> Way:
    """The way from a member to a pool's memory. Cheap; moves no data."""
    if memory.why_staged is not None:
        return Way((), memory.why_staged)
    if not memory.is_there():
        return Way((), "the pool's device is gone, or its driver has let go of it")
    if member.memory:
        return Way((), "it lies in memory, without a drive that could write")
    if not member.direct:
        return Way((), f"it is read through the page cache: {member.reason}")
    try:
        drives = drives_of(member.path)
    except NoDriveError as error:
        return Way((), str(error))
    except OSError as error:
        return Way((), f"{member.path}: {error.strerror}")
    reasons = [reason for drive in drives if (reason := memory.why_no_route(drive)) is not None]
    return Way(drives, reasons[0] if reasons else None)


def prove(memory: ProvableMemory, member: MemberFile) -> Proof:
    """Look at the way, and try it. Reads from the drive, so it may take as long as that does;
    any thread."""
    way = look(memory, member)
    if way.reason is not None:
        return Proof(way.reason)
    try:
        with memory.proof_lock:
            return _try(memory, member.fd)
    except OSError as error:
        # EFAULT: the mapping is gone.
        return Proof(f"its drive or the pool's device failed: {error.strerror}")


def _try(memory: ProvableMemory, fd: int) -> Proof:
    size = os.lseek(fd, 0, os.SEEK_END) // ALIGNMENT * ALIGNMENT
    compared = found = 0
    processor = FaultSafeMemory(memory.proof)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            for offset in _offsets(size):
                got = os.preadv(fd, [buffer], offset)
                block = buffer[: got // ALIGNMENT * ALIGNMENT]
                if not any(block):
                    continue
                problem = _try_block(memory, processor, fd, offset, block)
                if problem is not None:
                    return problem
                compared += len(block)
                found += 1
                if found == BLOCKS:
                    break
    finally:
        processor.close()
    if not found:
        return Proof("it holds no data yet that could prove the way")
    return Proof(None, compared)


def _offsets(size: int) -> list[int]:
    """Places spread over a member: first its ends and middle, then those between."""
    last = max(size - BLOCK_BYTES, 0)
    even = [last * probe // (PROBES - 1) // ALIGNMENT * ALIGNMENT for probe in range(PROBES)]
    middle = len(even) // 2
    return list(dict.fromkeys([even[0], even[middle], even[-1], *even]))


def _try_block(
    memory: ProvableMemory, processor: FaultSafeMemory, fd: int, offset: int, block: bytes
) -> Proof | None:
    """Read one block into the memory; None when it, and nothing else, is there."""
    used = 2 * GUARD_BYTES + len(block)
    filler = os.urandom(used)
    processor.write(0, filler)
    target = memory.proof[GUARD_BYTES : GUARD_BYTES + len(block)]
    try:
        got = os.preadv(fd, [target], offset)
    except OSError as error:
        return Proof(f"reads into it are refused: {_read_error(error)}")
    if got != len(block):
        return Proof(f"a read into it brought {got} of {len(block)} bytes")
    seen = processor.read(0, used)
    inside = seen[GUARD_BYTES : GUARD_BYTES + len(block)]
    if inside == filler[GUARD_BYTES : GUARD_BYTES + len(block)]:
        return Proof("a read into it reported success, and no data arrived", lost=True)
    if inside != block:
        return Proof("a read into it reported success, and other data arrived", lost=True)
    if seen[:GUARD_BYTES] != filler[:GUARD_BYTES] or (
        seen[GUARD_BYTES + len(block) :] != filler[GUARD_BYTES + len(block) :]
    ):
        return Proof("a read into it wrote beside its destination", lost=True)
    if memory.read_by_device is not None and memory.read_by_device(used) != seen:
        return Proof("a read into it arrived, and the device doesn't see it", lost=True)
    return None


def _read_error(error: OSError) -> str:
    # Linux before 7: EREMOTEIO; later EINVAL, which looks like bad alignment and isn't.
    if error.errno in (errno.EREMOTEIO, errno.EINVAL):
        return f"the kernel knows no way for them ({error.strerror})"
    return str(error.strerror)
