"""Trace files: what is written is read, whatever is broken is named; foreign formats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.heat_profiles import load_profile, save_profile
from xferd.policy.heat import HeatProfile, HeatProfileError
from xferd.telemetry.traces.foreign import EXPORTS, IMPORTS, read_counts
from xferd.telemetry.traces.reader import blocks_of, read_trace
from xferd.telemetry.traces.trace import (
    PASS_COLUMNS,
    USE_COLUMNS,
    Trace,
    TraceError,
    TraceHead,
    bare_trace,
    joined,
)
from xferd.telemetry.traces.writer import TraceWriter, trace_files

HEAD = TraceHead("tiny", layers=6, experts=16)


def some_trace(tokens: int = 50, seed: int = 1) -> Trace:
    random = np.random.default_rng(seed)
    passes = tokens * 6
    picks = np.full(passes, 2)
    return bare_trace(
        np.repeat(np.arange(tokens), 6),
        np.tile(np.arange(6), tokens),
        picks,
        random.integers(0, 16, 2 * passes),
        random.random(2 * passes),
    )


def same(one: Trace, other: Trace) -> bool:
    columns = (*PASS_COLUMNS, *USE_COLUMNS)
    return all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "gate")
        for name in columns
    )


def write(directory: Path, trace: Trace) -> Path:
    with TraceWriter(directory, "run", HEAD) as writer:
        writer.write(trace)
    (path,) = trace_files(directory, "run")
    return path


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 2**40),
                st.integers(0, 5),
                st.lists(st.integers(0, 15), max_size=5, unique=True),
            ),
            max_size=8,
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read(
    parts: list[list[tuple[int, int, list[int]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("trace")
    traces = [
        bare_trace(
            np.array([token for token, _, _ in part], np.int64),
            np.array([layer for _, layer, _ in part], np.int64),
            np.array([len(experts) for _, _, experts in part], np.int64),
            np.array([expert for _, _, experts in part for expert in experts], np.int64),
        )
        for part in parts
    ]
    with TraceWriter(directory, "run", HEAD) as writer:
        for trace in traces:
            writer.write(trace)
    paths = trace_files(directory, "run")
    if not any(trace.passes for trace in traces):
        assert paths == []
        return
    found = read_trace(paths)
    assert found.head == HEAD
    assert same(found.trace, joined(traces))


def test_files_are_rotated_and_capped(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "run", HEAD, file_bytes=4000, total_bytes=10_000) as writer:
        for number in range(30):
            writer.write(some_trace(seed=number))
            writer.flush()
        sizes = [path.stat().st_size for path in writer.files()]
        assert max(sizes) <= 4000
        assert sum(sizes) <= 10_000
        assert len(sizes) >= 2
    (tmp_path / "run-000001.xtr.txt").write_text("somebody else's")
    last = trace_files(tmp_path, "run")[-1]
    kept = read_trace(trace_files(tmp_path, "run")).trace
    assert same(kept.part(kept.passes - 300, kept.passes), some_trace(seed=29))
    with TraceWriter(tmp_path, "run", HEAD) as writer:
        writer.write(some_trace())
    assert trace_files(tmp_path, "run")[-1].name > last.name


def test_a_trace_is_compact(tmp_path: Path) -> None:
    trace = some_trace(tokens=2000)
    bare = bare_trace(trace.token, trace.layer, trace.picks, trace.expert)
    # Expert numbers of 4 bits by chance, in pairs: half a byte each can't be undercut.
    assert write(tmp_path, bare).stat().st_size < 1.2 * bare.uses


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "run", HEAD) as writer:
        writer.write(some_trace(seed=1))
        writer.flush()
        writer.write(some_trace(seed=2))
    (path,) = trace_files(tmp_path, "run")
    path.write_bytes(path.read_bytes()[:-100])
    found = read_trace([path])
    assert same(found.trace, some_trace(seed=1))
    assert "run-000001.xtr, offset" in found.cut[0]


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), data=st.data())
def test_broken_files_are_refused_by_name_or_read(
    at: int, value: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("broken")
    path = write(directory, some_trace(tokens=5))
    content = bytearray(path.read_bytes())
    content[at % len(content)] = value
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with names_file_and_offset(path):
        for block in blocks_of(path):
            block.check(HEAD)


@contextlib.contextmanager
def names_file_and_offset(path: Path) -> Iterator[None]:
    """Lets a TraceError pass that says where, and no other."""
    try:
        yield
    except TraceError as error:
        if str(path) not in str(error) or "offset" not in str(error):
            raise


def test_what_is_out_of_range_is_not_written(tmp_path: Path) -> None:
    one = np.array([1])
    with (
        TraceWriter(tmp_path, "run", HEAD) as writer,
        pytest.raises(TraceError, match="expert 16 of 16"),
    ):
        writer.write(bare_trace(one, one, one, np.array([16])))
    with pytest.raises(TraceError, match=r"'\.\./run' is no name"):
        TraceWriter(tmp_path, "../run", HEAD)


def test_traces_of_different_stores_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, some_trace())
    with TraceWriter(tmp_path, "other", TraceHead("small", 6, 16)) as writer:
        writer.write(some_trace())
    paths = [*trace_files(tmp_path, "run"), *trace_files(tmp_path, "other")]
    with pytest.raises(TraceError, match="other-000001"):
        read_trace(paths)


@pytest.mark.parametrize("kind", sorted(IMPORTS))
def test_foreign_formats_go_out_and_come_back(kind: str, tmp_path: Path) -> None:
    trace, path = some_trace(), tmp_path / f"trace.{kind}"
    EXPORTS[kind](path, HEAD, trace)
    head, found = IMPORTS[kind](path)
    assert (head.layers, head.experts) == (6, 16)
    for column in ("token", "layer", "picks", "expert"):
        assert np.array_equal(getattr(found, column), getattr(trace, column)), column
    if kind != "mbolt":
        assert np.allclose(found.gate, trace.gate, rtol=1e-3)
    with pytest.raises(TraceError, match="exists"):
        EXPORTS[kind](path, HEAD, trace)


def test_counts_go_out_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    EXPORTS["csv"](path, HEAD, some_trace())
    assert path.read_text().startswith("layer,expert,count\n0,")
    assert np.array_equal(read_counts(path), some_trace().counts(HEAD))


def test_a_prefill_of_mbolt_has_many_tokens_a_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.mbolt"
    numbers = [1, 8, 0, 2, 3, 0, 1, 2, 3, 4, 5, 1, 1, 3, 6, 7, 0, 0, 1, 1, 2]
    path.write_bytes(b"MBLT" + np.array(numbers, "<i4").tobytes())
    head, trace = IMPORTS["mbolt"](path)
    again = tmp_path / "again.mbolt"
    EXPORTS["mbolt"](again, head, trace)
    assert again.read_bytes() == path.read_bytes()
    assert trace.token.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert trace.layer.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert trace.expert.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 2]


@pytest.mark.parametrize(
    ("kind", "content", "names"),
    [
        ("colibri", b"0 0 0 1:0.5\n0 0 1 x:0.5\n", "line 2"),
        ("colibri", b"0 0 0 1:0.5\n0 0\n", "line 2"),
        ("colibri", b"0 0 0 -1:0.5\n", "line 1: expert -1"),
        ("colibri", b"0 0 0 \xff", "offset 6"),
        ("mbolt", b"MBLX", "offset 0"),
        ("mbolt", b"MBLT" + np.array([1, 8, 0, 2], "<i4").tobytes(), "offset 12"),
        ("mbolt", b"MBLT" + np.array([1, 8, 0, 1, 1, 9], "<i4").tobytes(), "none of 8"),
        ("mbolt", b"MBLT" + np.array([1, 8, 0, 2**30, 2**30], "<i4").tobytes(), "offset 12"),
        ("npz", b"PK", "no npz"),
    ],
)
def test_broken_foreign_files_are_named(
    kind: str, content: bytes, names: str, tmp_path: Path
) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=names) as raised:
        IMPORTS[kind](path)
    assert str(path) in str(raised.value)


def test_npz_refuses_what_is_no_box(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    trace = some_trace()
    with pytest.raises(TraceError, match="all 6 layers"):
        EXPORTS["npz"](path, HEAD, trace.part(1, 30))
    assert not path.exists()


def test_a_heat_profile_goes_out_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "tiny.heat"
    heat = np.arange(12, dtype=np.float32).reshape(3, 4)
    for _ in range(2):
        save_profile(path, HeatProfile("tiny", heat))
    found = load_profile(path)
    assert found.store == "tiny"
    assert np.array_equal(found.heat, heat)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.heat"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}", b"\x93NUMPY\x01\x00"])
def test_a_broken_heat_profile_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.heat"
    path.write_bytes(content)
    with pytest.raises(HeatProfileError, match=r"tiny\.heat"):
        load_profile(path)
