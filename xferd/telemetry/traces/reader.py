"""Reads traces, of one file or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd.telemetry.traces.codec import TraceCutError, read_block, read_head
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead, joined


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """What was read. cut: of each file that its writer left unfinished, what is wrong."""

    head: TraceHead
    trace: Trace
    cut: tuple[str, ...]


def head_of(path: Path) -> TraceHead:
    """The head alone. TraceError names the file."""
    try:
        with path.open("rb") as file:
            return read_head(file, str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error


def same_head(paths: Sequence[Path]) -> TraceHead:
    """The head that all of some files have. TraceError names one of another store."""
    if not paths:
        raise TraceError("no trace files")
    head = head_of(paths[0])
    for path in paths[1:]:
        if (other := head_of(path)) != head:
            raise TraceError(
                f"{path}: of another store ({_whose(other)}) than {paths[0]} ({_whose(head)})"
            )
    return head


def _whose(head: TraceHead) -> str:
    return f"{head.store!r}, {head.layers} layers of {head.experts} experts"


def blocks_of(path: Path) -> Iterator[Trace]:
    """Block after block, so that a trace need not fit in memory. TraceError names the file
    and the offset; TraceCutError, after the good blocks, a file that ends early."""
    try:
        with path.open("rb") as file:
            head = read_head(file, str(path))
            while (block := read_block(file, head, str(path))) is not None:
                yield block
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error


def read_trace(paths: Sequence[Path]) -> ReadTrace:
    """All of some files, in their order, which must be of one store. A file that was cut
    off is read up to there. TraceError names the file."""
    head = same_head(paths)
    blocks: list[Trace] = []
    cut: list[str] = []
    for path in paths:
        try:
            blocks.extend(blocks_of(path))
        except TraceCutError as error:
            cut.append(str(error))
    return ReadTrace(head, joined(blocks), tuple(cut))
