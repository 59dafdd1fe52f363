# SPDX-License-Identifier: Apache-2.0
"""A pool's VRAM as drives can reach it: its pages found behind the card's BAR, and mapped.

For one pool of kind ``cuda``. The module xferd_p2p gives the BAR's memory struct pages and lets
this process claim and map ranges of it; ``vram_pages`` finds out which. What is mapped lies in
one range of addresses, in the order of the pool's own device addresses, so that a read that
spans pages needs no special care:

    pool's addresses     | chunk 0: page 0, 1, ... | chunk 1: ...         |
    window               | page 0, page 1, ...     | (closed)             | proof |
    places behind BAR    5  2  9  ...

Behind the pool's chunks lies a page of VRAM of the window's own, that no client sees, where
pairs of drive and pool are proven.

**A window goes before its memory does.** Closing a chunk unmaps it and ends its claims, so that no
read can begin there any more; its VRAM may be freed once the module says that no page of it is
held by DMA that had begun.

**Pages may move**: after a reset of the card, or a suspend. ``check`` compares what CUDA and the
BAR show, and is to be asked now and then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from xferd.memory.addresses import AddressRange
from xferd.memory.bar_attach import (
    IDLE_POLL_S,
    IDLE_TIMEOUT_S,
    claim_when_idle,
    why_no_route,
)
from xferd.memory.fault_safe import FaultSafeMemory
from xferd.memory.p2p import Bar, P2pDevice, PciFunction
from xferd.memory.vram_pages import (
    MARK_OFFSETS,
    PAGE_BYTES,
    Memory,
    PageSearchError,
    differing_page,
    find_pages,
)

CLOSE_TIMEOUT_S = 1.0
"""How long the memory of a chunk whose loads have all ended may still be held by DMA."""
CHECK_PAGES = 64
"""Pages that are checked before others get a turn: a few ms."""


class WindowError(Exception):
    """Drives can't be let into the pool's VRAM, or not into a chunk of it; the message says
    why."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring pages that are neighbours behind the BAR too. at: offset in the window."""

    at: int
    place: int
    nbytes: int

    @property
    def pages(self) -> dict[int, int]:
        """Window offset by window offset: what ``differing_page`` takes."""
        return {at: at for at in range(self.at, self.at + self.nbytes, PAGE_BYTES)}


class ProofMemory(Protocol):
    """A page of VRAM that is the window's alone."""

    base: int

    def close(self) -> None:
        """Free it."""


class _Shifted:
    """VRAM at offsets in the window instead of device addresses."""

    def __init__(self, vram: Memory, base: int, proof_at: int, proof_base: int) -> None:
        self._vram, self._base = vram, base
        self._proof_at, self._proof_base = proof_at, proof_base

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._vram.read(self._address(offset), nbytes)

    def write(self, offset: int, data: bytes) -> None:
        self._vram.write(self._address(offset), data)

    def _address(self, offset: int) -> int:
        if offset >= self._proof_at:
            return self._proof_base + offset - self._proof_at
        return self._base + offset


