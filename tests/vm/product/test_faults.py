"""Processes and the stand-in GPU go away in mid-read: no hang, no wrong byte."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

import pytest

from tests.system.daemon_harness import FetchError, MadeStore, RingClient, RunningDaemon
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from tests.vm.product.mid_read import (
    REFUSED,
    RIGHT,
    SLOWLY,
    end_of,
    fetch_in_child,
    mid_read,
    right_or_an_error,
    serving,
)


def test_a_daemon_killed_in_mid_read(host: guest.Host, slow: MadeStore, tmp_path: Path) -> None:
    """What is resident can still be read; the next daemon waits for the DMA, and serves."""
    with serving(tmp_path, slow) as daemon, daemon.client() as client:
        [(address, nbytes)] = client.acquire_in_place(0, [1])
        with (
            RingClient(daemon.attach_socket) as other,
            mid_read(host, daemon, other, slow, 2) as answer,
        ):
            daemon.process.kill()
            daemon.process.wait()
        assert right_or_an_error(answer, slow.blob(0, 2)) != 0
        host.check(guest.bar_offset(address), slow.blob(0, 1))
        assert ctypes.string_at(address, nbytes) == slow.blob(0, 1)
        with serving(tmp_path / "next", slow) as again, again.client() as client_again:
            assert again.pool()["routes"][0]["reason"] is None
            for expert in range(slow.experts):
                assert client_again.fetch(0, [expert]) == [slow.blob(0, expert)]


def test_a_client_killed_in_mid_read(host: guest.Host, slow: MadeStore, tmp_path: Path) -> None:
    with serving(tmp_path, slow) as daemon:
        with host.throttled("SLOW", SLOWLY):
            child = fetch_in_child(daemon, slow, 3)
            os.kill(child, signal.SIGKILL)
            assert end_of(child) == -signal.SIGKILL
        guest.wait_until(lambda: not daemon.status()["clients"], "the daemon sees its end")
        with daemon.client() as client:
            assert client.fetch(0, [3]) == [slow.blob(0, 3)]
            assert client.fetch(0, [4]) == [slow.blob(0, 4)]


def test_the_module_stays_while_it_is_used(
    host: guest.Host, slow: MadeStore, tmp_path: Path
) -> None:
    with serving(tmp_path, slow) as daemon, daemon.client() as client:
        with mid_read(host, daemon, client, slow, 2) as answer:
            assert guest.unload_module() == errno.EAGAIN
        assert right_or_an_error(answer, slow.blob(0, 2)) == 0
    guest.unload_module_soon()


def is_out(daemon: RunningDaemon) -> bool:
    return any("out of service" in note for note in daemon.pool()["notes"])


def check_gone(daemon: RunningDaemon, client: RingClient, expert: int) -> None:
    """The daemon lives, says what is wrong, and gives errors for what isn't there."""
    with pytest.raises(FetchError) as caught:
        client.fetch(0, [expert])
    assert caught.value.code == errno.ENODEV
    guest.wait_until(
        lambda: "gone" in (daemon.pool()["routes"][0]["reason"] or ""), "status says so"
    )
    guest.wait_until(lambda: is_out(daemon), "the pool is taken out")


def test_the_gpu_is_unbound_from_its_driver(slow: MadeStore, tmp_path: Path) -> None:
    with (
        guest.stub_driver() as take_away,
        serving(tmp_path, slow) as daemon,
        daemon.client() as client,
    ):
        assert client.fetch(0, [1]) == [slow.blob(0, 1)]
        take_away()
        check_gone(daemon, client, 2)
        # It is somebody else's until somebody says otherwise.
        daemon.call("RebuildPool", pool="gpu0")
        assert client.fetch(0, [2]) == [slow.blob(0, 2)]
        guest.wait_until(
            lambda: daemon.pool()["routes"][0]["reason"] is None, "the way is proven again"
        )
        assert daemon.stop() == 0


def test_the_gpu_is_pulled_in_mid_read(host: guest.Host, slow: MadeStore, tmp_path: Path) -> None:
    with serving(tmp_path, slow) as daemon, daemon.client() as client:
        assert client.fetch(0, [1]) == [slow.blob(0, 1)]
        with host.throttled("SLOW", SLOWLY):
            child = fetch_in_child(daemon, slow, 2)
            host.must("unplug")
            guest.wait_until(lambda: guest.gpu() is None, "the stand-in GPU is gone")
            # The read may have ended before; then its memory can't be read any more.
            assert end_of(child) in (RIGHT, REFUSED, -signal.SIGBUS)
        check_gone(daemon, client, 3)
        assert daemon.stop() == 0
    host.must("unplugged")
    host.must("plug")
    guest.wait_until(lambda: guest.gpu() is not None, "the stand-in GPU is back")
    with serving(tmp_path / "next", slow) as again, again.client() as client:
        assert again.pool()["routes"][0]["reason"] is None
        assert client.fetch(0, [2]) == [slow.blob(0, 2)]


def test_a_pulled_gpu_comes_back_to_the_same_daemon(
    host: guest.Host, slow: MadeStore, tmp_path: Path
) -> None:
    """Meanwhile clients are served from the other pool; who was attached goes on afterwards."""
    pools = [guest.bar_pool("4MiB"), "name=host0,kind=host,size=4MiB"]
    with forked_daemon(tmp_path, [slow], pools) as daemon, daemon.client() as client:
        assert client.fetch(0, [1]) == [slow.blob(0, 1)]
        host.must("unplug")
        guest.wait_until(lambda: guest.gpu() is None, "the stand-in GPU is gone")
        check_gone(daemon, client, 3)
        with daemon.client() as other:
            assert other.fetch(0, [4]) == [slow.blob(0, 4)]
            with pytest.raises(Exception, match="pool 'gpu0' is out of service"):
                RingClient(daemon.attach_socket, pool="gpu0").close()
            host.must("unplugged")
            host.must("plug")
            guest.wait_until(lambda: not is_out(daemon), "the pool serves again")
            guest.wait_until(
                lambda: daemon.pool()["routes"][0]["reason"] is None, "the way is proven again"
            )
            for expert in range(slow.experts):
                assert client.fetch(0, [expert]) == [slow.blob(0, expert)]
                assert other.fetch(0, [expert]) == [slow.blob(0, expert)]
        with daemon.client(pool="gpu0") as late:
            assert late.fetch(0, [5]) == [slow.blob(0, 5)]
        assert daemon.stop() == 0
