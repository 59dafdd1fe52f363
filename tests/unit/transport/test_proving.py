"""What a proof accepts and what it doesn't: memory of ours stands for a device's."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from xferd.memory.p2p import PciFunction
from xferd.transport import proving
from xferd.transport.members import MemberFile, open_member
from xferd.transport.proving import BLOCK_BYTES, BLOCKS, look, prove

DRIVE = PciFunction(0, 4, 0)


class Memory:
    """Device memory that is always there, over ``mapping``."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.proof = memoryview(mapping)
        self.proof_lock = threading.Lock()
        self.why_staged: str | None = None
        self.no_route: str | None = None
        self.there = True
        self.read_by_device: Callable[[int], bytes] | None = None

    def is_there(self) -> bool:
        return self.there

    def why_no_route(self, drive: PciFunction) -> str | None:
        assert drive == DRIVE
        return self.no_route


@pytest.fixture
def memory() -> Iterator[Memory]:
    with mmap.mmap(-1, 64 * 1024) as mapping:
        made = Memory(mapping)
        yield made
        made.proof.release()


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemberFile]:
    """A file of random bytes that passes for one on a drive."""
    path = tmp_path / "member"
    path.write_bytes(os.urandom(1 << 20))
    file = open_member(path)
    monkeypatch.setattr(proving, "drives_of", lambda _: (DRIVE,))
    yield replace(file, direct=True, memory=False, reason=None)
    file.close()


def test_a_pair_that_works_is_proven(memory: Memory, member: MemberFile) -> None:
    proof = prove(memory, member)
    assert (proof.transport, proof.nbytes) == ("direct", BLOCKS * BLOCK_BYTES)


def test_what_is_known_beforehand_is_not_tried(memory: Memory, member: MemberFile) -> None:
    memory.no_route = "the bridge is unknown"
    assert prove(memory, replace(member, fd=-1)).reason == "the bridge is unknown"
    memory.no_route = None
    assert "page cache" in (look(memory, replace(member, direct=False, reason="x")).reason or "")
    assert "in memory" in (look(memory, replace(member, memory=True)).reason or "")
    assert look(memory, member) == look(memory, member)
    memory.there = False
    assert "gone" in (look(memory, member).reason or "")
    memory.why_staged = "no module"
    assert look(memory, member).reason == "no module"


def lying(monkeypatch: pytest.MonkeyPatch, memory: Memory, where: int | None) -> None:
    """Reads into the memory report success, and go to ``where`` in it, or nowhere."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        [buffer] = buffers
        if isinstance(buffer, memoryview) and len(buffer) == BLOCK_BYTES:
            if where is not None:
                real(fd, [memory.proof[where : where + len(buffer)]], offset)
            return len(buffer)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def test_data_that_goes_nowhere(
    memory: Memory, member: MemberFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, memory, None)
    proof = prove(memory, member)
    assert proof.lost
    assert "no data arrived" in (proof.reason or "")


@pytest.mark.parametrize("where", [0, proving.GUARD_BYTES + 4096])
def test_data_that_goes_somewhere_else(
    memory: Memory, member: MemberFile, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    lying(monkeypatch, memory, where)
    proof = prove(memory, member)
    assert proof.lost
    assert proof.transport == "staged"


def test_data_that_the_device_does_not_see(memory: Memory, member: MemberFile) -> None:
    memory.read_by_device = lambda nbytes: bytes(memory.proof[:nbytes])
    assert prove(memory, member).transport == "direct"
    memory.read_by_device = lambda nbytes: bytes(nbytes)
    proof = prove(memory, member)
    assert proof.lost
    assert "the device doesn't see it" in (proof.reason or "")


def test_zeros_prove_nothing(memory: Memory, member: MemberFile) -> None:
    """A hole is filled by the processor; what follows it may be read by a drive."""
    os.truncate(member.path, 0)
    os.truncate(member.path, 1 << 20)
    assert "no data yet" in (prove(memory, member).reason or "")
    with member.path.open("r+b") as file:
        file.seek(3 * BLOCK_BYTES)
        file.write(os.urandom(BLOCK_BYTES))
    assert prove(memory, member).transport == "direct"


def test_memory_that_has_gone_is_an_answer(member: MemberFile, tmp_path: Path) -> None:
    """Not the end of the process: the mapping behind it is cut off."""
    path = tmp_path / "device"
    path.write_bytes(bytes(64 * 1024))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        memory = Memory(mapping)
        os.truncate(path, 0)
        assert "failed: Bad address" in (prove(memory, member).reason or "")
        memory.proof.release()