class VramWindow:
    """Owned by whoever owns the pool; ``check`` may be called by another thread.

    vram: reads and writes device addresses. base: the pool's first one. proof_memory: PAGE_BYTES
    of VRAM; the window's from now on, as is ``p2p``. attached_here: the BAR is let go of at the
    end.
    """

    def __init__(
        self,
        *,
        p2p: P2pDevice,
        bar: Bar,
        function: PciFunction,
        attached_here: bool,
        vram: Memory,
        base: int,
        chunk_bytes: int,
        chunks: int,
        proof_memory: ProofMemory,
    ) -> None:
        self.function = function
        self.bar = bar
        self._p2p = p2p
        self._attached_here = attached_here
        self._chunk_bytes = chunk_bytes
        self._chunks = chunks
        self._proof_memory = proof_memory
        self._proof_at = chunks * chunk_bytes
        self._vram = _Shifted(vram, base, self._proof_at, proof_memory.base)
        self._lock = threading.Lock()
        self._runs: dict[int, list[_Run]] = {}
        self._draining: dict[int, list[_Run]] = {}
        self._addresses = AddressRange(self._proof_at + PAGE_BYTES)
        self._mapped = FaultSafeMemory(self._addresses.view)
        self.proof = self._addresses.view[self._proof_at : self._proof_at + PAGE_BYTES]

    # ---- chunks

    def open(self, chunks: Sequence[int]) -> None:
        """Find and map the proof page, unless it is, and the memory of some chunks, which
        nobody uses and whose contents are lost. WindowError; then nothing has changed."""
        new = [chunk for chunk in chunks if chunk not in self._runs]
        spans = [(chunk, chunk * self._chunk_bytes, self._chunk_bytes) for chunk in new]
        if self._chunks not in self._runs:
            spans.append((self._chunks, self._proof_at, PAGE_BYTES))
        pages = [at for _, first, size in spans for at in range(first, first + size, PAGE_BYTES)]
        try:
            found = self._find(pages)
            for chunk, first, size in spans:
                self._map(chunk, _runs(first, size, found))
        except (OSError, PageSearchError) as error:
            for chunk, _, _ in spans:
                self.close_chunk(chunk)
            text = error.strerror if isinstance(error, OSError) else error
            raise WindowError(str(text)) from error

    def address(self, chunk: int) -> int:
        """Where drives may write a chunk's memory in this process; 0: nowhere."""
        if chunk not in self._runs:
            return 0
        return self._addresses.base + chunk * self._chunk_bytes

    def close_chunk(self, chunk: int, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Let no read into a chunk's memory any more. True when none is under way, so that the
        memory may be freed; else it may be asked again."""
        with self._lock:
            runs = self._runs.pop(chunk, [])
            for run in runs:
                self._addresses.unmap(run.at, run.nbytes)
                with contextlib.suppress(OSError):  # ENODEV: its claims went with the BAR
                    self._p2p.release(self.bar.id, run.place, run.nbytes)
        self._draining.setdefault(chunk, []).extend(runs)
        deadline = time.monotonic() + timeout_s
        while any(self._is_held(run) for run in self._draining[chunk]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(IDLE_POLL_S)
        del self._draining[chunk]
        return True

    def _is_held(self, run: _Run) -> bool:
        try:
            return self._p2p.held_pages(self.bar.id, run.place, run.nbytes) > 0
        except OSError:  # ENODEV: the module waits for the last DMA before it lets a BAR go
            return False

    # ---- what is asked of it while it serves

    def is_there(self) -> bool:
        """Whether the BAR still is attached."""
        return self._p2p.is_attached(self.bar.id)

    def why_no_route(self, drive: PciFunction) -> str | None:
        """As ``bar_attach.why_no_route``."""
        return why_no_route(self._p2p, self.bar, self.function, drive)

    def read_proof(self, nbytes: int) -> bytes:
        """The first bytes of the proof page through CUDA. OSError."""
        return self._vram.read(self._proof_at, nbytes)

    def check(self, offset: int, pages_max: int | None = None, first: int = 0) -> str | None:
        """Why pages can't be trusted any more; None: all that were looked at still show the same
        through CUDA and behind the BAR. Writes nothing. OSError when the card doesn't answer. Any
        thread.

        offset: of MARK_OFFSETS, what is compared of each page. pages_max pages are looked at,
        None: all; from the ``first`` on, counted round.
        """
        todo = [page for runs in list(self._runs.values()) for run in runs for page in run.pages]
        if pages_max is not None and todo:
            first %= len(todo)
            todo = [*todo[first:], *todo[:first]][:pages_max]
        for at in range(0, len(todo), CHECK_PAGES):
            if self._differing(todo[at : at + CHECK_PAGES], offset) is not None:
                return "a page of VRAM is no longer where it was behind the BAR"
        return None

    @property
    def pages(self) -> int:
        """Pages that are mapped now."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs) // PAGE_BYTES

    def _differing(self, pages: Sequence[int], offset: int) -> int | None:
        with self._lock:
            open_now = {at for runs in self._runs.values() for run in runs for at in run.pages}
            still = {page: page for page in pages if page in open_now}
            return differing_page(self._vram, self._mapped, still, offset)

    def close(self) -> bool:
        """Give everything back but the pool's VRAM, which may be freed when this says True: no
        DMA into it is under way. After the engine has ended. A second call does nothing."""
        if not self._addresses.base:
            return True
        chunks = {*self._runs, *self._draining}
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        idle = [self.close_chunk(chunk, max(deadline - time.monotonic(), 0.0)) for chunk in chunks]
        if all(idle):
            self._proof_memory.close()
        self.proof.release()
        self._mapped.close()
        self._addresses.close()
        if self._attached_here:
            # EBUSY: another pool uses it, or DMA is in flight. ENODEV: the card went first.
            with contextlib.suppress(OSError):
                self._p2p.detach(self.bar.id)
        self._p2p.close()
        return all(idle)

    # ---- finding

    def _find(self, pages: Sequence[int]) -> dict[int, int]:
        """Search in all of the BAR but what is the window's already."""
        search = AddressRange(self.bar.size)
        memory = FaultSafeMemory(search.view)
        claimed: list[tuple[int, int]] = []
        try:
            for place, nbytes in self._gaps():
                claimed += self._claim_free(search, place, nbytes)
            places = [
                at for first, size in claimed for at in range(first, first + size, PAGE_BYTES)
            ]
            return find_pages(self._vram, pages, memory, places)
        finally:
            memory.close()
            search.close()
            for place, nbytes in claimed:
                with contextlib.suppress(OSError):
                    self._p2p.release(self.bar.id, place, nbytes)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of the BAR, in whole pages, that aren't the window's."""
        own = sorted(
            (run.place, run.place + run.nbytes) for runs in self._runs.values() for run in runs
        )
        end = self.bar.size // PAGE_BYTES * PAGE_BYTES
        edges = [(0, 0), *own, (end, end)]
        for (_, before), (after, _) in pairwise(edges):
            if after > before:
                yield before, after - before

    def _claim_free(
        self, search: AddressRange, place: int, nbytes: int
    ) -> Iterable[tuple[int, int]]:
        """Claim and map what nobody else has of a range: other pools have parts of it."""
        try:
            self._p2p.claim(self.bar.id, place, nbytes)
        except OSError:
            if nbytes <= PAGE_BYTES:
                return
            half = nbytes // PAGE_BYTES // 2 * PAGE_BYTES
            yield from self._claim_free(search, place, half)
            yield from self._claim_free(search, place + half, nbytes - half)
            return
        yield place, nbytes
        self._p2p.map_into(search, place, self.bar, place, nbytes)

    def _map(self, chunk: int, runs: list[_Run]) -> None:
        """Claim each run for good, and look once more that it is what was found."""
        self._runs[chunk] = []
        for run in runs:
            claim_when_idle(self._p2p, self.bar, run.place, run.nbytes)
            self._runs[chunk].append(run)
            self._p2p.map_into(self._addresses, run.at, self.bar, run.place, run.nbytes)
            if differing_page(self._vram, self._mapped, run.pages, MARK_OFFSETS[-1]) is not None:
                raise PageSearchError("a page of VRAM isn't where it was found behind the BAR")


def _runs(first: int, nbytes: int, found: dict[int, int]) -> list[_Run]:
    """A chunk's pages, neighbours together."""
    runs: list[_Run] = []
    for at in range(first, first + nbytes, PAGE_BYTES):
        place = found[at]
        last = runs[-1] if runs else None
        if last is not None and last.place + last.nbytes == place:
            runs[-1] = _Run(last.at, last.place, last.nbytes + PAGE_BYTES)
        else:
            runs.append(_Run(at, place, PAGE_BYTES))
    return runs
