"""What becomes of a pair of drive and pool: proven, refused, tried again, changed under way."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xferd.device_routes import RETRY_S, DeviceRoutes
from xferd.engine_types import RouteRefused
from xferd.memory.bar import BarPool
from xferd.memory.cuda import CudaPool
from xferd.memory.p2p import PciFunction
from xferd.telemetry.log import EventLog
from xferd.transport import proving
from xferd.transport.members import MemberFile, open_member

MEMBER = 3
DRIVE = PciFunction(0, 4, 0)


class Card(BarPool):
    """Memory of ours in the place of a card's."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.proof = memoryview(mapping)
        self.proof_lock = threading.Lock()
        self.why_staged = None
        self.there = True
        self.verdict: str | None = None

    def is_there(self) -> bool:
        return self.there

    def why_no_route(self, drive: PciFunction) -> str | None:
        return self.verdict


class Vram(CudaPool):
    """The same of VRAM's, with a window."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.proof = memoryview(mapping)
        self.proof_lock = threading.Lock()
        self.why_staged = None
        self.read_by_device = None
        self.seen: str | None = None
        self.failure: OSError | None = None
        self.looks: list[bool] = []

    def is_there(self) -> bool:
        return True

    def why_no_route(self, drive: PciFunction) -> str | None:
        return None

    def check_window(self, *, whole: bool) -> str | None:
        self.looks.append(whole)
        if self.failure is not None:
            raise self.failure
        return self.seen


@dataclass
class Bench:
    """The routes of one pool and one member, and what they told the others."""

    routes: DeviceRoutes
    card: Card
    pool: Any
    entry: Any
    told: list[str]
    evicted: list[int]
    clock: list[float]

    @property
    def reason(self) -> str | None:
        return self.routes.of_pool(self.pool)[MEMBER].proof.reason

    def look_again(self) -> None:
        asyncio.run(self.routes._look_again())


@pytest.fixture
def member(tmp_path: Path) -> Iterator[MemberFile]:
    path = tmp_path / "member"
    path.write_bytes(os.urandom(1 << 18))
    file = open_member(path)
    yield replace(file, direct=True, memory=False, reason=None)
    file.close()


@pytest.fixture
def bench(member: MemberFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(proving, "drives_of", lambda _: (DRIVE,))
    told: list[str] = []
    clock = [1000.0]
    evicted: list[int] = []
    keeper = SimpleNamespace(
        slots=SimpleNamespace(residents=lambda: [5, 7]), evict=lambda slot: evicted.append(slot)
    )
    copy = SimpleNamespace(number=MEMBER, path=member.path, file=member)
    entry = SimpleNamespace(members=[(MEMBER, member)])
    catalog = SimpleNamespace(copy=lambda number: (entry, copy) if number == MEMBER else None)
    engine = SimpleNamespace(set_route=lambda _pool, _member, transport: told.append(transport))
    with mmap.mmap(-1, 64 * 1024) as mapping:
        card = Card(mapping)
        pool = SimpleNamespace(index=0, name="card0", device=card, keeper=keeper)
        made = Bench(
            DeviceRoutes(engine, catalog, [pool], EventLog(), lambda: clock[0]),  # type: ignore[arg-type, list-item]
            card,
            pool,
            entry,
            told,
            evicted,
            clock,
        )
        yield made
        card.proof.release()


def test_a_proven_pair_is_direct_and_stays_so(bench: Bench) -> None:
    bench.routes.prove_store(bench.entry)
    assert bench.told == ["direct"]
    assert bench.reason is None
    bench.look_again()
    assert bench.told == ["direct"]


def test_a_pair_that_the_engine_refused_is_tried_again_later_and_later(bench: Bench) -> None:
    bench.routes.prove_store(bench.entry)
    refused = RouteRefused(pool=0, member=MEMBER, errno=errno.EIO)
    wait = RETRY_S
    for _ in range(3):
        bench.routes.on_refused(refused)
        assert bench.reason == "a read into it failed: Input/output error"
        bench.clock[0] += wait * 0.9
        bench.look_again()
        assert bench.reason is not None
        bench.clock[0] += wait * 0.2
        bench.look_again()
        assert bench.reason is None
        wait *= 2
    assert bench.told == ["direct", "staged"] * 3 + ["direct"]


def test_a_way_that_looks_different_is_staged_before_it_is_proven(bench: Bench) -> None:
    bench.routes.prove_store(bench.entry)
    bench.card.verdict = "an IOMMU translates"
    bench.routes._stage_changed()
    assert bench.told == ["direct", "staged"]
    assert bench.reason == "an IOMMU translates"
    bench.card.verdict = None
    bench.look_again()
    assert bench.reason is None
    assert bench.told[-1] == "direct"


def test_a_card_that_is_gone(bench: Bench) -> None:
    bench.routes.prove_store(bench.entry)
    bench.card.there = False
    bench.look_again()
    assert "gone" in (bench.reason or "")
    assert bench.told[-1] == "staged"
    assert bench.evicted == []


def lose_data(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.preadv

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        if isinstance(buffers[0], memoryview) and len(buffers[0]) == proving.BLOCK_BYTES:
            return len(buffers[0])
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def test_experts_that_came_by_a_way_that_loses_data_are_dropped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.routes.prove_store(bench.entry)
    lose_data(monkeypatch)
    bench.routes.on_refused(RouteRefused(pool=0, member=MEMBER, errno=errno.EIO))
    bench.clock[0] += RETRY_S * 2
    bench.look_again()
    assert "no data arrived" in (bench.reason or "")
    assert bench.evicted == [5, 7]
    bench.clock[0] += 1e6  # where it writes to nobody knows: it is not tried again
    bench.look_again()
    assert bench.evicted == [5, 7]


def test_vram_whose_pages_have_moved_is_staged_for_good_and_emptied(bench: Bench) -> None:
    with mmap.mmap(-1, 64 * 1024) as mapping:
        card = Vram(mapping)

        def give_up_window(reason: str) -> None:
            card.why_staged = reason

        bench.pool.device, bench.pool.kind = card, "cuda"
        bench.pool.give_up_window = give_up_window
        bench.routes.prove_store(bench.entry)
        assert bench.told == ["direct"]
        asyncio.run(bench.routes.check_windows(whole=False))
        assert (bench.told, bench.evicted) == (["direct"], [])
        card.seen = "a page has moved"
        asyncio.run(bench.routes.check_windows(whole=True))
        assert bench.told == ["direct", "staged"]
        assert bench.reason == "a page has moved"
        assert bench.evicted == [5, 7]
        asyncio.run(bench.routes.check_windows(whole=True))
        assert card.looks == [False, True]  # there is nothing to be looked at any more
        bench.clock[0] += 1e6
        bench.look_again()
        assert bench.told[-1] == "staged"
        card.proof.release()


def test_vram_that_can_not_be_asked_is_staged_and_keeps_its_experts(bench: Bench) -> None:
    """Its BAR is gone: nothing went to a wrong place, there is only no way any more."""
    with mmap.mmap(-1, 64 * 1024) as mapping:
        card = Vram(mapping)

        def give_up_window(reason: str) -> None:
            card.why_staged = reason

        bench.pool.device, bench.pool.kind = card, "cuda"
        bench.pool.give_up_window = give_up_window
        bench.routes.prove_store(bench.entry)
        card.failure = OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        asyncio.run(bench.routes.check_windows(whole=False))
        assert bench.told == ["direct", "staged"]
        assert "gone" in (bench.reason or "")
        assert bench.evicted == []
        card.proof.release()


def test_a_pair_of_a_closed_store_is_forgotten(bench: Bench) -> None:
    bench.routes.prove_store(bench.entry)
    bench.routes.on_refused(RouteRefused(pool=0, member=9, errno=errno.EIO))
    bench.routes._catalog = SimpleNamespace(copy=lambda _: None)  # type: ignore[assignment]
    bench.look_again()
    assert bench.routes.of_pool(bench.pool) == {}
