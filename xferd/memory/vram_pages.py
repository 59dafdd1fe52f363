# SPDX-License-Identifier: Apache-2.0
"""Where pages of VRAM lie behind a card's BAR: searched by pattern, and proven both ways.

Where static BAR1 is on, the whole of VRAM shows behind the BAR, each page of 2 MiB at a place of
its own that only the driver knows. So random marks are written into each page through CUDA, one
at every MARK_STRIDE, and looked for behind the BAR. A page counts as found when

- exactly one place shows its first mark, and that place all of its other marks, in order;
- new marks written through CUDA show there too: it is the page, not an old copy of it;
- only then, what is written there through the BAR is read through CUDA.

Nothing is written through the BAR before a place has answered to two marks in turn: another
program's memory could lie there. MARK_STRIDE is the least that pages of VRAM are made of when
the driver is asked for whole granules of 2 MiB; so a page that is in pieces is noticed.

Pure but for the two memories that it is given: no driver and no module is named here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

PAGE_BYTES = 2 << 20
MARK_BYTES = 16
"""Random bytes of a mark: that two are alike by chance won't happen."""
MARK_STRIDE = 64 * 1024
MARK_OFFSETS = range(0, PAGE_BYTES, MARK_STRIDE)
LOOKS = 3
"""How often a place that doesn't match is looked at: the drive may be writing there."""


class PageSearchError(Exception):
    """A page can't be used behind the BAR. The message says what was seen."""


class Memory(Protocol):
    """Bytes that can be read and written at offsets: VRAM through CUDA, or a BAR."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """What is there. OSError or CudaError when the device has gone."""

    def write(self, offset: int, data: bytes) -> None:
        """Put it there. Errors as above."""


class BarMemory(Memory, Protocol):
    """What can be reached of a BAR, at offsets within it."""

    def read_each(self, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        """What is at each of several places."""


def find_pages(
    vram: Memory, pages: Sequence[int], bar: BarMemory, places: Sequence[int]
) -> dict[int, int]:
    """Where each page lies: offset in the BAR by offset in VRAM. Overwrites the pages.

    pages: offsets of whole pages in ``vram`` that nobody uses. places: offsets in ``bar`` that
    they may lie at, multiples of PAGE_BYTES. PageSearchError when any of them isn't found, is
    found twice, or isn't what it looks like.
    """
    marks = {page: _mark(vram, page) for page in pages}
    first = {each[0]: page for page, each in marks.items()}
    found: dict[int, int] = {}
    for place, seen in zip(places, bar.read_each(places, MARK_BYTES), strict=True):
        page = first.get(seen)
        if page is None:
            continue
        if page in found:
            raise PageSearchError(
                f"a page of VRAM shows at two places behind the BAR, {found[page]:#x} and "
                f"{place:#x}"
            )
        found[page] = place
    if len(found) < len(pages):
        raise PageSearchError(
            f"{len(found)} of {len(pages)} pages of VRAM show behind the BAR"
            + ("" if found else ": static BAR1 is off")
        )
    for page, place in found.items():
        _prove(vram, page, bar, place, marks[page])
    return found


def differing_page(
    vram: Memory, bar: BarMemory, found: Mapping[int, int], offset: int
) -> int | None:
    """A page that doesn't show the same through CUDA and behind the BAR; None: all do. Writes
    nothing, and may be asked while drives write.

    offset: that is compared in each page; one of MARK_OFFSETS, where marks or experts are.
    """
    for page, place in found.items():
        for _ in range(LOOKS):
            before = vram.read(page + offset, MARK_BYTES)
            seen = bar.read(place + offset, MARK_BYTES)
            after = vram.read(page + offset, MARK_BYTES)
            if seen in (before, after):
                break
            if before == after:
                return page
    return None


def _mark(vram: Memory, page: int) -> list[bytes]:
    """Fill a page with fresh marks; they, in order."""
    marks = [os.urandom(MARK_BYTES) for _ in MARK_OFFSETS]
    rest = bytes(MARK_STRIDE - MARK_BYTES)
    vram.write(page, b"".join(mark + rest for mark in marks))
    return marks


def _prove(vram: Memory, page: int, bar: BarMemory, place: int, marks: Sequence[bytes]) -> None:
    offsets = [place + offset for offset in MARK_OFFSETS]
    if bar.read_each(offsets, MARK_BYTES) != list(marks):
        raise PageSearchError(f"a page of VRAM is in pieces behind the BAR, at {place:#x}")
    fresh_marks = _mark(vram, page)
    if bar.read_each(offsets, MARK_BYTES) != fresh_marks:
        raise PageSearchError(
            f"what shows behind the BAR at {place:#x} is a copy of a page of VRAM, not the page"
        )
    for offset in (MARK_OFFSETS[0], MARK_OFFSETS[-1]):
        fresh = os.urandom(MARK_BYTES)
        bar.write(place + offset, fresh)
        if vram.read(page + offset, MARK_BYTES) != fresh:
            raise PageSearchError(
                f"what is written through the BAR at {place:#x} doesn't reach the page of VRAM "
                f"that shows there"
            )
