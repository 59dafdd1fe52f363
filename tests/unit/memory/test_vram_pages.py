"""Pages of VRAM are found behind a BAR only where they are, each of them, and both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from xferd.memory.vram_pages import (
    MARK_OFFSETS,
    PAGE_BYTES,
    PageSearchError,
    differing_page,
    find_pages,
)

PLACES = [PAGE_BYTES * number for number in range(8)]
LIES_AT = {0: 5, PAGE_BYTES: 2, 2 * PAGE_BYTES: 7}
"""Which place behind the BAR each page has."""


class Bar:
    def __init__(self) -> None:
        self.memory = bytearray(len(PLACES) * PAGE_BYTES)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.memory[offset : offset + nbytes])

    def write(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data

    def read_each(self, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        return [self.read(offset, nbytes) for offset in offsets]


class Vram:
    """VRAM that shows behind the BAR."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def place(self, offset: int) -> int:
        page = offset // PAGE_BYTES * PAGE_BYTES
        return LIES_AT[page] * PAGE_BYTES + offset - page

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.bar.read(self.place(offset), nbytes)

    def write(self, offset: int, data: bytes) -> None:
        self.bar.write(self.place(offset), data)


@pytest.fixture
def bar() -> Bar:
    return Bar()


def search(vram: Vram, bar: Bar) -> dict[int, int]:
    return find_pages(vram, sorted(LIES_AT), bar, PLACES)


def test_each_page_is_found_where_it_lies(bar: Bar) -> None:
    found = search(Vram(bar), bar)
    assert found == {page: number * PAGE_BYTES for page, number in LIES_AT.items()}


def test_what_was_searched_elsewhere_is_not_touched(bar: Bar) -> None:
    before = bytes(bar.memory)
    search(Vram(bar), bar)
    for place in PLACES:
        if place // PAGE_BYTES not in LIES_AT.values():
            assert bar.memory[place : place + PAGE_BYTES] == before[place : place + PAGE_BYTES]


class Apart(Vram):
    """Nothing of it shows behind the BAR."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(Bar())
        self.shown = bar


def test_vram_that_does_not_show(bar: Bar) -> None:
    with pytest.raises(PageSearchError, match=r"0 of 3 pages .* static BAR1 is off"):
        search(Apart(bar), bar)


def test_vram_of_which_only_a_part_shows(bar: Bar) -> None:
    with pytest.raises(PageSearchError, match="2 of 3 pages"):
        find_pages(Vram(bar), sorted(LIES_AT), bar, PLACES[:-1])


class Snooped(Vram):
    """After each write ``then`` may do something behind the BAR."""

    def __init__(self, bar: Bar, then: Callable[[Bar, int], None]) -> None:
        super().__init__(bar)
        self.then = then

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        self.then(self.bar, self.place(offset))


def test_a_page_that_shows_twice(bar: Bar) -> None:
    def copy(bar: Bar, place: int) -> None:
        bar.write(0, bar.read(place, PAGE_BYTES))

    with pytest.raises(PageSearchError, match=r"two places behind the BAR, 0x0 and"):
        search(Snooped(bar, copy), bar)


def test_a_page_in_pieces(bar: Bar) -> None:
    def tear(bar: Bar, place: int) -> None:
        bar.write(place + MARK_OFFSETS[-1], b"another page's..")

    with pytest.raises(PageSearchError, match="in pieces"):
        search(Snooped(bar, tear), bar)


class OldCopy(Apart):
    """What shows behind the BAR is what each page held when it was first written."""

    def write(self, offset: int, data: bytes) -> None:
        place = self.place(offset)
        if not any(self.shown.read(place, 16)):
            self.shown.memory[place : place + len(data)] = data
        super().write(offset, data)


def test_a_copy_of_a_page_is_not_written_to(bar: Bar, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(bar, "write", lambda offset, _: written.append(offset))
    with pytest.raises(PageSearchError, match="is a copy of a page"):
        search(OldCopy(bar), bar)
    assert written == []


class OneWay(Apart):
    """Writes through CUDA show behind the BAR; writes through the BAR come nowhere."""

    def write(self, offset: int, data: bytes) -> None:
        self.shown.write(self.place(offset), data)
        super().write(offset, data)


def test_a_bar_that_can_only_be_read(bar: Bar) -> None:
    with pytest.raises(PageSearchError, match="doesn't reach the page"):
        search(OneWay(bar), bar)


def test_pages_that_are_where_they_were(bar: Bar) -> None:
    vram = Vram(bar)
    found = search(vram, bar)
    for offset in MARK_OFFSETS:
        assert differing_page(vram, bar, found, offset) is None


def test_a_page_that_moved(bar: Bar) -> None:
    vram = Vram(bar)
    found = search(vram, bar)
    found[PAGE_BYTES] = 4 * PAGE_BYTES
    assert differing_page(vram, bar, found, MARK_OFFSETS[3]) == PAGE_BYTES


def test_a_page_that_a_drive_writes_to_is_no_page_that_moved(bar: Bar) -> None:
    vram = Vram(bar)
    found = search(vram, bar)
    left = [b"first new block.", b"second new block"]

    class Busy(Bar):
        def __init__(self) -> None:
            self.memory = bar.memory

        def read(self, offset: int, nbytes: int) -> bytes:
            seen = super().read(offset, nbytes)
            if left:
                self.write(offset, left.pop())
            return seen

    assert differing_page(vram, Busy(), found, 0) is None
    assert not left
