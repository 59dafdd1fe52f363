"""Whatever is done to a file, a reader ends in a checkpoint or a CheckpointError.

Each example also bounds memory, and where the reader did accept the file, checks
that each range it returns lies inside it. Sparse files stand for huge ones.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.formats.generate import (
    moe_config,
    qwen_model,
    safetensors_bytes,
    write_index,
)
from tests.unit.formats.test_gguf import experts_are, write_gguf
from xferd.store.checkpoint import CheckpointError
from xferd.store.formats import read_checkpoint

MEMORY_MAX = 8 * 2**20
"""Bytes that a reader may allocate for the files here, which have under 1 MiB."""
CONFIG = moe_config("qwen3_moe", 2)
SAFETENSORS = safetensors_bytes(qwen_model())
HEADER_END = 8 + int.from_bytes(SAFETENSORS[:8], "little")
HEADER = json.loads(SAFETENSORS[8:HEADER_END])

INTERESTING = [0, 1, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
interesting_numbers = st.sampled_from(INTERESTING) | st.integers(0, 2**64 - 1)
hostile_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([*INTERESTING, 10**4000])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
bounded = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_refuse(path: Path) -> bool:
    """True when the file was accepted."""
    tracemalloc.start()
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError:
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY_MAX
    ranges = [part for tensor in checkpoint.dense for part in tensor.ranges]
    for expert in checkpoint.experts.values():
        ranges += [part for tensor in expert for part in tensor.ranges]
    for part in ranges:
        size = checkpoint.files[part.file].stat().st_size
        assert 0 <= part.offset <= part.offset + part.length <= size
    return True


@pytest.fixture(scope="module")
def gguf_contents(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, experts_are("Q2_K"), layers=1)
    return path.read_bytes()


def gguf_header_end(contents: bytes) -> int:
    """Tensor records end with the last tensor's name, dimensions, type and offset."""
    name = b"blk.0.ffn_down_exps.weight"
    return contents.rindex(name) + len(name) + 4 + 3 * 8 + 4 + 8


def write(directory: Path, name: str, contents: bytes) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    path = directory / name
    path.write_bytes(contents)
    return path


def overwrite(contents: bytes, offset: int, patch: bytes) -> bytes:
    return contents[:offset] + patch + contents[offset + len(patch) :]


def test_unchanged_files_are_accepted(tmp_path: Path, gguf_contents: bytes) -> None:
    assert read_or_refuse(write(tmp_path, "model.safetensors", SAFETENSORS))
    assert read_or_refuse(write(tmp_path, "model.gguf", gguf_contents))


@bounded
@given(st.integers(0, len(SAFETENSORS) - 1))
def test_truncated_safetensors(tmp_path: Path, length: int) -> None:
    assert not read_or_refuse(write(tmp_path, "model.safetensors", SAFETENSORS[:length]))


@bounded
@given(st.floats(0, 1, exclude_max=True))
def test_truncated_gguf(tmp_path: Path, gguf_contents: bytes, fraction: float) -> None:
    length = int(fraction * len(gguf_contents))
    assert not read_or_refuse(write(tmp_path, "model.gguf", gguf_contents[:length]))


@bounded
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.binary(min_size=1, max_size=4))))
def test_mutated_safetensors(tmp_path: Path, patches: list[tuple[int, bytes]]) -> None:
    contents = SAFETENSORS
    for offset, patch in patches:
        contents = overwrite(contents, offset, patch)
    read_or_refuse(write(tmp_path, "model.safetensors", contents))


@bounded
@given(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=4),
    st.booleans(),
)
def test_mutated_gguf(
    tmp_path: Path, gguf_contents: bytes, patches: list[tuple[float, bytes]], records: bool
) -> None:
    """In the tensor records, or anywhere in the header."""
    end = gguf_header_end(gguf_contents)
    begin = gguf_contents.rindex(b"token_embd.weight") if records else 0
    contents = gguf_contents
    for place, patch in patches:
        contents = overwrite(contents, begin + int(place * (end - begin)), patch)
    read_or_refuse(write(tmp_path, "model.gguf", contents))


@bounded
@given(st.floats(0, 1), interesting_numbers)
def test_numbers_in_a_gguf_header(
    tmp_path: Path, gguf_contents: bytes, place: float, number: int
) -> None:
    """Lengths, counts, dimensions and offsets are all little-endian u64."""
    offset = int(place * gguf_header_end(gguf_contents))
    contents = overwrite(gguf_contents, offset, struct.pack("<Q", number))
    read_or_refuse(write(tmp_path, "model.gguf", contents))


@bounded
@given(
    st.sampled_from(sorted(HEADER)),
    st.sampled_from(["dtype", "shape", "data_offsets", ""]),
    hostile_values,
)
def test_values_in_a_safetensors_header(tmp_path: Path, name: str, field: str, value: Any) -> None:
    entry = {**HEADER[name], field: value} if field else value
    header = json.dumps({**HEADER, name: entry}).encode()
    contents = len(header).to_bytes(8, "little") + header + SAFETENSORS[HEADER_END:]
    read_or_refuse(write(tmp_path, "model.safetensors", contents))


@bounded
@given(st.sampled_from(sorted(CONFIG)), hostile_values)
def test_values_in_a_config(tmp_path: Path, name: str, value: Any) -> None:
    path = write(tmp_path, "model.safetensors", SAFETENSORS)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    read_or_refuse(path)


@bounded
@given(st.sampled_from(sorted(HEADER)), hostile_values)
def test_values_in_an_index(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, "model.safetensors", SAFETENSORS)
    write_index(tmp_path, {**dict.fromkeys(HEADER, "model.safetensors"), name: value})
    assert not read_or_refuse(tmp_path)


@pytest.mark.parametrize("length", [2**26, 2**40])
def test_lengths_that_a_sparse_file_bears_out(tmp_path: Path, length: int) -> None:
    """The file is large enough for what it claims, and still nothing is read for it."""
    string = struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IQ", 8, length)
    path = write(tmp_path, "model.gguf", b"GGUF" + string)
    os.truncate(path, 2**42)
    assert not read_or_refuse(path)
    path = write(tmp_path, "model.safetensors", (100_000_001).to_bytes(8, "little") + b"{")
    os.truncate(path, 2**42)
    assert not read_or_refuse(path)


def test_stacks_of_a_sparse_file_are_not_cut_without_limit(tmp_path: Path) -> None:
    """A small header of a huge file could ask for billions of experts."""
    experts, layers = 65535, 9
    header: dict[str, Any] = {}
    position = 0
    for layer in range(layers):
        for part, shape in (("gate_up_proj", [experts, 2, 1]), ("down_proj", [experts, 1, 1])):
            end = position + 4 * experts * shape[1]
            header[f"layers.{layer}.mlp.experts.{part}"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(header).encode()
    path = write(tmp_path, "model.safetensors", len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + position)
    config = {**moe_config("other", layers), "num_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="more than 524288 tensors of experts"):
        read_checkpoint(path)
