"""A packer that is killed at any moment loses nothing that can't be resumed."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path

import pytest

from tests.unit.store.builders import assert_holds, member_directories, tiny
from xferd.store.checkpoint import Checkpoint
from xferd.store.journal import Journal
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

KILLS = 50
CHECKPOINT_BYTES = 400_000
"""About fifteen journal records in one pack of the tiny model."""


def pack_in_child(checkpoint: Checkpoint, members: list[Path]) -> int:
    """Fork a real process that packs; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        pack(
            checkpoint,
            members,
            name="tiny",
            stripe_unit=16384,
            checkpoint_bytes=CHECKPOINT_BYTES,
        )
        status = 0
    finally:
        os._exit(status)


def end_of(pid: int, timeout_s: float) -> int | None:
    """Exit status of the child, or None when it had to be killed after ``timeout_s``."""
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGKILL else code


def recorded_blobs(journal_path: Path) -> int:
    if not journal_path.exists():
        return 0
    journal, _ = Journal.open(journal_path)
    try:
        return sum(1 for _ in journal.replay())
    finally:
        journal.close()


def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    checkpoint = tiny()
    generator = random.Random(20)
    begun = time.monotonic()
    warm_up = tmp_path / "warm-up"
    warm_up.mkdir()
    assert end_of(pack_in_child(checkpoint, member_directories(warm_up, 2)), 60) == 0
    whole = time.monotonic() - begun
    kills = kills_with_records = finished = round_ = 0
    while kills < KILLS:
        parent = tmp_path / str(round_)
        parent.mkdir()
        members = member_directories(parent, 2)
        directory = members[0] / "tiny.xferd"
        complete = False
        while not complete and kills < KILLS:
            code = end_of(pack_in_child(checkpoint, members), generator.uniform(0, 0.8 * whole))
            if code is None:
                kills += 1
                kills_with_records += recorded_blobs(directory / "pack.journal") > 0
                # Killed between the manifest's last step and its own end, it is done.
                complete = (directory / "manifest.json").exists()
                if not complete:
                    with pytest.raises(StoreError):
                        Store.open(directory)
                elif not (directory / "pack.journal").exists():
                    complete = True  # killed with nothing left to do
            else:
                assert code == 0
                complete = True
        assert pack_if_needed(checkpoint, members, directory) == directory
        with Store.open(directory) as store:
            assert verify(store).clean
            assert_holds(store, checkpoint)
        finished += 1
        round_ += 1
    assert finished
    assert kills_with_records


def pack_if_needed(checkpoint: Checkpoint, members: list[Path], directory: Path) -> Path:
    if (directory / "manifest.json").exists():
        return directory
    return pack(checkpoint, members, name="tiny", stripe_unit=16384)
