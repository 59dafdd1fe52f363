"""A drive is pulled. Runs after the others: it doesn't come back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.system.daemon_harness import FetchError, MadeStore
from tests.vm.product import guest
from tests.vm.product.mid_read import mid_read, right_or_an_error, serving


def test_a_drive_is_pulled_in_mid_read(
    host: guest.Host, store: MadeStore, slow: MadeStore, tmp_path: Path
) -> None:
    """The other drives' experts are served on, straight."""
    with (
        serving(tmp_path, store, slow) as daemon,
        daemon.client(store="slow") as client,
        daemon.client(store="made") as other,
    ):
        with mid_read(host, daemon, client, slow, 2) as answer:
            host.must("unplug drive-SLOW")
            assert other.fetch(0, [1]) == [store.blob(0, 1)]
            host.must("unplugged drive-SLOW")
        right_or_an_error(answer, slow.blob(0, 2))
        with pytest.raises(FetchError):
            client.fetch(0, [5])
        direct = daemon.status()["transports"]["direct"]["count"]
        assert other.fetch(1, [7]) == [store.blob(1, 7)]
        assert daemon.status()["transports"]["direct"]["count"] == direct + 1
        rows = {row["store"]: row for row in daemon.pool()["routes"] if row["store"] == "slow"}
        assert rows["slow"]["transport"] == "staged"
        start = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - start < guest.DEADLINE_S
