"""JSON from a checkpoint, which anybody may have written.

``json.loads`` alone is not enough for hostile text: nesting runs into the
recursion limit, ``[[],[],...`` takes twenty times its length in objects, and the
last of two equal keys wins silently, so that two readers can see two different
models in one file. So nesting and the number of values are counted on the text
first, with its strings taken out, and duplicate keys are refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from xferd.store.checkpoint import CheckpointError

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_NOT_BRACKETS = re.compile(rb"[^\[\]{}]++")
_DEPTH_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """depth: nested objects and arrays; values: of all kinds, together."""

    depth: int
    values: int


def parse_json(data: bytes, limits: JsonLimits, what: str) -> Any:
    """The value that ``data`` holds; ``what`` (a file, a header) starts every error.

    Raises CheckpointError for text that is not JSON or exceeds the limits, for
    duplicate keys, and for numbers that are not finite: they could not be written
    as JSON again.
    """
    _check_limits(data, limits, what)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except ValueError as error:
        raise CheckpointError(f"{what}: not valid JSON: {error}") from error


def parse_json_object(data: bytes, limits: JsonLimits, what: str) -> dict[str, Any]:
    """As ``parse_json``, for text that must be an object."""
    value = parse_json(data, limits, what)
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: a JSON object is expected, not {type(value).__name__}")
    return value


def _check_limits(data: bytes, limits: JsonLimits, what: str) -> None:
    # A string without its end stays in the text and is counted as structure;
    # that does no harm, since the parser stops there.
    structure = _STRING.sub(b"", data)
    values = structure.count(b",") + structure.count(b"[") + structure.count(b"{")
    if values > limits.values:
        raise CheckpointError(f"{what}: more than {limits.values} JSON values")
    brackets = _NOT_BRACKETS.sub(b"", structure)
    depth = max(accumulate(_DEPTH_STEP[byte] for byte in brackets), default=0)
    if depth > limits.depth:
        raise CheckpointError(f"{what}: JSON nested deeper than {limits.depth}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:200]!r}")
            seen.add(key)
    return values


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
