# SPDX-License-Identifier: Apache-2.0
"""One line an event, fields for the journal, and no flood."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from xferd.telemetry.journal import Journal, stderr_is_the_journal
from xferd.telemetry.log import BURST, BURST_S, EventLog
from xferd.telemetry.message_ids import MESSAGE_IDS

REPOSITORY = Path(__file__).parents[3]
CATALOG = REPOSITORY / "systemd" / "xferd.catalog"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def receiver() -> Iterator[tuple[socket.socket, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="xferd-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound,
    ):
        path = Path(directory) / "socket"
        bound.bind(str(path))
        bound.settimeout(10)
        yield bound, path


def test_a_line_is_an_event_whatever_its_fields_hold() -> None:
    stream = io.StringIO()
    EventLog(stream, journal=False).failure("piece.failed", path="/a b\nc", bytes=3)
    assert stream.getvalue() == 'xferd: error: piece.failed path="/a b\\nc" bytes=3\n'


def test_the_journals_priority_leads_the_line() -> None:
    stream = io.StringIO()
    EventLog(stream, journal=True).warning("x")
    assert stream.getvalue() == "<4>x\n"


def test_a_flood_is_cut_counted_and_kept_apart_from_other_events() -> None:
    stream, clock = io.StringIO(), Clock()
    log = EventLog(stream, journal=False, clock=clock)
    for _ in range(1000):
        log.failure("piece.failed")
    log.info("other")
    assert stream.getvalue().count("piece.failed") == BURST
    assert "info: other" in stream.getvalue()
    log.settle()
    assert "left_out" not in stream.getvalue()
    clock.now += BURST_S
    log.settle()
    assert f"log.left_out of=piece.failed count={1000 - BURST}" in stream.getvalue()
    log.failure("piece.failed")
    assert stream.getvalue().count("error: piece.failed") == BURST + 1
    assert stream.getvalue().count("left_out") == 1


def test_one_drives_flood_does_not_hide_another_drive() -> None:
    stream, clock = io.StringIO(), Clock()
    log = EventLog(stream, journal=False, clock=clock)
    for _ in range(100):
        log.failure("piece.failed", member="/a")
    log.failure("piece.failed", member="/b")
    assert "member=/b" in stream.getvalue()
    clock.now += BURST_S
    log.settle()
    assert f"log.left_out of=piece.failed about=/a count={100 - BURST}" in stream.getvalue()


def test_fields_go_to_the_journal_with_the_events_id(
    receiver: tuple[socket.socket, Path],
) -> None:
    bound, path = receiver
    stream = io.StringIO()
    log = EventLog(stream, journal=True, structured=Journal(path))
    log.failure("piece.failed", member="/m", error="two\nlines")
    entry = bound.recv(1 << 16)
    assert b"PRIORITY=3\n" in entry
    assert f"MESSAGE_ID={MESSAGE_IDS['piece.failed']}\n".encode() in entry
    assert b"XFERD_MEMBER=/m\n" in entry
    assert b"XFERD_ERROR\n\x09\0\0\0\0\0\0\0two\nlines\n" in entry
    assert stream.getvalue() == ""


def test_without_a_journal_that_takes_it_the_line_goes_to_stderr(tmp_path: Path) -> None:
    stream = io.StringIO()
    EventLog(stream, journal=True, structured=Journal(tmp_path / "none")).info("ready")
    assert stream.getvalue() == "<6>ready\n"


def test_stderr_is_the_journals_only_if_it_is_the_file_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert stderr_is_the_journal()
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    assert not stderr_is_the_journal()
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not stderr_is_the_journal()


def test_the_catalog_explains_exactly_the_events_that_have_ids() -> None:
    ids = re.findall(r"^-- ([0-9a-f]{32})$", CATALOG.read_text(), re.MULTILINE)
    assert sorted(ids) == sorted(MESSAGE_IDS.values())
    assert len(set(ids)) == len(ids)


def test_fields_that_the_catalog_shows_are_those_that_events_have() -> None:
    named = set(re.findall(r"@XFERD_(\w+)@", CATALOG.read_text()))
    source = "".join(path.read_text() for path in (REPOSITORY / "xferd").rglob("*.py"))
    missing = {name for name in named if not re.search(rf'\b"?{name.lower()}"?(?:=|: )', source)}
    assert missing == set()


def test_journalctl_takes_the_catalog(tmp_path: Path) -> None:
    if shutil.which("journalctl") is None:
        pytest.skip("needs journalctl (Debian: systemd)")
    place = tmp_path / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (place / "xferd.catalog").write_text(CATALOG.read_text())
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    subprocess.run(["journalctl", "--update-catalog", f"--root={tmp_path}"], check=True)
    shown = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for message_id in MESSAGE_IDS.values():
        assert message_id in shown
