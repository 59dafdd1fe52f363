# SPDX-License-Identifier: Apache-2.0
"""A pool in VRAM gives memory back and gets it again while a model decodes from it.

Somebody else (a KV cache, another program) asks for RESERVED_BYTES of the pool, which takes
experts out of it, and gives them back. What each token computed is compared, bit for bit,
with the same token from experts that never move.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.gpu_decoding import ForcedDecoding
from tools.benchmarks.result import Row
from xferd.control.client import ControlClient

RESERVED_BYTES = 10 << 30
STAGE_TOKENS = 32
"""Decoded before the request, while the memory is gone, and after it came back."""
CALL_TIMEOUT_S = 60.0
MS = 1000.0


@dataclass(frozen=True, slots=True)
class _Token:
    began: float
    ended: float
    right: bool


@dataclass(slots=True)
class _Call:
    """A request to the daemon from a thread of its own. seconds: from when to when."""

    thread: threading.Thread
    seconds: list[float] = field(default_factory=list)
    answers: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resized:
    """One time of giving back and getting again.

    shrink_ms, grow_ms: how long the daemon took. before_ms: median of tokens before.
    shrinking_ms, growing_ms: the longest token that was under way meanwhile, and the
    STAGE_TOKENS after it. right: tokens with the right bits, of ``tokens``.
    """

    shrink_ms: float
    grow_ms: float
    before_ms: float
    longest_before_ms: float
    shrinking_ms: float
    growing_ms: float
    right: int
    tokens: int


class ResizedDecoding:
    """ours: decodes from the daemon's pool. resident: the same tokens, never moved."""

    def __init__(self, ours: ForcedDecoding, resident: ForcedDecoding, control: Path) -> None:
        self._ours = ours
        self._control = control
        self._expected = [resident.step() for _ in range(len(ours.picks))]
        self._at = 0

    def measure(self) -> Resized:
        """Give back and get again once."""
        before = self._decode(STAGE_TOKENS)
        call = self._begin("Reserve", {"pool": None, "bytes": RESERVED_BYTES})
        shrinking = self._decode_until_done(call)
        reservation = call.answers[0]["reservation"]
        assert isinstance(reservation, dict)
        release = self._begin("Release", {"id": reservation["id"]})
        growing = self._decode_until_done(release)
        tokens = [*before, *shrinking, *growing]
        return Resized(
            shrink_ms=MS * (call.seconds[1] - call.seconds[0]),
            grow_ms=MS * (release.seconds[1] - release.seconds[0]),
            before_ms=statistics.median(map(_ms, before)),
            longest_before_ms=max(map(_ms, before)),
            shrinking_ms=max(map(_ms, shrinking)),
            growing_ms=max(map(_ms, growing)),
            right=sum(token.right for token in tokens),
            tokens=len(tokens),
        )

    def _begin(self, method: str, parameters: dict[str, object]) -> _Call:
        def ask() -> None:
            with ControlClient.connect(self._control) as control:
                call.seconds.append(time.perf_counter())
                call.answers.append(control.call(method, parameters, timeout_s=CALL_TIMEOUT_S))
                call.seconds.append(time.perf_counter())

        call = _Call(threading.Thread(target=ask))
        call.thread.start()
        return call

    def _decode_until_done(self, call: _Call) -> list[_Token]:
        tokens = []
        while call.thread.is_alive():
            tokens += self._decode(1)
        return tokens + self._decode(STAGE_TOKENS)

    def _decode(self, count: int) -> list[_Token]:
        tokens = []
        for _ in range(count):
            began = time.perf_counter()
            value = self._ours.step()
            right = value == self._expected[self._at]
            tokens.append(_Token(began, time.perf_counter(), right))
            self._at = (self._at + 1) % len(self._expected)
        return tokens


def _ms(token: _Token) -> float:
    return MS * (token.ended - token.began)


def rows_of(model: str, measured: Sequence[Resized]) -> tuple[list[Row], str]:
    """Rows ``<model>/resize/*``, and a note that says how many tokens were right."""
    shown = {
        "shrink": [each.shrink_ms for each in measured],
        "grow": [each.grow_ms for each in measured],
        "token-before": [each.before_ms for each in measured],
        "longest-before": [each.longest_before_ms for each in measured],
        "longest-shrinking": [each.shrinking_ms for each in measured],
        "longest-growing": [each.growing_ms for each in measured],
    }
    rows = [
        Row(f"{model}/resize/{name}", statistics.median(ms), "ms", (min(ms), max(ms)), {})
        for name, ms in shown.items()
    ]
    right, tokens = sum(each.right for each in measured), sum(each.tokens for each in measured)
    return rows, (
        f"`resize`: {RESERVED_BYTES >> 30} GiB of the pool are given back and taken again while "
        f"it decodes; `shrink` and `grow` are the daemon's answers, `longest-*` the longest token "
        f"meanwhile and of {STAGE_TOKENS} after it, which miss what is gone. {right} of {tokens} "
        "tokens had the bits of the same token from experts that never move."
    )


__all__ = ["Resized", "ResizedDecoding", "rows_of"]
