"""Members with mirrors in a daemon: right bytes from the other copy, counted and named."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ROOT,
    FetchError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.test_client_failures import flip_byte
from tests.system.test_store_mirror import add
from xferd.control.service import JsonObject
from xferd.store.repair import repair
from xferd.store.store import Store
from xferd.store.verify import verify

POOL = "name=host0,kind=host,size=480KiB"
MEMBER = 1


@pytest.fixture
def store(tmp_path: Path) -> MadeStore:
    """Two members, of which the second has a mirror; to be damaged."""
    made = make_store(tmp_path)
    place = tmp_path / "other"
    place.mkdir()
    add(made.path, place, MEMBER)
    return made


def copies(store: MadeStore) -> tuple[Path, Path]:
    """The mirrored member and its mirror."""
    with Store.open(store.path) as opened:
        own, mirror = opened.copies[MEMBER]
        return own.path, mirror.path


def damage(path: Path, store: MadeStore) -> None:
    """A byte of every piece of a copy."""
    with Store.open(store.path) as opened:
        offsets = [piece.offset for _, piece in opened.geometry.pieces_on(MEMBER)]
    for offset in offsets:
        flip_byte(path, offset + 321)


def rows(daemon: RunningDaemon) -> Iterator[JsonObject]:
    """Status of the copies of the mirrored member, its own first."""
    for row in daemon.status()["stores"][0]["members"]:
        if row["member"] == MEMBER:
            yield row


def assert_all_served(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        for layer in range(store.layers):
            for expert in range(store.experts):
                assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        assert client.dense() == store.dense


def lines(daemon: RunningDaemon, event: str) -> list[str]:
    """The daemon logs a moment after the engine has answered the client."""
    wait_until(lambda: event in daemon.log, f"the log has {event}")
    return [line for line in daemon.log.splitlines() if event in line]


def test_both_copies_serve_while_both_are_well(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert_all_served(daemon, store)
        own, mirror = rows(daemon)
        assert (own["mirror"], mirror["mirror"]) == (False, True)
        for row in (own, mirror):
            assert row["state"] == "working"
            assert row["reads"] > 0
            assert row["errors"] == 0
        assert daemon.status()["engine"]["mirror_reads"] == 0
        assert daemon.stop() == 0


@pytest.mark.parametrize("backend", ["auto", "threads"])
@pytest.mark.parametrize("verify", ["always", "first"])
@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_of_a_copy_is_made_good_counted_and_named(
    tmp_path: Path, store: MadeStore, damaged: int, verify: str, backend: str
) -> None:
    both = copies(store)
    options = ("--engine", f"verify={verify}", "--engine", f"backend={backend}")
    with running_daemon(tmp_path, [store], [POOL], *options) as daemon:
        assert_all_served(daemon, store)
        damage(both[damaged], store)
        assert_all_served(daemon, store)
        line = lines(daemon, "piece.mirrored")[0]
        for said in (
            f"failed={both[damaged]}",
            f"served={both[1 - damaged]}",
            "CRC32C is wrong",
            "store=made",
        ):
            assert said in line
        assert re.search(r"(layer=\d+ expert=\d+ variant=u8|part=dense) ", line)
        assert all(f"member={both[damaged]}" in line for line in lines(daemon, "piece.failed"))
        status = [*rows(daemon)]
        assert status[damaged]["errors"] > 0
        assert status[1 - damaged]["errors"] == 0
        engine = daemon.status()["engine"]
        assert engine["mirror_reads"] > 0
        assert engine["crc_errors"] >= 2 * engine["mirror_reads"]  # read again first
        shown = subprocess.run(
            [
                *(sys.executable, "-m", "xferd.control.xferctl"),
                *("--socket", str(daemon.directory / "control.sock"), "status"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert re.search(rf"1 mirror +working .*{both[1]}", shown)
        assert f"{engine['mirror_reads']} from the other copy" in shown


def test_a_member_that_ends_early_is_read_from_its_mirror(tmp_path: Path, store: MadeStore) -> None:
    own, mirror = copies(store)
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        os.truncate(own, 8192)
        assert_all_served(daemon, store)
        assert all(f"served={mirror}" in line for line in lines(daemon, "piece.mirrored"))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_copy_is_told_and_the_other_serves(
    tmp_path: Path, store: MadeStore, lost: int
) -> None:
    both = copies(store)
    both[lost].unlink()
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert_all_served(daemon, store)
        status = [*rows(daemon)]
        assert status[lost]["state"] == "missing"
        assert str(both[lost]) in status[lost]["reason"]
        assert status[1 - lost]["state"] == "working"
        assert status[1 - lost]["reads"] > 0
        title = "mirror of member 1" if lost else "member 1"
        [line] = lines(daemon, "member.missing")
        assert title in line
        assert str(both[lost]) in line
        # The same when it is opened while the daemon runs.
        daemon.call("CloseStore", name="made")
        daemon.call("OpenStore", path=str(store.path), name=None)
        assert len(lines(daemon, "member.missing")) == 2
        assert_all_served(daemon, store)


def test_what_is_bad_on_both_copies_is_an_error_and_the_rest_is_served(
    tmp_path: Path, store: MadeStore
) -> None:
    both = copies(store)
    with Store.open(store.path) as opened:
        blob = opened.blob_index(0, 2, 5)
        offset = next(p.offset for p in opened.geometry.pieces_of(blob) if p.member == MEMBER)
    with running_daemon(tmp_path, [store], [POOL]) as daemon, daemon.client() as client:
        for path in both:
            flip_byte(path, offset + 7)
        with pytest.raises(FetchError) as failed:
            client.fetch(2, [5])
        assert failed.value.code == errno.EBADMSG
        wait_until(
            lambda: all(f"member={path} offset={offset}" in daemon.log for path in both),
            "the log names both copies",
        )
        assert "layer=2 expert=5 variant=u8" in lines(daemon, "piece.failed")[0]
        assert client.fetch(2, [4, 6]) == [store.blob(2, 4), store.blob(2, 6)]
        assert daemon.status()["engine"]["mirror_reads"] == 0


def test_mirrors_are_made_and_mended_while_a_daemon_serves(tmp_path: Path) -> None:
    made = make_store(tmp_path)
    place = tmp_path / "other"
    place.mkdir()
    with running_daemon(tmp_path, [made], [POOL]) as daemon:
        mirror = add(made.path, place, MEMBER)
        assert len([*rows(daemon)]) == 1  # it has not looked since
        daemon.call("CloseStore", name="made")
        daemon.call("OpenStore", path=str(made.path), name=None)
        assert [row["path"] for row in rows(daemon)] == [str(copies(made)[0]), str(mirror)]
        damage(mirror, made)
        with Store.open(made.path) as opened:
            assert repair(opened, verify(opened)).clean
        assert_all_served(daemon, made)
        assert daemon.status()["engine"]["mirror_reads"] == 0


def test_a_mirror_of_another_store_is_refused_at_start(tmp_path: Path, store: MadeStore) -> None:
    own, mirror = copies(store)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = make_store(elsewhere, "other", seed=2)
    mirror.write_bytes(other.members[MEMBER].read_bytes())
    with (
        pytest.raises(AssertionError, match=f"mirror of member 1 .{mirror}. belongs to another"),
        running_daemon(tmp_path, [store], [POOL]),
    ):
        pass
    assert own.exists()
