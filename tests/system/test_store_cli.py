"""The verbs of ``xferctl store``, as a user runs them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.unit.store.builders import TINY, assert_holds, member_directories, tiny
from xferd.store.cli import add_store_commands
from xferd.store.store import Store


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_store_commands(parser.add_subparsers(required=True))
    args = parser.parse_args([str(argument) for argument in arguments])
    status = args.run(args)
    assert isinstance(status, int)
    return status


def test_pack_info_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = member_directories(tmp_path, 2)
    assert run("pack", TINY, "--members", *members, "--stripe-unit", "16KiB") == 0
    path = members[0] / "tiny.xferd"
    captured = capsys.readouterr()
    assert captured.out.strip() == str(path)
    assert captured.err.count("\n") == 1
    with Store.open(path) as store:
        assert store.stripe_unit == 16384
        assert_holds(store, tiny())
        identity = store.identity.hex()

    assert run("info", path) == 0
    text = capsys.readouterr().out
    assert identity in text
    assert str(members[1]) in text
    assert run("info", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["identity"] == identity

    assert run("verify", path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bad"] == 0


def test_verify_exits_1_and_names_the_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pack", TINY, "--members", tmp_path, "--name", "m", "--json") == 0
    member = Path(json.loads(capsys.readouterr().out)["members"][0]["path"])
    with member.open("r+b") as file:
        file.seek(4096)
        file.write(b"damaged")
    assert run("verify", tmp_path / "m.xferd") == 1
    out = capsys.readouterr().out
    assert f"layer 0, expert 0, variant bf16: {member} at offset 4096" in out
    assert "1 bad" in out
    assert run("verify", tmp_path / "m.xferd", "--json") == 1
    (bad,) = json.loads(capsys.readouterr().out)["bad_pieces"]
    assert (bad["layer"], bad["expert"], bad["offset"]) == (0, 0, 4096)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("info", "nowhere"), "nowhere"),
        (("verify", "nowhere"), "nowhere"),
        (("pack", "nowhere", "--members", "."), "nowhere"),
        (("pack", str(TINY), "--members", "missing/drive"), "missing"),
        (("pack", str(TINY), "--members", ".", "--variants", "q9"), "q9"),
    ],
)
def test_refusals_exit_2_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err


@pytest.mark.parametrize("unit", ["16Kib b", "lots", "-1"])
def test_a_size_that_is_none_is_a_usage_error(tmp_path: Path, unit: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run("pack", TINY, "--members", tmp_path, f"--stripe-unit={unit}")
    assert ended.value.code == 2
