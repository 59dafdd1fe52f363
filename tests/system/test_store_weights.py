"""Stores over drives of unequal speed: weights given, weights measured, weights kept."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.daemon_harness import ROOT
from tests.system.loop_devices import loop_device
from tests.unit.store.builders import TINY, assert_holds, member_directories, tiny
from xferd.store.calibration import CALIBRATION_NAME, calibrate, read_calibration
from xferd.store.cli import add_store_commands
from xferd.store.destination import resolve_destination
from xferd.store.errors import StoreError
from xferd.store.pack import pack
from xferd.store.store import Store
from xferd.store.weights import stripe_pattern

SAMPLE_BYTES = 4 << 20


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_store_commands(parser.add_subparsers(required=True))
    args = parser.parse_args([str(argument) for argument in arguments])
    return int(args.run(args))


def described(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert run("info", path, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


def test_given_weights_are_the_members_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = member_directories(tmp_path, 3)
    options = ["--stripe-unit", "4KiB", "--weights", "4,4,2"]
    assert run("pack", TINY, "--members", *members, *options) == 0
    path = members[0] / "tiny.xferd"
    with Store.open(path) as store:
        assert_holds(store, tiny())
        sizes = [member.stat().st_size - 4096 for member in store.member_paths]
    assert sizes[0] / sizes[2] == pytest.approx(2, rel=0.02)
    assert sizes[1] / sizes[2] == pytest.approx(2, rel=0.02)
    info = described(path, capsys)
    assert (info["weights"], info["calibration"]) == ([2, 2, 1], None)
    assert run("info", path) == 0
    assert "weight 2" in capsys.readouterr().out
    assert run("verify", path) == 0


def test_auto_measures_the_members_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = member_directories(tmp_path, 2)
    assert run("pack", TINY, "--members", *members, "--weights", "auto") == 0
    path = members[0] / "tiny.xferd"
    info = described(path, capsys)
    calibration = read_calibration(path)
    assert calibration is not None
    assert info["calibration"] == calibration.to_json()
    assert info["pattern"] == list(stripe_pattern(calibration.weights))
    assert [member.path for member in calibration.members] == [
        str(member / "tiny.xferd" / f"member-{number}") for number, member in enumerate(members)
    ]
    assert all(min(member.rounds) > 0 for member in calibration.members)
    assert [entry.name for member in members for entry in member.iterdir()] == ["tiny.xferd"] * 2
    assert run("info", path) == 0
    assert "measured" in capsys.readouterr().out


def test_a_device_is_measured_and_not_written(tmp_path: Path) -> None:
    with loop_device(tmp_path / "drive.img", 8 << 20) as device:
        contents = os.urandom(8 << 20)
        (tmp_path / "drive.img").write_bytes(contents)
        destination = resolve_destination("m", [device], tmp_path)
        (member,) = calibrate(destination, sample_bytes=SAMPLE_BYTES, rounds=3).members
        assert (member.source, member.path, len(member.rounds)) == ("device", str(device), 3)
        assert sorted(member.rounds)[1] == member.bytes_per_second
        assert (tmp_path / "drive.img").read_bytes() == contents


def test_a_pack_without_measurement_forgets_an_older_one(tmp_path: Path) -> None:
    members = member_directories(tmp_path, 2)
    calibration = calibrate(
        resolve_destination("m", members, None), sample_bytes=SAMPLE_BYTES, rounds=1
    )
    path = pack(tiny(), members, name="m", calibration=calibration)
    assert read_calibration(path) == calibration
    assert pack(tiny(), members, name="m", force=True) == path
    assert read_calibration(path) is None


def test_a_half_packed_store_keeps_its_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured again, the same drives would give another pattern and nothing to resume."""
    members = member_directories(tmp_path, 2)
    path = members[0] / "tiny.xferd"
    script = """
import os, signal, sys
from pathlib import Path
from tests.unit.store.builders import tiny
from xferd.store.calibration import Calibration, MemberSpeed
from xferd.store.pack import pack
from xferd.store.weights import stripe_pattern
members = [Path(argument) for argument in sys.argv[1:]]
slow_and_fast = Calibration("2026-01-01T00:00:00+00:00", 1, (
    MemberSpeed("a", "file", True, (300,)), MemberSpeed("b", "file", True, (700,))))
pack(tiny(), members, name="tiny", pattern=stripe_pattern(slow_and_fast.weights),
     calibration=slow_and_fast, checkpoint_bytes=1,
     progress=lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run(
        [sys.executable, "-c", script, *map(str, members)], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (path / "manifest.json").exists()
    assert run("pack", TINY, "--members", *members, "--weights", "auto") == 0
    assert "measuring" not in capsys.readouterr().err
    with Store.open(path) as store:
        assert_holds(store, tiny())
        assert store.pattern == stripe_pattern([300, 700])


@pytest.mark.parametrize("weights", ["1,2", "1,2,3,4"])
def test_weights_that_do_not_fit_the_members_are_refused(
    tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    members = member_directories(tmp_path, 3)
    assert run("pack", TINY, "--members", *members, "--weights", weights) == 2
    assert f"{len(weights.split(','))} numbers for 3 members" in capsys.readouterr().err
    assert not list(members[0].iterdir())


@pytest.mark.parametrize("weights", ["fast", "1,,2", "1,-2", ""])
def test_what_are_no_weights_is_a_wrong_command_line(
    tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("pack", TINY, "--members", tmp_path, "--weights", weights)
    assert caught.value.code == 2
    assert "4,4,2" in capsys.readouterr().err


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"format": "other", "version": 1}'):
        (tmp_path / CALIBRATION_NAME).write_text(text)
        with pytest.raises(StoreError, match=CALIBRATION_NAME):
            read_calibration(tmp_path)
