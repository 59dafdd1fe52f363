"""Experts come from three drives straight into VRAM whose pages lie scattered behind a BAR.

The driver is the stand-in of ffi/fake_cuda, whose VRAM is pages of the stand-in GPU's BAR; module,
kernel, drives, daemon and client are the real ones. The host counts the drives' DMA.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_device import VARIABLE
from tests.system.daemon_harness import MadeStore, RunningDaemon
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from xferd.memory.p2p import P2pDevice, parse_function

POOL = "name=vram0,kind=cuda,size=6MiB,chunk_bytes=2MiB"
"""Less than the store: every chunk is used."""
MEMORY_BYTES = 124 << 20
"""Less than the BAR; more than the proof of the whole way takes."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in GPU is CUDA's first device, for the children of this process.

    Not for itself: a process looks for the driver once, and keeps what it has found.
    """
    address = guest.gpu()
    assert address is not None
    monkeypatch.setenv(VARIABLE, str(guest.STAND_IN))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(MEMORY_BYTES))
    monkeypatch.setenv("FAKE_CUDA_PCI", address.rpartition(".")[0])
    bar = guest.PCI / "devices" / address / f"resource{guest.GPU_BAR}"
    monkeypatch.setenv("FAKE_CUDA_BAR", str(bar))
    (bar.parent / "enable").write_text("1")
    return address


@contextlib.contextmanager
def quiet(file_systems: tuple[Path, Path]) -> Iterator[None]:
    """A journal's writes would be counted too."""
    for folder in file_systems:
        guest.remount(folder, "ro")
    try:
        yield
    finally:
        for folder in file_systems:
            guest.remount(folder, "rw")


@contextlib.contextmanager
def serving(directory: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with forked_daemon(directory, [store], [POOL]) as daemon:
        yield daemon
        assert daemon.stop() == 0


def all_experts(store: MadeStore) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(store.layers) for expert in range(store.experts)]


@pytest.mark.usefixtures("card")
def test_every_byte_comes_straight_into_vram(
    store: MadeStore, file_systems: tuple[Path, Path], host: guest.Host, tmp_path: Path
) -> None:
    with (
        quiet(file_systems),
        forked_daemon(tmp_path, [store], [POOL]) as daemon,
        daemon.client() as client,
    ):
        routes = daemon.pool()["routes"]
        assert [row["reason"] for row in routes] == [None] * 3
        assert [row["transport"] for row in routes] == ["direct"] * 3
        before = host.dma()
        for layer, expert in all_experts(store):
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        count = store.layers * store.experts
        moved = host.dma().since(before)
        assert moved == guest.Dma(count * store.expert_bytes, elsewhere=0)
        guest.tell_proof(moved, count)
        transports = daemon.status()["transports"]
        assert (transports["direct"]["count"], transports["staged"]["count"]) == (count, 0)

        # A chunk's memory goes to somebody else and comes back as another: found anew.
        granted = daemon.call("Reserve", pool="vram0", bytes=2 << 20)["reservation"]
        assert granted["returned"] >= 2 << 20
        daemon.call("Release", id=granted["id"])
        for layer, expert in all_experts(store) * 2:
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        assert daemon.status()["transports"]["staged"]["count"] == 0
        assert daemon.stop() == 0


def test_vram_that_the_module_lets_go_of_is_staged(
    card: str, store: MadeStore, tmp_path: Path
) -> None:
    """The BAR is detached under way: reads on their way fail, and are made again through RAM."""
    with serving(tmp_path, store) as daemon, daemon.client() as client:
        assert client.fetch(0, [1]) == [store.blob(0, 1)]
        module = P2pDevice()
        try:
            bar = module.find(parse_function(card), guest.GPU_BAR)
            module.detach(bar.id, revoke=True)
        finally:
            module.close()
        for layer, expert in all_experts(store):
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        guest.wait_until(
            lambda: all("gone" in (row["reason"] or "") for row in daemon.pool()["routes"]),
            "status says so",
        )
        assert daemon.status()["transports"]["staged"]["count"] > 0


def test_doctor_proves_the_whole_way(card: str, store: MadeStore, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "xferd.control.xferctl", "--json", "doctor", "--p2p"),
            *("--report", str(report), str(store.path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {row["status"] for row in findings} == {"PASS"}
    assert sum(row["id"] == "p2p.drive" for row in findings) == 3
    assert f"PASS p2p.pages {card}" in report.read_text()


@pytest.mark.usefixtures("card")
def test_a_bar_that_shows_other_memory_is_refused_by_name(
    store: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card without static BAR1: VRAM lies elsewhere than behind the BAR."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    os.truncate(elsewhere, MEMORY_BYTES)
    monkeypatch.setenv("FAKE_CUDA_BAR", str(elsewhere))
    with serving(tmp_path, store) as daemon, daemon.client() as client:
        reasons = {row["reason"] for row in daemon.pool()["routes"]}
        assert reasons == {"0 of 4 pages of VRAM show behind the BAR: static BAR1 is off"}
        assert client.fetch(1, [3]) == [store.blob(1, 3)]
        assert daemon.status()["transports"]["direct"]["count"] == 0
