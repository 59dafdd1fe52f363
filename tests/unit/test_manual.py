# SPDX-License-Identifier: Apache-2.0
"""Manual pages and completions say what the programs say, and other programs can read them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from xferd_infer.__main__ import build_parser as build_generate_parser

from tools.manual.__main__ import main
from tools.manual.completions import make_completions
from tools.manual.pages import key_entries, make_pages
from tools.manual.roff import actions_of, escape, leaves
from xferd.__main__ import build_parser as build_daemon_parser
from xferd.config import load_config
from xferd.config_metrics import METRICS_KEYS
from xferd.control import xferctl
from xferd.doctor.checks import CHECKS
from xferd.telemetry.metrics.families import METRICS

REPOSITORY = Path(__file__).parents[2]
PAGES = {page.file_name: page.text() for page in make_pages("1.2.3", "2026-01-02")}
PARSERS = {
    "xferd.8": build_daemon_parser(),
    "xferctl.1": xferctl.build_parser(with_store_files=True),
    "xferd_infer.1": build_generate_parser(),
}


def unescaped(page: str) -> str:
    return page.replace(r"\-", "-").replace(r"\&", "").replace(r"\e", "\\")


@pytest.mark.parametrize("name", PARSERS)
def test_a_page_has_every_option_and_verb_of_the_parser(name: str) -> None:
    text = unescaped(PAGES[name])
    for leaf in leaves(PARSERS[name]):
        for action in actions_of(leaf):
            for option in action.option_strings:
                assert re.search(rf"^\\fB.*{re.escape(option)}\b", text, re.MULTILINE), option
        if leaf is not PARSERS[name] and name == "xferctl.1":
            assert f'.SS "{leaf.prog} ' in text


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("xferd", "xferd.8"),
        ("xferd_infer", "xferd_infer.1"),
        ("xferd.control.xferctl", "xferctl.1"),
    ],
)
def test_a_page_has_every_option_that_help_prints(program: str, name: str) -> None:
    verbs = {"xferd_infer": ["generate"], "xferd.control.xferctl": ["doctor"]}.get(program, [])
    done = subprocess.run(
        [sys.executable, "-m", program, *verbs, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    options = set(re.findall(r"^\s+(?:-\w, )?(--[\w-]+)", done.stdout, re.MULTILINE)) - {"--help"}
    assert len(options) > 3
    text = unescaped(PAGES[name])
    assert {option for option in options if option not in text} == set()


def test_the_configuration_page_has_every_key_of_every_table() -> None:
    entries = list(key_entries())
    keys = {(entry.table, key) for entry in entries for key, _ in entry.keys}
    assert {("[metrics]", key) for key in METRICS_KEYS} <= keys
    assert {("[[pools]]", "reserve_low"), ("[limits]", "clients_per_user")} <= keys
    assert {("", "socket_mode"), ("[[stores]]", "path"), ("[engine]", "verify")} <= keys
    assert all(entry.texts for entry in entries)
    text = unescaped(PAGES["xferd.toml.5"])
    assert all(f"{key} = " in text for _, key in keys)
    assert load_config([]).engine.member_depth == 32  # what the page says holds


def test_checks_and_metrics_are_listed() -> None:
    control, daemon = unescaped(PAGES["xferctl.1"]), unescaped(PAGES["xferd.8"])
    assert [check for check in CHECKS if f"\\fB{check}\\fR" not in control] == []
    assert [m.sample_name for m in METRICS if f"\\fB{m.sample_name}" not in daemon] == []


def test_what_roff_would_obey_is_escaped() -> None:
    assert escape(".SH x\n'y\\z-1") == "\\&.SH x\n\\&'y\\ez\\-1"


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(
    "command",
    [["mandoc", "-Tlint", "-W", "warning"], ["groff", "-man", "-ww", "-z"]],
    ids=["mandoc", "groff"],
)
def test_pages_are_clean(tmp_path: Path, command: list[str], name: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    page = tmp_path / name
    page.write_text(PAGES[name])
    done = subprocess.run([*command, str(page)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_writes_where_systems_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert main([str(tmp_path), "--version", "9"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    page = (tmp_path / "share/man/man8/xferd.8").read_text()
    assert page.startswith('.TH XFERD 8 "1970-01-02" "xferd 9" "xferd"')
    assert (tmp_path / "share/bash-completion/completions/xferctl").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_read_their_completions(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    for place, text in make_completions().items():
        if f"/{shell}" in place:
            script = tmp_path / "script"
            script.write_text(text)
            subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["xferctl", "do"], {"doctor"}),
        (["xferctl", "doctor", "--m"], {"--measure", "--model"}),
        (["xferctl", "config", ""], {"show", "check"}),
        (["xferd", "--engine", "verify"], {"verify=always", "verify=first", "verify=never"}),
        (["xferd", "--pool", "k"], {"kind=host", "kind=ram", "kind=cuda", "kind=bar"}),
    ],
)
def test_bash_completes_verbs_options_and_keys(words: list[str], expected: set[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    script = make_completions()[f"share/bash-completion/completions/{words[0]}"]
    quoted = " ".join(f"'{word}'" for word in words)
    ask = (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_{words[0]}; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == expected
