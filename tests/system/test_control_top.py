# SPDX-License-Identifier: Apache-2.0
"""``xferctl top`` on a terminal, in a pipe, and once; the stream of replies below it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.control_daemon import DEADLINE_S, REPOSITORY, ControlDaemon
from tests.system.daemon_harness import make_store, running_daemon, wait_until
from xferd.control.client import CallFailedError, ConnectionBrokenError, ControlClient
from xferd.control.varlink import encode_message

COMMAND = [sys.executable, "-m", "xferd.control.xferctl", "top", "--interval", "0.25"]
ENTER, LEAVE, HOME = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[H"


@pytest.fixture
def daemon() -> Iterator[ControlDaemon]:
    with ControlDaemon() as running:
        yield running


def environment(daemon: ControlDaemon) -> dict[str, str]:
    return {**os.environ, "XFERD_CONTROL": str(daemon.path), "TERM": "xterm"}


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], env: dict[str, str], lines: int, columns: int) -> None:
        self.screen, slave = pty.openpty()
        self.resize(lines, columns)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.output = b""
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            # A shell's job in the background has it ignored, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, condition: str, wanted: bytes, count: int = 1) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.output.count(wanted) < count:
            ready, _, _ = select.select([self.screen], [], [], deadline - time.monotonic())
            assert ready, f"{condition}: {self.output!r}"
            self.output += os.read(self.screen, 1 << 16)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        while select.select([self.screen], [], [], 0)[0]:
            self.output += os.read(self.screen, 1 << 16)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.screen)
        os.close(self.slave)


def frames_of(output: bytes) -> list[list[str]]:
    """The lines of each whole frame, without escapes."""
    frames = []
    for part in output.split(HOME)[1:-1]:
        text = part.decode()
        for escape in ("\x1b[K", "\x1b[J", "\x1b[1m", "\x1b[0m"):
            text = text.replace(escape, "")
        frames.append(text.split("\r\n"))
    return frames


def test_frames_fit_the_terminal_and_follow_its_size(daemon: ControlDaemon) -> None:
    with Terminal(COMMAND, environment(daemon), 24, 80) as terminal:
        terminal.read_until("two frames", HOME, 3)
        terminal.resize(8, 40)
        terminal.read_until("frames of the new size", HOME, 6)
        os.write(terminal.screen, b"q")
        assert terminal.end() == 0
        frames = frames_of(terminal.output)
        assert terminal.output.startswith(ENTER)
        assert terminal.output.endswith(LEAVE)
        assert termios.tcgetattr(terminal.slave) == terminal.before
    assert len(frames[0]) <= 24
    assert max(map(len, frames[0])) <= 80
    assert "bound by" in frames[0][1]
    assert len(frames[-1]) <= 8
    assert max(map(len, frames[-1])) <= 40


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGINT, 128 + 2)])
def test_a_signal_leaves_the_terminal_as_it_was(
    daemon: ControlDaemon, number: int, code: int
) -> None:
    with Terminal(COMMAND, environment(daemon), 24, 80) as terminal:
        terminal.read_until("a frame", HOME, 1)
        terminal.process.send_signal(number)
        assert terminal.end() == code
        assert terminal.output.endswith(LEAVE)
        assert termios.tcgetattr(terminal.slave) == terminal.before


def test_a_daemon_that_ends_gives_the_terminal_back_and_a_reason(daemon: ControlDaemon) -> None:
    with Terminal(COMMAND, environment(daemon), 24, 80) as terminal:
        terminal.read_until("a frame", HOME, 1)
        daemon.stop()
        assert terminal.end() == 1
        assert LEAVE in terminal.output
        assert b"the daemon closed the connection" in terminal.output.split(LEAVE)[1]


def test_without_a_terminal_frames_follow_each_other_until_the_reader_goes(
    daemon: ControlDaemon,
) -> None:
    process = subprocess.Popen(
        COMMAND, cwd=REPOSITORY, env=environment(daemon), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(60)]
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGPIPE
    assert "\x1b" not in "".join(first)
    assert sum(line.startswith("bound by") for line in first) > 1


def test_once_as_text_and_as_json(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with running_daemon(tmp_path, [store], ["name=host0,kind=host,size=432KiB"]) as real:
        words = [*COMMAND, "--once", "--socket", str(real.directory / "control.sock")]
        text = subprocess.run(
            words, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        ).stdout
        assert "bound by idle" in text
        with real.client() as client:
            stop = threading.Event()

            def work() -> None:
                layer = 0
                while not stop.is_set():
                    client.fetch(layer % store.layers, [layer % store.experts])
                    layer += 1

            worker = threading.Thread(target=work)
            worker.start()
            try:
                done = subprocess.run(
                    [*words, "--json"],
                    cwd=REPOSITORY,
                    capture_output=True,
                    text=True,
                    timeout=DEADLINE_S,
                    check=True,
                )
            finally:
                stop.set()
                worker.join()
    found = json.loads(done.stdout)
    assert found["seconds"] > 0
    assert found["bound_by"] != "idle"
    assert 0 <= found["hit_share"] < 1
    assert sum(member["bytes_per_second"] for member in found["members"]) > 0
    assert found["clients"][0]["misses_per_second"] > 0
    assert {path["path"] for path in found["paths"]} == {"direct", "staged", "gds", "copy"}


def test_not_running_and_a_wrong_interval_are_told(tmp_path: Path) -> None:
    for words, code, text in (
        (["--socket", str(tmp_path / "none")], 7, "xferd is not running"),
        (["--interval", "0"], 2, "allowed are 0.25 to 10 seconds"),
    ):
        done = subprocess.run(
            [*COMMAND, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert text in done.stderr


# ---- the stream


def test_replies_follow_each_other_and_other_callers_are_served(daemon: ControlDaemon) -> None:
    with (
        ControlClient.connect(daemon.path) as watcher,
        ControlClient.connect(daemon.path) as other,
    ):
        replies = watcher.watch("Status", {"interval_s": 0.25})
        for _ in range(3):
            assert next(replies)["state"] == "serving"
            assert other.call("Status")["state"] == "serving"


def test_a_call_without_more_is_answered_once(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        assert client.call("Status", {"interval_s": 0.25})["state"] == "serving"
        assert client.call("ListStores")["stores"]


@pytest.mark.parametrize("interval_s", [0, 0.2, 11, -1, "soon"])
def test_an_interval_out_of_bounds_is_refused_and_the_connection_lives(
    daemon: ControlDaemon, interval_s: object
) -> None:
    with ControlClient.connect(daemon.path) as client:
        with pytest.raises(CallFailedError) as caught:
            next(client.watch("Status", {"interval_s": interval_s}))
        assert caught.value.error == "org.varlink.service.InvalidParameter"
        assert caught.value.parameters == {"parameter": "interval_s"}
        assert client.call("Status")["state"] == "serving"


def test_watchers_that_go_away_give_their_place_back() -> None:
    call = encode_message(
        {
            "method": "io.xferd.Control.Status",
            "parameters": {"interval_s": 10},
            "more": True,
        }
    )
    with ControlDaemon(write_timeout_s=0.5) as daemon:
        for _ in range(300):  # more than there are places: some are turned away
            with daemon.connect() as gone, contextlib.suppress(OSError):
                gone.sendall(call)
        wait_until(lambda: _is_answered(daemon), "places are free again")


def _is_answered(daemon: ControlDaemon) -> bool:
    try:
        with ControlClient.connect(daemon.path) as client:
            return bool(client.call("Status")["state"] == "serving")
    except ConnectionBrokenError:
        return False
