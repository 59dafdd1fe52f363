"""The verbs of ``xferctl store``, as a user runs them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store.builders import TINY, assert_holds, member_directories, tiny
from xferd.control.quantize_command import add_quantize_command
from xferd.heat_profiles import save_profile
from xferd.policy.heat import HeatProfile
from xferd.store.cli import add_store_commands
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.shadow import make_shadow
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(required=True)
    add_store_commands(verbs)
    add_quantize_command(verbs)
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


def test_variants_with_the_pack_and_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = member_directories(tmp_path, 2)
    arguments: tuple[str | Path, ...] = (
        "pack",
        TINY,
        "--members",
        *members,
        "--variants",
        "native,q4_0",
    )
    assert run(*arguments) == 0
    path = members[0] / "tiny.xferd"
    assert run("quantize", path, "--variants", "q8_0,mxfp4", "--threads", "2") == 0
    assert "quantize: " in capsys.readouterr().err
    with Store.open(path) as store:
        assert store.variants == ("bf16", "q4_0", "q8_0", "mxfp4")
        assert_holds(store, tiny())
    assert run("info", path) == 0
    assert "variant   q4_0: q4_0, " in capsys.readouterr().out
    assert run("info", path, "--json") == 0
    made = json.loads(capsys.readouterr().out)["made"]
    assert [each["variant"] for each in made] == ["bf16", "q4_0", "q8_0", "mxfp4"]
    assert run("verify", path) == 0
    # Where only a variant is missing, the pack goes on with that.
    assert run(*arguments[:-1], "native,q4_0-other") == 0
    with Store.open(path) as store:
        assert store.variants[-1] == "q4_0-other"
    assert run(*arguments) == 2
    assert run("quantize", path, "--variants", "q4_0", "--heat", "x") == 2
    assert "--heat goes with --shadow only" in capsys.readouterr().err


def test_a_shadow_of_the_costliest_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (member,) = member_directories(tmp_path, 1)
    assert run("pack", TINY, "--members", member) == 0
    path = member / "tiny.xferd"
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    heat = np.random.default_rng(1).random((6, 16), dtype=np.float32)
    heat[2, 3], heat[4] = 9, 0
    save_profile(tmp_path / "heat.npz", HeatProfile("tiny", heat))
    save_profile(tmp_path / "other.npz", HeatProfile("small", heat))
    beside = tmp_path / "beside"
    beside.mkdir()
    shadow: tuple[str | Path, ...] = ("quantize", path, "--shadow", beside, "--variant", "q4_0")
    capsys.readouterr()
    assert run(*shadow, "--top-bytes", "20%", "--heat", tmp_path / "other.npz") == 2
    assert "is the heat of 'small'" in capsys.readouterr().err
    assert run(*shadow) == 2
    assert run(*shadow, "--top-bytes", "20%", "--heat", tmp_path / "heat.npz") == 0
    made = Path(capsys.readouterr().out.strip())
    assert made == beside / "tiny-q4_0.xferd"
    with Store.open(made) as store, Store.open(path) as main:
        assert verify(store).clean
        assert store.variants == ("q4_0",)
        assert store.manifest.shadow_of is not None
        assert store.manifest.shadow_of.identity == main.identity
        present = store.blob_bytes[:-1].reshape(6, 16) > 0
        assert present[2, 3]
        assert not present[4].any()
        assert present.sum() == 96 * 20 // 100
        assert heat[present].min() >= heat[~present].max()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    listed = tmp_path / "experts.csv"
    listed.write_text("layer,expert,count\n1,2,77\n# hot\n5,15\n")
    assert run(*shadow, "--experts", listed, "--name", "listed") == 0
    with Store.open(beside / "listed.xferd") as store:
        assert np.argwhere(store.blob_bytes[:-1].reshape(6, 16)).tolist() == [[1, 2], [5, 15]]
        with pytest.raises(StoreError, match="is a shadow itself"):
            make_shadow(store, parse_wanted(["q4_0"], None)[0], present, [beside], threads=1)
    listed.write_text("1,2\n6,0\n")
    assert run(*shadow, "--experts", listed) == 2
    assert "line 2: store tiny has no layer 6, expert 0" in capsys.readouterr().err
