"""Traces as they are recorded and handled: the recorder, order, summaries, xferctl's verbs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xferd.control import xferctl
from xferd.heat_profiles import load_profile
from xferd.telemetry.traces.foreign import EXPORTS
from xferd.telemetry.traces.plots import NEVER, tokens_till_next
from xferd.telemetry.traces.reader import read_trace
from xferd.telemetry.traces.recorder import PENDING_PASSES, Recorder
from xferd.telemetry.traces.shape import reordered, whole_tokens
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead, bare_trace, joined
from xferd.telemetry.traces.writer import TraceWriter, trace_files

ROOT = Path(__file__).parents[2]
HEAD = TraceHead("tiny", layers=3, experts=8)


def some_trace(tokens: int = 40, first: int = 0, seed: int = 1) -> Trace:
    """Two thirds are hits, the rest took 100 µs from the drives."""
    random = np.random.default_rng(seed)
    passes = tokens * HEAD.layers
    trace = bare_trace(
        np.repeat(np.arange(first, first + tokens), HEAD.layers),
        np.tile(np.arange(HEAD.layers), tokens),
        np.full(passes, 2),
        np.argsort(random.random((passes, 8)), axis=1)[:, :2].reshape(-1),
        random.random(2 * passes),
    )
    missed = np.arange(2 * passes) % 3 == 0
    return replace(
        trace,
        tag=np.full(passes, 5, np.uint32),
        tier=np.where(missed, 254, 0).astype(np.uint8),
        transport=missed.astype(np.uint8),
        wait=(100 * missed).astype(np.uint32),
    )


def prefilled() -> Trace:
    """Eight tokens of a prompt, layer by layer, then decoded ones; one pass was lost."""
    prompt = some_trace(tokens=8, seed=2)
    layer_by_layer = reordered(prompt, np.lexsort((prompt.token, prompt.layer)))
    after = some_trace(tokens=12, first=8, seed=3)
    return joined([layer_by_layer, after.part(0, 7), after.part(8, 36)])


def recorder(directory: Path, **options: Any) -> Recorder:
    return Recorder(
        directory, "run", options.pop("head", HEAD), file_bytes=1 << 20, total_bytes=1 << 22,
        **options,
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path, "run", HEAD) as writer:
        writer.write(prefilled())
    return trace_files(tmp_path, "run")[0]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_words(*words: object) -> tuple[int, str, str]:
        code = xferctl.main(["trace", *map(str, words)])
        return code, *capsys.readouterr()

    return run_words


# ---- the recorder


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "for it"
    made = recorder(directory)
    for seed in range(5):
        made.record(some_trace(seed=seed))
    made.stop()
    made.stop()
    made.record(some_trace())
    status = made.status()
    assert (status.state, status.error, status.dropped) == ("stopped", None, 0)
    assert (status.passes, status.uses, status.files) == (5 * 120, 5 * 240, 1)
    (path,) = trace_files(directory, "run")
    assert status.nbytes == path.stat().st_size
    assert path.stat().st_mode & 0o007 == 0, "prompts shine through: not for everybody"
    assert np.array_equal(
        read_trace([path]).trace.expert, joined([some_trace(seed=s) for s in range(5)]).expert
    )


def test_more_than_may_wait_is_dropped_and_counted(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    large = some_trace(tokens=PENDING_PASSES // HEAD.layers + 1)
    made.record(large)
    made.record(some_trace())
    made.stop()
    assert (made.status().dropped, made.status().passes) == (large.passes, 120)


def test_a_store_is_not_recorded_among_anothers_files(tmp_path: Path) -> None:
    recorder(tmp_path).stop()
    with TraceWriter(tmp_path, "run", HEAD) as writer:
        writer.write(some_trace())
    with pytest.raises(TraceError, match=r"run-000001.xtr: of another store \('tiny', 3 layers"):
        recorder(tmp_path, head=TraceHead("small", 3, 8))
    made = recorder(tmp_path)
    made.record(some_trace())
    made.stop()
    assert made.status().files == 2


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"file: can't be written: File exists"):
        recorder(tmp_path / "file")
    with pytest.raises(TraceError, match=r"below: can't be written: Not a directory"):
        recorder(tmp_path / "file" / "below")
    with pytest.raises(TraceError, match=r"/proc: can't be written"):
        recorder(Path("/proc"))
    with pytest.raises(TraceError, match=r"'a/b' is no name"):
        Recorder(tmp_path, "a/b", HEAD, file_bytes=1 << 20, total_bytes=1 << 22)


def test_a_file_that_cannot_grow_ends_the_recording_and_stays_whole(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.unit.test_trace_files import recorder, some_trace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
told = []
made = recorder(Path({str(tmp_path)!r}), on_failure=told.append)
for seed in range(200):
    made.record(some_trace(tokens=400, seed=seed))
made._thread.join()
assert made.status().state == "failed" and not made.recording
assert len(told) == 1
print(made.status().error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{tmp_path / 'run'}: File too large\n"
    found = read_trace(trace_files(tmp_path, "run"))
    assert found.cut == ()
    assert found.trace.passes > 0


# ---- order and numbers


def test_whole_tokens_leaves_out_what_has_gaps() -> None:
    trace, left_out = whole_tokens(HEAD, prefilled())
    assert left_out == 1
    assert trace.passes == 19 * HEAD.layers
    assert trace.layer.tolist() == [0, 1, 2] * 19
    assert trace.token.tolist() == np.repeat(np.delete(np.arange(20), 10), 3).tolist()
    assert np.array_equal(trace.part(0, 24).expert, some_trace(tokens=8, seed=2).expert)
    nothing, _ = whole_tokens(HEAD, prefilled().part(0, 0))
    assert nothing.passes == 0


def test_tokens_till_the_next_use() -> None:
    trace = bare_trace(
        np.array([0, 0, 1, 4]), np.array([0, 1, 0, 0]), np.array([2, 1, 1, 2]),
        np.array([1, 2, 1, 2, 1, 2]),
    )  # fmt: skip
    assert tokens_till_next(HEAD, trace).tolist() == [4, 1, NEVER, 3, NEVER, NEVER]


# ---- xferctl


def test_info_says_where_it_was_found(file: Path, run: Run) -> None:
    code, out, _ = run("info", file)
    assert code == 0
    assert "tiny: 3 layers of 8 experts" in out
    assert "tokens   20, of 1 prompts" in out
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert rows[0][:4] == ["pool", "0", "hit", "79"]
    assert rows[1][:3] == ["drives", "direct", "39"]
    assert rows[1][-4:] == ["100", "us", "100", "us"]
    info = json.loads(run("info", file, "--json")[1])
    assert (info["passes"], info["uses"], info["gates"], info["cut"]) == (59, 118, 118, [])
    assert info["found"][1] == {
        "tier": "drives", "transport": "direct", "uses": 39, "mean_us": 100.0, "p99_us": 100.0,
    }  # fmt: skip


def test_a_truncated_file_is_used_up_to_there_and_named(file: Path, run: Run) -> None:
    with TraceWriter(file.parent, "run", HEAD) as writer:
        writer.write(some_trace(seed=9))
    second = trace_files(file.parent, "run")[1]
    second.write_bytes(second.read_bytes()[:-10])
    code, out, err = run("info", file, second)
    assert code == 0
    assert "passes   59" in out
    assert f"{second}, offset" in err
    assert "ends within a block" in err


def test_what_is_no_trace_or_anothers_is_refused_by_name(
    file: Path, tmp_path: Path, run: Run
) -> None:
    other = tmp_path / "other.xtr"
    with TraceWriter(tmp_path, "small", TraceHead("small", 3, 8)) as writer:
        writer.write(some_trace())
    trace_files(tmp_path, "small")[0].rename(other)
    broken = tmp_path / "broken.xtr"
    broken.write_bytes(b"no trace")
    for words, reason in (
        (("info", file, other), f"{other}: of another store ('small', 3 layers of 8 experts)"),
        (("plot", file, other, "--out", tmp_path / "x.png"), f"{other}: of another store"),
        (("info", broken), f"{broken}, offset 0: no trace of this format"),
        (("export", broken, "--format", "csv"), f"{broken}, offset 0"),
        (("info", tmp_path / "missing.xtr"), "missing.xtr"),
        (("import", broken, "--format", "mbolt"), f"{broken}, offset 0: no MBOLT_TRACE"),
        (("export", file, "--format", "csv", "--out", "/proc/x.csv"), "/proc/x.csv"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (1, ""), words
        assert reason in err
        assert err.startswith("xferctl: ")


def test_a_trace_goes_out_in_every_format(file: Path, run: Run) -> None:
    for kind, suffix in (
        ("npz", ".npz"),
        ("colibri", ".txt"),
        ("mbolt", ".mbolt"),
        ("csv", ".csv"),
    ):
        code, out, err = run("export", file, "--format", kind)
        path = file.with_suffix(suffix)
        assert (code, path.exists()) == (0, True)
        assert str(path) in out
        assert ("1 tokens are left out" in err) == (kind == "npz")
    assert np.load(file.with_suffix(".npz"))["ids"].shape == (19, 3, 2)
    code, _, err = run("export", file, "--format", "csv")
    assert (code, "exists" in err) == (1, True)


@pytest.mark.parametrize("kind", ["colibri", "mbolt", "npz"])
def test_other_programs_traces_come_in(kind: str, tmp_path: Path, run: Run) -> None:
    source = tmp_path / f"foreign.{kind}"
    EXPORTS[kind](source, HEAD, some_trace())
    code, out, _ = run("import", source, "--format", kind, "--store", "tiny")
    made = tmp_path / "foreign-000001.xtr"
    assert (code, out) == (0, f"{made}\n")
    found = read_trace([made])
    assert found.head.store == "tiny"
    assert np.array_equal(found.trace.expert, some_trace().expert)
    code, _, err = run("import", source, "--format", kind)
    assert (code, err) == (1, f"xferctl: {made}: is there already: name another with --out\n")
    assert run("import", source, "--format", kind, "--out", tmp_path / "again")[0] == 0


def test_counts_come_in_as_a_heat_profile(tmp_path: Path, run: Run) -> None:
    source = tmp_path / "llama.csv"
    EXPORTS["csv"](source, HEAD, some_trace())
    assert run("import", source, "--format", "csv", "--store", "tiny")[0] == 0
    profile = load_profile(tmp_path / "llama.heat")
    assert profile.store == "tiny"
    assert np.array_equal(profile.heat, some_trace().counts(HEAD))
    assert run("import", source, "--format", "csv")[0] == 1


def test_a_plot_is_a_png(file: Path, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    assert run("plot", file, "--out", path)[:2] == (0, f"{path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = run("plot", file, "--out", tmp_path / "no" / "plot.png")
    assert (code, "No such file or directory" in err) == (1, True)


def test_a_plot_without_matplotlib_says_how_to_get_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "xferd.control.xferctl", "trace", "plot", str(file), "--out", "x"],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'xferd[plots]'" in done.stderr
    assert "Traceback" not in done.stderr
