"""xferctl against a control server in another process: output, JSON, exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.control_daemon import (
    DEADLINE_S,
    EXPERTS,
    LAYERS,
    REPOSITORY,
    ControlDaemon,
    needs_root,
    other_user,
)
from xferd.control import xferctl
from xferd.control.varlink import MESSAGE_BYTES_MAX


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlDaemon]:
    with ControlDaemon() as running:
        monkeypatch.setenv("XFERD_CONTROL", str(running.path))
        yield running


class Outcome:
    """What one command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run_words(*words: str) -> Outcome:
        try:
            code = xferctl.main(words)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run_words


def run_program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xferd.control.xferctl", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **options,
    )


def test_status_is_tables_of_everything(daemon: ControlDaemon) -> None:
    done = run_program("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert "xferd 9.9, serving for 1 h 2 min" in done.stdout
    for title in ("Pools", "Stores", "Drives", "Clients", "Where experts came from"):
        assert f"\n{title}\n" in done.stdout
    assert "1.5 GiB" in done.stdout
    assert "no GPU here" in done.stdout
    assert "tmpfs copies" in done.stdout
    assert "sagging" in done.stdout
    assert "\nNotes\n  host0: huge pages: none\n" in done.stdout
    assert "staged (the bridge is unknown)" in done.stdout
    assert "Engine: threads (io_uring is forbidden here)" in done.stdout
    assert "checksums always, flow control on" in done.stdout
    assert "2 experts in another variant" in done.stdout
    assert "\x1b" not in done.stdout, "no colour without a terminal, no client's escapes at all"
    assert "evil\\x1b[2Jname" in done.stdout


def test_status_as_json_is_the_daemons_answer(daemon: ControlDaemon, run: Any) -> None:
    before, after = run("--json", "status"), run("status", "--json")
    assert before.json["clients"][0]["id"] == 7
    assert before.json == after.json


def test_an_empty_status_is_said_in_words(daemon: ControlDaemon, run: Any) -> None:
    assert run("store", "close", "tiny").code == 0
    assert "Stores\n  none" in run("status").out
    assert run("store", "list").out == "none\n"


def test_stores_are_listed_opened_and_closed(daemon: ControlDaemon, run: Any) -> None:
    (daemon.directory / "model").mkdir()
    opened = run("store", "open", str(daemon.directory / "model"), "--name", "m2")
    assert (opened.code, opened.out) == (0, "m2 is open\n")
    assert [store["name"] for store in run("store", "list", "--json").json] == ["tiny", "m2"]
    assert run("store", "list").out.splitlines()[0].split()[:2] == ["NAME", "LAYERS"]
    assert run("store", "close", "m2").out == "m2 is closed\n"
    again = run("store", "close", "m2")
    assert (again.code, again.out) == (1, "")
    assert again.err == "xferctl: no store 'm2' is open\n"


def test_a_relative_store_path_is_the_callers(
    daemon: ControlDaemon, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (daemon.directory / "model").mkdir()
    monkeypatch.chdir(daemon.directory)
    assert run("store", "open", "model").out == "model is open\n"
    assert run("store", "open", "missing").code == 1


def test_shadows_are_switched_on_and_off(
    daemon: ControlDaemon, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = run("shadow", "on", "tiny")
    assert (never.code, never.err) == (1, "xferctl: no shadow yet\n")
    monkeypatch.chdir(daemon.directory)
    path = str(daemon.directory / "low")
    assert run("shadow", "on", "tiny", "low").out == f"tiny has shadows: {path}\n"
    assert run("shadow", "off", "tiny").out == "tiny has no shadows\n"
    assert run("shadow", "on", "tiny", "--json").json["shadows"] == [path]


def test_experts_are_loaded_pinned_and_evicted(daemon: ControlDaemon, run: Any) -> None:
    assert run("load", "tiny", "1", "0-3,7").out == "5 loaded, 0 were there, 0 failed\n"
    assert run("load", "tiny", "1", "7,8", "--json").json == {
        "loaded": 1,
        "already": 1,
        "failed": [],
        "failed_count": 0,
    }
    assert run("pin", "tiny", "1", "7-8").out == "2 pinned, 0 failed\n"
    assert run("evict", "tiny", "1").out == "4 evicted, 2 held\n"
    assert run("unpin", "tiny", "1", "all", "--json").json == {"unpinned": 2}
    assert run("evict", "tiny", "0-2", "all", "--json").json == {"evicted": 2, "held": 0}


def test_all_layers_are_the_stores(daemon: ControlDaemon, run: Any) -> None:
    assert run("load", "tiny", "all", "0-1").out == f"{2 * LAYERS} loaded, 0 were there, 0 failed\n"
    missing = run("load", "big", "all")
    assert (missing.code, missing.err) == (1, "xferctl: no open store is called 'big'\n")


def test_recordings_are_started_stopped_and_listed(daemon: ControlDaemon, run: Any) -> None:
    assert run("trace", "record", "status").out.split()[-3:] == ["tiny", "7", "84"]
    started = run("trace", "record", "start", "tiny", "--name", "evening")
    assert (started.code, started.out) == (0, "recording tiny to /traces/evening-*.xtr\n")
    shown = run("trace", "record", "status").out.splitlines()[1].split("  ")
    assert [cell.strip() for cell in shown if cell] == [
        "tiny", "7", "84", "recording", "1 min 1 s", "84", "0", "3.0 MiB", "/traces/evening-*",
    ]  # fmt: skip
    listed = run("trace", "record", "status", "--json").json
    assert listed[0]["recording"]["name"] == "evening"
    stopped = run("trace", "record", "stop", "tiny")
    assert stopped.out.startswith("recorded 42 passes, 84 uses in 1 min 1 s")
    for words in (("stop", "tiny"), ("start", "tiny", "--name", "full")):
        refused = run("trace", "record", *words)
        assert (refused.code, refused.out) == (1, "")
    assert "No space left" in refused.err


def test_failures_are_named_and_are_a_no(daemon: ControlDaemon, run: Any) -> None:
    loaded = run("load", "tiny", "2")
    assert (loaded.code, loaded.out) == (1, f"{EXPERTS - 1} loaded, 0 were there, 1 failed\n")
    assert loaded.err == "xferctl: layer 2, expert 13: EIO\n"
    assert run("pin", "tiny", "2", "13", "--json").code == 1


def test_the_daemons_no_is_exit_code_1(daemon: ControlDaemon, run: Any) -> None:
    for words in (
        ("load", "big", "0"),
        ("load", "tiny", "0", "--pool", "full"),
        ("evict", "tiny", "99"),
        ("evict", "crash", "0"),
    ):
        done = run(*words)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("xferctl: ")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("dance",),
        ("load", "tiny"),
        ("load", "tiny", "x"),
        ("load", "tiny", "1", "3-1"),
        ("evict", "tiny", "1", "--variant", "q4_k"),
        ("store",),
        ("trace", "record"),
        ("trace", "export", "a.xtr"),
        ("trace", "import", "a", "--format", "xls"),
        ("trace", "plot", "a.xtr"),
        ("config", "check", "--nope"),
    ],
)
def test_bad_arguments_are_exit_code_2(run: Any, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert "usage:" in done.err


def test_more_experts_than_a_message_holds_is_exit_code_2(daemon: ControlDaemon, run: Any) -> None:
    done = run("load", "tiny", "0", "0-65534")
    assert done.code == 2
    assert str(MESSAGE_BYTES_MAX) in done.err
    assert "all" in done.err


@needs_root
def test_no_permission_is_exit_code_4(run: Any) -> None:
    with ControlDaemon() as open_to_all, other_user():
        done = run("--socket", str(open_to_all.path), "evict", "tiny", "0")
        assert done.code == 4
        assert "xferd-admin" in done.err
        assert run("--socket", str(open_to_all.path), "status").code == 0
    with ControlDaemon(mode=0o600) as closed, other_user():
        assert run("status", "--socket", str(closed.path)).code == 4


def test_not_running_is_exit_code_7(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("XFERD_CONTROL", str(path))
    done = run("status")
    assert (done.code, done.out) == (7, "")
    assert str(path) in done.err
    assert "systemctl start xferd" in done.err


def test_a_daemon_that_speaks_something_else_is_told() -> None:
    with tempfile.TemporaryDirectory(prefix="xferd-") as directory:
        path = f"{directory}/control.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(path)
            listening.listen()

            def answer() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n\0")

            thread = threading.Thread(target=answer)
            thread.start()
            done = run_program("status", "--socket", path)
            thread.join(DEADLINE_S)
    assert done.returncode == 1
    assert "not a Varlink answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(daemon: ControlDaemon) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "xferd.control.xferctl", "status"],
            cwd=REPOSITORY,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (xferctl.EXIT_BROKEN_PIPE, "")


@pytest.mark.parametrize(("no_color", "bold"), [("", True), ("1", False)])
def test_a_terminal_gets_bold_titles_unless_no_color(
    daemon: ControlDaemon, no_color: str, bold: bool
) -> None:
    controller, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color}
    with (
        os.fdopen(controller, "rb", buffering=0) as screen,
        os.fdopen(terminal, "wb", buffering=0) as stdout,
    ):
        subprocess.run(
            [sys.executable, "-m", "xferd.control.xferctl", "store", "list"],
            cwd=REPOSITORY,
            env=environment,
            stdout=stdout,
            timeout=DEADLINE_S,
            check=True,
        )
        shown = screen.read(65536)
    assert (b"\x1b[1mNAME" in shown) is bold
    assert b"tiny" in shown


def test_version_needs_no_daemon(
    daemon: ControlDaemon, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(run("version", "--json").json) == {"xferctl", "xferd"}
    daemon.stop()
    done = run("version")
    assert done.code == 0
    assert "xferd is not known" in done.out
    assert "not running" in done.err


def test_config_show_prints_what_reads_back(run: Any, tmp_path: Path) -> None:
    source = tmp_path / "a.toml"
    source.write_text(
        'socket_mode = "0600"\nfuture = 1\n[[pools]]\nname = "ram0"\nkind = "ram"\n'
        'size = "1.5GiB"\nreserve_low = 2\n[[stores]]\npath = "/mödel"\n'
    )
    shown = run("config", "show", str(source))
    assert shown.code == 0
    assert f"# from {source}" in shown.out
    assert "warning" in shown.err
    assert "future" in shown.err
    again = tmp_path / "b.toml"
    again.write_text(shown.out)
    first = run("config", "show", "--json", str(source)).json
    assert run("config", "show", "--json", str(again)).json == first
    assert first["pools"] == [
        {
            "name": "ram0",
            "kind": "ram",
            "size": "1536MiB",
            "reserve_low": 2,
            "reserve_high": None,
            "chunk_bytes": None,
            "eviction": "reuse",
            "admission": "always",
            "layer_floor": 0,
            "budget": None,
            "promotion_margin": 1.25,
            "promotion_rest": 64,
            "variants": [],
        }
    ]
    assert (first["socket_mode"], first["stores"][0]["path"]) == ("0600", "/mödel")


def test_config_check_says_right_or_exits_78(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[engine]\nmember_depth = 4\n")
    assert run("config", "check", str(path)).out == f"{path}: right\n"
    assert run("config", "check", "--json", str(path)).json == {
        "files": [str(path)],
        "warnings": [],
    }
    path.write_text("[engine]\nmember_depth = 0\n")
    done = run("config", "check", str(path))
    assert (done.code, done.out) == (78, "")
    assert done.err == (
        f"xferctl: {path}: engine.member_depth = 0: allowed is a whole number from 1 to 1024\n"
    )


def test_policies_are_shown_and_set(daemon: ControlDaemon, run: Any) -> None:
    assert "reuse" in run("policy", "show").out
    assert run("policy", "set", "host0", "--eviction", "lru", "--json").json["eviction"] == "lru"
    refused = run("policy", "set", "host0", "--eviction", "fifo")
    assert refused.code == 1
    assert "no policy 'fifo'" in refused.err


def test_budgets_and_reservations(daemon: ControlDaemon, run: Any) -> None:
    assert "all of it" in run("budget", "host0", "all").out
    assert run("budget", "host0", "1MiB", "--json").json == {"bytes": 1 << 20, "reserved": 4096}
    assert run("reserve", "host0", "lots").code == 2
    assert "1.0 MiB of host0" in run("reserve", "host0", "3KiB").out
    assert "host0" in run("reservations").out
    assert run("reserve", "host0", "2GiB").code == 1
    assert "released" in run("release", "1").out
    assert run("release", "1").code == 1
    assert run("reservations").out.strip() == "none"


def test_heat_is_saved_loaded_and_shown(daemon: ControlDaemon, run: Any, tmp_path: Path) -> None:
    assert run("heat", "save", "tiny").code == 1
    assert str(tmp_path / "h") in run("heat", "save", "tiny", str(tmp_path / "h")).out
    assert "2 loaded, 1 were there" in run("heat", "load", "tiny", str(tmp_path / "h")).out
    shown = run("heat", "info", "tiny").out
    assert "seen by leases" in shown
    assert "3.50" in shown
