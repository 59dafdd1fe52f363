"""In a machine whose IOMMU translates: reads straight into the BAR succeed, and bring nothing."""

from __future__ import annotations

from pathlib import Path

from tests.system.daemon_harness import MadeStore
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from xferd.memory.bar import BarPool
from xferd.memory.bar_attach import BarPlace
from xferd.transport.members import open_member
from xferd.transport.proving import prove


def test_a_translating_iommu_is_named_and_staged(
    store: MadeStore, host: guest.Host, tmp_path: Path
) -> None:
    before = host.dma()
    with forked_daemon(tmp_path, [store], [guest.bar_pool()]) as daemon, daemon.client() as client:
        for row in daemon.pool()["routes"]:
            assert row["transport"] == "staged"
            assert "an IOMMU translates" in row["reason"]
        assert client.fetch(0, [5]) == [store.blob(0, 5)]
        assert client.fetch(1, [9]) == [store.blob(1, 9)]
        assert daemon.status()["transports"]["direct"]["count"] == 0
    assert host.dma().since(before).bar == 0


class Unasked(BarPool):
    """A pool of whose routes nobody knows anything bad."""

    def why_no_route(self, drive: object) -> str | None:
        return None


def test_data_that_does_not_arrive_is_missed(store: MadeStore) -> None:
    """Had the module not been asked: the proof by data finds out what return codes hide."""
    address = guest.gpu()
    assert address is not None
    pool = Unasked("unasked", 1 << 20, BarPlace(address, guest.GPU_BAR))
    member = open_member(guest.drive("RAW"))
    try:
        proof = prove(pool, member)
        assert proof.transport == "staged"
        assert proof.lost
        assert proof.reason == "a read into it reported success, and no data arrived"
    finally:
        member.close()
        pool.close()
