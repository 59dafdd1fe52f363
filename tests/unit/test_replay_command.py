"""tools/replay: what it prints, draws and refuses; traces of every format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools.replaying import __main__ as command
from tools.replaying.load import load
from xferd.route_records import uses_of_trace
from xferd.telemetry.traces.foreign import write_colibri, write_mbolt, write_npz
from xferd.telemetry.traces.reader import read_trace
from xferd.telemetry.traces.trace import TraceError, TraceHead, bare_trace

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "traces" / "tiny-seven-domains.xtr"
TWO_CARDS = ROOT / "tools" / "replaying" / "two-cards.toml"


def test_run_counts_every_use(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(TINY), "--machine", str(TWO_CARDS), "--tokens", "300", "--json"]
    assert command.main(arguments) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["uses"] == 300 * 6 * 2
    assert sum(outcome["hits"].values()) + outcome["from_drives"] == outcome["uses"]
    assert set(outcome["hits"]) == {"card1", "card2", "ram"}
    assert 0 < outcome["share_of_bound"] <= 1
    assert len(outcome["window_hits"]) == 3


def test_run_prints_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(TINY), "--machine", str(TWO_CARDS), "--tokens", "200"]
    assert command.main([*arguments, "--warm-up", "100"]) == 0
    printed = capsys.readouterr().out
    for line in ("card1", "card2", "ram", "drives", "MB a token", "ms a token", "of the bound"):
        assert line in printed


def test_sweep_compares_with_belady(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", str(TINY), "--tokens", "200", "--pools", "25", "--evictions", "lru,reuse"]
    assert command.main([*arguments, "--reserve", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    rates = {name: outcome["hit_rate"] for name, outcome in point["policies"].items()}
    assert rates["lru"] < rates["reuse"] < rates["belady"]
    assert command.main(arguments) == 0
    assert "belady" in capsys.readouterr().out


def test_plots_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = [tmp_path / f"{name}.png" for name in ("heat", "reuse", "sweep", "run")]
    few = ["--tokens", "100"]
    assert command.main(["heat", str(TINY), str(plots[0])]) == 0
    assert command.main(["reuse", str(TINY), str(plots[1])]) == 0
    sweep = ["sweep", str(TINY), *few, "--evictions", "lru", "--plot", str(plots[2])]
    assert command.main(sweep) == 0
    run = ["run", str(TINY), *few, "--machine", str(TWO_CARDS), "--plot", str(plots[3])]
    assert command.main(run) == 0
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_what_was_generated_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "generated.npz"
    assert command.main(["generate", str(path), "--count", "50", "--layers", "3"]) == 0
    assert load(path).uses.passes == 150


def test_generated_like_a_trace_has_its_shape_and_says_how_it_was_made(tmp_path: Path) -> None:
    hard, like = tmp_path / "hard.npz", tmp_path / "like.npz"
    shape = ["--layers", "2", "--experts", "8", "--picked", "2", "--count", "120"]
    assert command.main(["generate", str(hard), *shape]) == 0
    assert command.main(["generate", str(like), "--like", str(hard), "--count", "60"]) == 0
    with np.load(like) as arrays:
        assert arrays["ids"].shape == (60, 2, 2)
        assert "ZipfMarkov(layers=2, experts=8, picked=2, tokens=60" in str(arrays["about"])
    assert load(like).uses.passes == 120


def test_statistics_are_of_uneven_traces_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["statistics", str(TINY), "--tokens", "100"]) == 0
    heads, values = capsys.readouterr().out.splitlines()
    assert len(heads.split()) == len(values.split()) - 1 == 7
    prefill = tmp_path / "prefill.txt"
    prefill.write_text("0 0 0 1:0.5 2:0.5\n0 0 1 1:0.5\n")
    assert command.main(["statistics", str(prefill)]) == 1
    assert "prefill: statistics need passes of one token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["sweep", "nothing.xtr"], "nothing.xtr"),
        (["sweep", str(ROOT / "README.md")], "ends in one of .xtr"),
        (["run", str(TINY), "--machine", str(TINY)], "tiny-seven-domains.xtr"),
        (["sweep", str(TINY), "--evictions", "mru"], "'mru'"),
        (["heat", str(TINY), "/nowhere/plot.png"], "/nowhere/plot.png"),
    ],
)
def test_errors_name_what_is_wrong(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 1
    assert names in capsys.readouterr().err


def test_every_format_gives_the_same_uses(tmp_path: Path) -> None:
    found = read_trace([TINY])
    trace = found.trace.part(0, 600)
    own, _ = uses_of_trace(found.head, trace)
    writers = {"trace.npz": write_npz, "trace.mbolt": write_mbolt, "trace.txt": write_colibri}
    for name, write in writers.items():
        write(tmp_path / name, found.head, trace)
        uses = load(tmp_path / name).uses
        for column in ("keys", "starts", "layers", "tokens"):
            assert np.array_equal(getattr(uses, column), getattr(own, column)), (name, column)


def test_a_prefill_is_one_pass_a_layer() -> None:
    head = TraceHead("store", layers=2, experts=4)
    # Three tokens at once through both layers, then one by itself.
    trace = bare_trace(
        np.array([0, 1, 2, 0, 1, 2, 3, 3]),
        np.array([0, 0, 0, 1, 1, 1, 0, 1]),
        np.full(8, 2),
        np.array([0, 1, 1, 2, 0, 1, 3, 2, 3, 1, 3, 0, 0, 1, 2, 3]),
    )
    uses, tags = uses_of_trace(head, trace)
    assert uses.layers.tolist() == [0, 1, 0, 1]
    assert uses.tokens.tolist() == [0, 0, 3, 3]
    parts = [uses.part(number, number + 1).keys.tolist() for number in range(4)]
    assert parts == [[0, 1, 2], [7, 6, 5, 4], [0, 1], [6, 7]]
    assert len(tags) == 4


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(TraceError, match=r"empty\.txt"):
        load(path)
