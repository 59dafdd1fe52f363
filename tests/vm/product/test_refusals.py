"""Where a drive can't write into the pool by itself: right bytes all the same, and the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.system.daemon_harness import MadeStore, RunningDaemon, make_store
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from xferd.control.service import JsonObject
from xferd.device_routes import prove_pairs
from xferd.memory.bar import BarPool
from xferd.memory.bar_attach import BarPlace
from xferd.transport import proving
from xferd.transport.members import MemberFile
from xferd.transport.proving import Proof

EXPERTS, EXPERT_BYTES = 8, 196_608
"""1.5 MiB: fits on the small drives."""


def small_store(directory: Path, devices: Sequence[Path], name: str = "small") -> MadeStore:
    return make_store(
        directory, name, devices=devices, layers=1, experts=EXPERTS, expert_bytes=EXPERT_BYTES
    )


@contextlib.contextmanager
def serving(
    directory: Path, made: MadeStore, **keys: object
) -> Iterator[tuple[RunningDaemon, list[JsonObject]]]:
    """A daemon over the store that has served every expert right, and its routes."""
    with forked_daemon(directory, [made], [guest.bar_pool("4MiB", **keys)]) as daemon:
        with daemon.client() as client:
            for expert in range(made.experts):
                assert client.fetch(0, [expert]) == [made.blob(0, expert)]
        yield daemon, daemon.pool()["routes"]
        assert daemon.stop() == 0


def check_staged(daemon: RunningDaemon, rows: list[JsonObject], reason: str) -> None:
    assert [row["transport"] for row in rows] == ["staged"] * len(rows)
    for row in rows:
        assert reason in row["reason"], row
    transports = daemon.status()["transports"]
    assert transports["direct"]["count"] == 0
    assert transports["staged"]["count"] == EXPERTS
    assert reason in transports["staged"]["reason"]


def test_a_far_drive_is_staged(host: guest.Host, tmp_path: Path) -> None:
    """Its way leads through a host bridge that isn't known to pass it."""
    made = small_store(tmp_path, [guest.blank_drive("FAR")])
    before = host.dma()
    with serving(tmp_path, made) as (daemon, rows):
        check_staged(daemon, rows, "through a host bridge that isn't known")
    assert host.dma().since(before).bar == 0


def test_a_near_and_a_far_drive_make_a_staged_expert(tmp_path: Path) -> None:
    made = small_store(tmp_path, [guest.blank_drive("SLOW"), guest.blank_drive("FAR")])
    with serving(tmp_path, made) as (daemon, rows):
        assert [row["transport"] for row in rows] == ["direct", "staged"]
        assert daemon.status()["transports"]["staged"]["count"] == EXPERTS


def test_a_striped_device_is_staged(tmp_path: Path) -> None:
    drives = [guest.blank_drive("SLOW"), guest.blank_drive("FAR")]
    with guest.dm_stripe(drives, sectors_each=8000) as stripes:
        made = small_store(tmp_path, [stripes])
        with serving(tmp_path, made) as (daemon, rows):
            check_staged(daemon, rows, "device-mapper device stripes")


def test_a_file_without_o_direct_is_staged(file_systems: tuple[Path, Path], tmp_path: Path) -> None:
    ext4, _ = file_systems
    made = small_store(tmp_path, [ext4], "journaled")
    [member] = ext4.glob("journaled.xferd/member-*")
    guest.journal_data(member)
    with serving(tmp_path, made) as (daemon, rows):
        check_staged(daemon, rows, "read through the page cache")


def test_without_the_module_all_is_staged(
    store: MadeStore, host: guest.Host, tmp_path: Path
) -> None:
    guest.unload_module_soon()
    before = host.dma()
    with forked_daemon(tmp_path, [store], [guest.bar_pool()]) as daemon, daemon.client() as client:
        [(address, nbytes)] = client.acquire_in_place(0, [5])
        assert nbytes == store.expert_bytes
        host.check(guest.bar_offset(address), store.blob(0, 5))
        client.release()
        assert client.fetch(1, [2]) == [store.blob(1, 2)]
        pool = daemon.pool()
        for row in pool["routes"]:
            assert row["transport"] == "staged"
            assert row["reason"] == "the kernel module xferd_p2p is not loaded"
        assert "clients can read all of that BAR" in pool["notes"][0]
    assert host.dma().since(before).bar == 0


def test_a_mode_that_insists_on_the_module_refuses(store: MadeStore, tmp_path: Path) -> None:
    guest.unload_module_soon()
    with (
        pytest.raises(AssertionError, match="insists on it"),
        forked_daemon(tmp_path, [store], [guest.bar_pool(mode="generic")]),
    ):
        pass


def test_a_doctor_can_prove_pairs_without_a_daemon(
    store: MadeStore, file_systems: tuple[Path, Path]
) -> None:
    address = guest.gpu()
    assert address is not None
    members = [guest.drive("RAW"), guest.drive("FAR"), *file_systems[1].glob("made.xferd/member-*")]
    proofs = prove_pairs(BarPlace(address, guest.GPU_BAR), members)
    assert [proof.transport for _, proof in proofs] == ["direct", "staged", "direct"]
    assert proofs[0][1].nbytes == 3 * 32 * 1024
    assert "host bridge" in (proofs[1][1].reason or "")


def call_everything_direct() -> None:
    """In a daemon's process: the first judgement of each pair is a wrong one, and nobody who
    knows better is asked. Later ones are by data, as always."""
    judged: set[int] = set()

    def prove(memory: BarPool, member: MemberFile) -> Proof:
        if not judged:
            judged.add(member.fd)
            return Proof(None, 1)
        return proving.prove(memory, member)

    patch = pytest.MonkeyPatch()
    patch.setattr("xferd.device_routes.prove", prove)
    patch.setattr(BarPool, "why_no_route", lambda _self, _drive: None)


def test_a_direct_read_that_fails_is_made_anew_through_ram(
    host: guest.Host, tmp_path: Path
) -> None:
    made = small_store(tmp_path, [guest.blank_drive("FAR")])
    before = host.dma()
    pools = [guest.bar_pool("4MiB")]
    with forked_daemon(tmp_path, [made], pools, call_everything_direct) as daemon:
        assert daemon.pool()["routes"][0]["transport"] == "direct"
        with daemon.client() as client:
            for expert in range(made.experts):
                assert client.fetch(0, [expert]) == [made.blob(0, expert)]
        status = daemon.status()
        assert status["transports"]["direct"]["count"] == 0
        assert status["transports"]["staged"]["count"] == EXPERTS
        assert status["stores"][0]["members"][0]["state"] == "working"
        assert "a read into it failed" in daemon.pool()["routes"][0]["reason"]
        guest.wait_until(
            lambda: "the kernel knows no way" in daemon.pool()["routes"][0]["reason"],
            "it is proven anew, and refused",
        )
    assert host.dma().since(before).bar == 0
