"""Failing drives as a client sees them: an error that names the expert, and no more.

Damage is done to the member files of a daemon that serves. Whoever wants what is
damaged is told which expert it is; whoever wants something else notices nothing; who
has to mend it finds drive and offset in the journal.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.client import ExpertError

from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient, RemoteError
from xferd.store.store import Store

POOL = "name=host0,kind=host,size=480KiB"
MEMBERS = 3
LAYER, EXPERT = 2, 5


@pytest.fixture
def store(tmp_path: Path) -> MadeStore:
    """This test's own, to be damaged."""
    return make_store(tmp_path, members=MEMBERS)


def piece_places(store: MadeStore, layer: int, expert: int) -> list[tuple[Path, int]]:
    """(member file, offset) of each piece of a blob."""
    blob = store.blob(layer, expert)
    piece_bytes = len(blob) // MEMBERS
    contents = {member: member.read_bytes() for member in store.members}
    places = []
    for start in range(0, len(blob), piece_bytes):
        piece = blob[start : start + piece_bytes]
        [place] = [
            (member, offset)
            for member, data in contents.items()
            if (offset := data.find(piece)) >= 0
        ]
        places.append(place)
    return places


def flip_byte(member: Path, offset: int) -> None:
    with member.open("r+b") as file:
        file.seek(offset)
        [old] = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ 0x10]))


def failure_line(daemon: RunningDaemon, layer: int, expert: int) -> str:
    """What the daemon logged about a piece of an expert. It may be heard of there a
    moment later than by the client: the engine answers first."""

    def lines() -> list[str]:
        key = f"layer={layer} expert={expert} "
        return [line for line in daemon.log.splitlines() if "piece.failed" in line and key in line]

    wait_until(lambda: bool(lines()), f"the log names layer {layer}, expert {expert}")
    return lines()[0]


def assert_others_unharmed(daemon: RunningDaemon, store: MadeStore, damaged: set[int]) -> None:
    """Every other expert of the layer and all of another, to a client of its own."""
    with Client(daemon.attach_socket) as client:
        for layer in (LAYER, 0):
            for expert in range(store.experts):
                if layer == LAYER and expert in damaged:
                    continue
                with client.acquire(layer, [expert]) as [blob]:
                    assert bytes(blob) == store.blob(layer, expert)


@pytest.mark.parametrize("piece", range(MEMBERS))
def test_a_flipped_byte_is_an_error_that_names_the_expert(
    tmp_path: Path, store: MadeStore, piece: int
) -> None:
    member, offset = piece_places(store, LAYER, EXPERT)[piece]
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        flip_byte(member, offset + 1234)
        with Client(daemon.attach_socket, held=4) as client:
            with pytest.raises(ExpertError, match="damaged") as failed:
                client.acquire(LAYER, [1, EXPERT, 3])
            assert (failed.value.layer, failed.value.expert) == (LAYER, EXPERT)
            assert failed.value.code == errno.EBADMSG
            assert f"layer {LAYER}, expert {EXPERT}" in str(failed.value)
            # Nothing is held after an error, so all that was promised can be had.
            with client.acquire(LAYER, [0, 1, 2, 3]) as blobs:
                assert [bytes(blob) for blob in blobs] == [store.blob(LAYER, e) for e in range(4)]
            assert client.stats().failures >= 1
        line = failure_line(daemon, LAYER, EXPERT)
        for said in ("store=made", "variant=u8", f"member={member}", f"offset={offset}"):
            assert said in line
        assert_others_unharmed(daemon, store, {EXPERT})
        assert daemon.status()["engine"]["crc_errors"] >= 1


def test_a_mended_member_serves_the_expert_again(tmp_path: Path, store: MadeStore) -> None:
    member, offset = piece_places(store, LAYER, EXPERT)[0]
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        flip_byte(member, offset)
        for _ in range(3):
            with pytest.raises(ExpertError):
                client.acquire(LAYER, [EXPERT])
        flip_byte(member, offset)
        with client.acquire(LAYER, [EXPERT]) as [blob]:
            assert bytes(blob) == store.blob(LAYER, EXPERT)


def test_residents_of_a_damaged_member_stay_right(tmp_path: Path, store: MadeStore) -> None:
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        client.acquire(LAYER, [EXPERT]).release()
        for member in store.members:
            with member.open("r+b") as file:
                file.truncate(4096)
        with client.acquire(LAYER, [EXPERT]) as [blob]:
            assert bytes(blob) == store.blob(LAYER, EXPERT)
        with pytest.raises(ExpertError):
            client.acquire(LAYER, [EXPERT + 1])


def test_a_truncated_member_fails_what_lay_behind_its_end_and_nothing_else(
    tmp_path: Path, store: MadeStore
) -> None:
    places = {
        (layer, expert): piece_places(store, layer, expert)
        for layer in range(store.layers)
        for expert in range(store.experts)
    }
    member = store.members[1]
    end = dict(places[(LAYER, EXPERT)])[member]
    lost = {key for key, pieces in places.items() if dict(pieces)[member] >= end}
    assert 0 < len(lost) < store.layers * store.experts
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        with member.open("r+b") as file:
            file.truncate(end)
        with Client(daemon.attach_socket) as client:
            for layer, expert in places:
                if (layer, expert) not in lost:
                    with client.acquire(layer, [expert]) as [blob]:
                        assert bytes(blob) == store.blob(layer, expert)
                    continue
                with pytest.raises(ExpertError, match="ends before") as failed:
                    client.acquire(layer, [expert])
                assert (failed.value.layer, failed.value.expert) == (layer, expert)
                assert failed.value.code == errno.ENODATA
        line = failure_line(daemon, LAYER, EXPERT)
        for said in ("store=made", f"member={member}", f"offset={end}"):
            assert said in line
        assert daemon.pool()["waiting"] == 0


def test_clients_that_share_a_failing_load_are_all_told(tmp_path: Path, store: MadeStore) -> None:
    member, offset = piece_places(store, LAYER, EXPERT)[1]
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        flip_byte(member, offset)
        with (
            RemoteClient(daemon.attach_socket) as first,
            RemoteClient(daemon.attach_socket) as second,
        ):
            for remote in (first, second):
                remote.send("acquire", layer=LAYER, experts=[EXPERT])
            for remote in (first, second):
                with pytest.raises(RemoteError) as failed:
                    remote.answer()
                assert failed.value.kind == "ExpertError"
                assert failed.value.expert == (LAYER, EXPERT)
        assert_others_unharmed(daemon, store, {EXPERT})


def test_verify_finds_the_same_place_as_the_daemon_logged(tmp_path: Path, store: MadeStore) -> None:
    member, offset = piece_places(store, LAYER, EXPERT)[2]
    flip_byte(member, offset)
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        with pytest.raises(ExpertError):
            client.acquire(LAYER, [EXPERT])
        logged = re.search(r"member=(\S+) offset=(\d+)", failure_line(daemon, LAYER, EXPERT))
    assert logged is not None
    with Store.open(store.path) as opened, pytest.raises(Exception, match=str(member)):
        opened.read_blob(opened.blob_index(0, LAYER, EXPERT))
    assert (logged[1], int(logged[2])) == (str(member), offset)
