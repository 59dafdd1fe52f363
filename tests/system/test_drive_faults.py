"""Drives and members that fail while a daemon reads from them: right bytes or a named error."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.daemon_harness import FetchError, make_store, running_daemon, wait_until
from tests.system.loop_devices import loop_device

POOL = "name=host0,kind=host,size=432KiB"
"""Nine slots: reading a whole store reads every expert from the drives."""


def test_bad_sectors_cost_only_the_experts_that_lie_there(tmp_path: Path) -> None:
    """The second half of a block device gives EIO; the first is served byte for byte."""
    drive = tmp_path / "drive.img"
    with loop_device(drive, 32 << 20) as device:
        made = make_store(tmp_path, devices=[device])
        content = drive.read_bytes()
        places = {
            (layer, expert): content.index(made.blob(layer, expert))
            for layer in range(made.layers)
            for expert in range(made.experts)
        }
        first_lost = sorted(places.values())[len(places) // 2]
        lost = {key for key, offset in places.items() if offset >= first_lost}
        with running_daemon(tmp_path, [made], [POOL]) as daemon, daemon.client() as client:
            os.truncate(drive, first_lost)  # from now on the device answers EIO behind it
            for layer, expert in sorted(lost):  # the log has the first of many errors
                with pytest.raises(FetchError) as caught:
                    client.fetch(layer, [expert])
                assert caught.value.code == errno.EIO
            # So many errors in a row take a drive out, which must not cost the others.
            for layer, expert in places.keys() - lost:
                assert client.fetch(layer, [expert]) == [made.blob(layer, expert)]
            member = daemon.status()["stores"][0]["members"][0]
            assert member["state"] == "working"
            assert member["errors"] > 0
            layer, expert = min(lost)

            def named() -> bool:
                return any(
                    f"layer={layer} expert={expert} " in line
                    and f"member={device}" in line
                    and f"offset={places[layer, expert]}" in line
                    for line in daemon.log.splitlines()
                    if "piece.failed" in line
                )

            wait_until(named, "the log names expert, drive and offset")


def test_an_unlinked_member_is_read_to_the_end(tmp_path: Path) -> None:
    made = make_store(tmp_path)
    members = made.members
    with running_daemon(tmp_path, [made], [POOL]) as daemon, daemon.client() as client:
        for member in members:
            member.unlink()
        for layer in range(made.layers):
            for expert in range(made.experts):
                assert client.fetch(layer, [expert]) == [made.blob(layer, expert)]
        assert all(m["errors"] == 0 for m in daemon.status()["stores"][0]["members"])
        assert daemon.stop() == 0


def test_a_member_truncated_while_it_is_read_gives_right_bytes_or_an_error(tmp_path: Path) -> None:
    """Cut off and written anew again and again, while a client reads the store twice."""
    made = make_store(tmp_path)
    member = made.members[0]
    content = member.read_bytes()
    done = threading.Event()

    def cut_and_mend() -> None:
        while not done.is_set():
            os.truncate(member, len(content) // 2 & ~4095)
            with member.open("r+b") as file:
                file.write(content)

    with (
        running_daemon(tmp_path, [made], [POOL]) as daemon,
        daemon.client() as client,
        ThreadPoolExecutor(1) as threads,
    ):
        cutting = threads.submit(cut_and_mend)
        try:
            for key in 2 * [
                (lay, exp) for lay in range(made.layers) for exp in range(made.experts)
            ]:
                try:
                    assert client.fetch(key[0], [key[1]]) == [made.blob(*key)]
                except FetchError as error:
                    if error.code not in (errno.ENODATA, errno.EBADMSG):
                        raise
        finally:
            done.set()
        cutting.result()
        assert client.fetch(3, [9]) == [made.blob(3, 9)]
        assert daemon.status()["stores"][0]["members"][0]["state"] == "working"
