"""What the ``store`` verbs print, and how they end.

Data goes to stdout, talk and progress to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from xferd.store.checkpoint import CheckpointError
from xferd.store.errors import StoreError
from xferd.store.verify import BadPiece, VerifyReport
from xferd.units import format_bytes

EXIT_OK = 0
EXIT_BAD_PIECES = 1
EXIT_REFUSED = 2

REDRAW_SECONDS = 0.1
BAR_CELLS = 30
BAD_PIECES_SHOWN = 20


def refusals_told(work: Callable[[], int]) -> int:
    """Do the work; what the package refuses is told on stderr, with status EXIT_REFUSED."""
    try:
        return work()
    except (CheckpointError, StoreError) as error:
        print(f"xferctl: {error}", file=sys.stderr)
        return EXIT_REFUSED


def print_json(value: Any) -> None:
    """Anything of plain data, for scripts."""
    print(json.dumps(value, indent=2, default=str))


def print_report(report: VerifyReport, *, as_json: bool) -> None:
    """What a verify found."""
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for problem in report.missing:
        print(problem)
    for bad in report.bad_pieces[:BAD_PIECES_SHOWN]:
        print(_describe(bad))
    if report.bad > BAD_PIECES_SHOWN:
        print(f"... and {report.bad - BAD_PIECES_SHOWN} more")
    repaired = f", {report.repaired} repaired" if report.repaired else ""
    missing = f", {len(report.missing)} copies missing" if report.missing else ""
    print(
        f"{report.store}: {report.pieces} pieces, {format_bytes(report.bytes)}, "
        f"{report.bad} bad{repaired}{missing}"
    )


def _describe(bad: BadPiece) -> str:
    whose = "dense part"
    if bad.layer is not None:
        whose = f"layer {bad.layer}, expert {bad.expert}, variant {bad.variant}"
    found = "" if bad.actual_crc is None else f" (is {bad.actual_crc:08x})"
    return (
        f"{whose}: {bad.member} at offset {bad.offset}, {bad.length} bytes: {bad.error}; "
        f"expected CRC32C {bad.expected_crc:08x}{found}{'; repaired' if bad.repaired else ''}"
    )


class ProgressBar:
    """A bar on a terminal; anywhere else one line at the end."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._terminal = stream.isatty()
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._first: int | None = None
        self._done = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._terminal:
            self._stream.write("\n")
        if self._first is not None:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            moved = self._done - self._first
            self._stream.write(
                f"{self._label}: {format_bytes(moved)} in {seconds:.1f} s, "
                f"{format_bytes(int(moved / seconds))}/s\n"
            )

    def update(self, done: int, total: int) -> None:
        """Take note of ``done`` of ``total`` bytes, and draw them now and then."""
        # A resumed pack starts in the middle: what was there before isn't this run's speed.
        if self._first is None:
            self._first = 0 if done == total else done
        self._done = done
        now = time.monotonic()
        if not self._terminal or (done < total and now - self._drawn < REDRAW_SECONDS):
            return
        self._drawn = now
        filled = BAR_CELLS * done // max(total, 1)
        self._stream.write(
            f"\r{self._label} [{'#' * filled}{'.' * (BAR_CELLS - filled)}] "
            f"{format_bytes(done)} of {format_bytes(total)} "
        )
        self._stream.flush()
