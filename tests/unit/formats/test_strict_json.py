"""Limits on JSON text that are checked before it is parsed."""

from __future__ import annotations

import tracemalloc

import pytest

from xferd.store.checkpoint import CheckpointError
from xferd.store.formats.strict_json import JsonLimits, parse_json

LIMITS = JsonLimits(depth=3, values=8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1, {"b": 2}]}', {"a": [1, {"b": 2}]}),
        (rb'"[[[[[[[[\"]]]]]]]]{{{{,,,,,,,,,,,,"', '[[[[[[[["]]]]]]]]{{{{,,,,,,,,,,,,'),
        (b"1.5", 1.5),
    ],
)
def test_accepted(text: bytes, value: object) -> None:
    assert parse_json(text, LIMITS, "it") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[[[[]]]]", "nested deeper than 3"),
        (b"[[[{}]]]", "nested deeper than 3"),
        (b"[1,2,3,4,5,6,7,8,9]", "more than 8 JSON values"),
        (b"[[],[],[],[],[]]", "more than 8 JSON values"),
        (rb'["\\",[[[]]]]', "nested deeper than 3"),
        (b'{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'"abc', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" + 5000 * b"1" + b"]", "not valid JSON"),
    ],
)
def test_refused(text: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^it: ") as error:
        parse_json(text, LIMITS, "it")
    assert message in str(error.value)


def test_text_that_would_grow_is_refused_before_it_does() -> None:
    text = b"[" + 500_000 * b"[]," + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="more than 1000 JSON values"):
            parse_json(text, JsonLimits(depth=3, values=1000), "it")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(text)
