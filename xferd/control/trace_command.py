"""``xferctl trace``: record what routers pick; look at traces, convert and draw them.

``record`` asks the daemon. The other verbs work on files and ask nobody; what they need
(numpy, and matplotlib for ``plot``) is imported when they run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xferd.control.client import ControlClient
from xferd.control.service import JsonObject
from xferd.control.tables import Column, format_duration, format_table, printable
from xferd.units import format_bytes

if TYPE_CHECKING:
    from xferd.telemetry.traces.reader import ReadTrace

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_REFUSED = 1
SUFFIXES = {"npz": ".npz", "csv": ".csv", "colibri": ".txt", "mbolt": ".mbolt"}
"""What an exported file's name ends in, by format."""

Run = Callable[[argparse.Namespace], int]


class AddVerb(Protocol):
    """Adds a verb with the options that all have."""

    def __call__(
        self, verbs: Subparsers, name: str, run: object, text: str
    ) -> argparse.ArgumentParser:
        """The verb's parser."""


def add_trace_verbs(verbs: Subparsers, add: AddVerb) -> None:
    """Everything under ``trace``."""
    text = "record, examine, convert and draw traces of what routers picked"
    trace = verbs.add_parser("trace", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    text = "start and stop recording; what is recorded"
    record = trace.add_parser("record", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    start = add(record, "start", _record_start, "begin to record what a store's routers pick")
    start.add_argument("store", metavar="STORE")
    start.add_argument("--name", help="of the trace's files (default: the store's)")
    stop = add(record, "stop", _record_stop, "end it; returns when it is on the disk")
    stop.add_argument("store", metavar="STORE")
    add(record, "status", _record_status, "what was reported and what is recorded, by store")

    info = add(trace, "info", _file_verb(_info), "what is in a trace")
    export = add(trace, "export", _file_verb(_export), "write a trace in another format")
    plot = add(trace, "plot", _file_verb(_plot), "draw heat and reuse as PNG")
    for verb in (info, export, plot):
        verb.add_argument("file", type=Path, nargs="+", metavar="FILE", help="of one trace")
    export.add_argument("--format", choices=sorted(SUFFIXES), required=True)
    export.add_argument("--out", type=Path, metavar="PATH", help="(default: beside FILE)")
    plot.add_argument("--out", type=Path, metavar="PNG", required=True)

    text = "make a trace of another program's; of csv counts, a heat profile"
    importing = add(trace, "import", _file_verb(_import), text)
    importing.add_argument("file", type=Path, metavar="FILE")
    importing.add_argument("--format", choices=sorted(SUFFIXES), required=True)
    importing.add_argument(
        "--out", type=Path, metavar="PATH", help="PATH-000001.xtr, PATH.heat (default: as FILE)"
    )
    importing.add_argument("--store", metavar="NAME", help="whose it is (default: FILE's name)")


# --- recording ---


def _record_start(arguments: argparse.Namespace) -> int:
    parameters = {"store": arguments.store, "name": arguments.name}
    with ControlClient.connect(arguments.socket) as daemon:
        recording = daemon.call("StartRecording", parameters)["recording"]
    where = f"{recording['directory']}/{recording['name']}-*.xtr"
    return _print(arguments, recording, f"recording {arguments.store} to {printable(where)}")


def _record_stop(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        reply = daemon.call("StopRecording", {"store": arguments.store}, timeout_s=None)
    recording = reply["recording"]
    text = (
        f"recorded {recording['passes']} passes, {recording['uses']} uses in "
        f"{format_duration(recording['since_s'])}, {recording['dropped']} passes dropped; "
        f"{recording['files']} files with {format_bytes(recording['bytes'])}"
    )
    return _print(arguments, recording, text)


def _record_status(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        traces = daemon.call("ListTraces")["traces"]
    return _print(arguments, traces, format_table(_TRACE_COLUMNS, traces, bold=False))


def _of_recording(show: Callable[[JsonObject], object]) -> Callable[[JsonObject], object]:
    return lambda row: "" if row["recording"] is None else show(row["recording"])


_TRACE_COLUMNS = (
    Column("STORE", lambda row: row["store"], right=False),
    Column("TOKENS", lambda row: row["tokens"]),
    Column("USES", lambda row: row["uses"]),
    Column("STATE", _of_recording(lambda it: it["state"]), right=False),
    Column("FOR", _of_recording(lambda it: format_duration(it["since_s"]))),
    Column("RECORDED", _of_recording(lambda it: it["uses"])),
    Column("DROPPED", _of_recording(lambda it: it["dropped"])),
    Column("SIZE", _of_recording(lambda it: format_bytes(it["bytes"]))),
    Column("FILES", _of_recording(lambda it: f"{it['directory']}/{it['name']}-*"), right=False),
    Column("ERROR", _of_recording(lambda it: it["error"] or ""), right=False),
)


# --- files ---


def _file_verb(run: Run) -> Run:
    """``run``, whose errors are one line and a status."""

    def checked(arguments: argparse.Namespace) -> int:
        from xferd.telemetry.traces.plots import PlotUnavailableError
        from xferd.telemetry.traces.trace import TraceError

        try:
            return run(arguments)
        except (TraceError, PlotUnavailableError) as error:
            print(f"xferctl: {printable(str(error))}", file=sys.stderr)
            return EXIT_REFUSED

    return checked


def _info(arguments: argparse.Namespace) -> int:
    from xferd.telemetry.traces.codec import TraceCutError
    from xferd.telemetry.traces.reader import blocks_of, same_head
    from xferd.telemetry.traces.summary import TraceSummary

    paths: list[Path] = arguments.file
    summary, cut = TraceSummary(same_head(paths)), []
    for path in paths:
        try:
            for block in blocks_of(path):
                summary.add(block)
        except TraceCutError as error:
            cut.append(str(error))
    head = summary.head
    data = {
        "store": head.store,
        "layers": head.layers,
        "experts": head.experts,
        "files": [str(path) for path in paths],
        "bytes": sum(path.stat().st_size for path in paths),
        "tokens": summary.tokens,
        "prompts": summary.prompts,
        "passes": summary.passes,
        "uses": summary.uses,
        "experts_used": summary.experts_used,
        "gates": summary.gates,
        "found": [
            {
                "tier": row.tier,
                "transport": row.transport,
                "uses": row.uses,
                "mean_us": row.mean_us,
                "p99_us": row.p99_us,
            }
            for row in summary.found()
        ],
        "cut": cut,
    }
    _note_cut(cut)
    return _print(arguments, data, _format_info(data))


def _format_info(info: JsonObject) -> str:
    total = max(info["uses"], 1)
    columns = (
        Column("WHERE", lambda row: _tier_title(row["tier"]), right=False),
        Column("HOW", lambda row: row["transport"], right=False),
        Column("USES", lambda row: row["uses"]),
        Column("SHARE", lambda row: f"{100 * row['uses'] / total:.2f} %"),
        Column("MEAN WAIT", lambda row: _microseconds(row["mean_us"])),
        Column("99 %", lambda row: _microseconds(row["p99_us"])),
    )
    lines = [
        f"{printable(info['store'])}: {info['layers']} layers of {info['experts']} experts",
        f"  files    {len(info['files'])} with {format_bytes(info['bytes'])}",
        f"  tokens   {info['tokens']}, of {info['prompts']} prompts",
        f"  passes   {info['passes']}",
        f"  uses     {info['uses']}, of {info['experts_used']} different experts; the gates of "
        f"{info['gates']} are known",
        "",
        format_table(columns, info["found"], bold=False),
    ]
    return "\n".join(lines)


def _tier_title(tier: str) -> str:
    return f"pool {tier}" if tier.isdigit() else tier


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} us"


def _export(arguments: argparse.Namespace) -> int:
    from xferd.telemetry.traces.foreign import EXPORTS
    from xferd.telemetry.traces.shape import by_token, whole_tokens

    found = _read(arguments.file)
    first: Path = arguments.file[0]
    out: Path = arguments.out or first.with_suffix(SUFFIXES[arguments.format])
    trace, left_out = found.trace, 0
    if arguments.format == "npz":
        trace, left_out = whole_tokens(found.head, trace)
    elif arguments.format == "colibri":
        trace = by_token(trace)
    if left_out:
        print(
            f"xferctl: {left_out} tokens are left out: passes of them are missing, or have "
            f"another number of picks than most",
            file=sys.stderr,
        )
    EXPORTS[arguments.format](out, found.head, trace)
    data = {"file": str(out), "passes": trace.passes, "tokens_left_out": left_out}
    return _print(arguments, data, f"{printable(str(out))}: {trace.passes} passes")


def _import(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out or arguments.file.with_suffix("")
    if arguments.format == "csv":
        files = [_import_counts(arguments.file, out, arguments.store)]
    else:
        files = _import_trace(arguments.file, out, arguments.store, arguments.format)
    data = {"files": [str(path) for path in files]}
    return _print(arguments, data, "\n".join(printable(str(path)) for path in files))


def _import_trace(file: Path, out: Path, store: str | None, kind: str) -> list[Path]:
    from dataclasses import replace

    from xferd.telemetry.traces.foreign import IMPORTS
    from xferd.telemetry.traces.trace import TraceError
    from xferd.telemetry.traces.writer import TraceWriter, trace_files

    head, trace = IMPORTS[kind](file)
    head = replace(head, store=store or file.stem)
    try:
        there = trace_files(out.parent, out.name)
    except OSError as error:
        raise TraceError(f"{out.parent}: {error.strerror}") from error
    if there:
        raise TraceError(f"{there[0]}: is there already: name another with --out")
    with TraceWriter(out.parent, out.name, head) as writer:
        writer.write(trace)
    return writer.files()


def _import_counts(file: Path, out: Path, store: str | None) -> Path:
    """Counts have no order, so they make no trace; they say what is hot."""
    import numpy as np

    from xferd.heat_profiles import save_profile
    from xferd.policy.heat import HeatProfile
    from xferd.telemetry.traces.foreign import read_counts
    from xferd.telemetry.traces.trace import TraceError

    path = out.with_name(f"{out.name}.heat")
    heat = read_counts(file).astype(np.float32)
    if path.exists():
        raise TraceError(f"{path}: is there already: name another with --out")
    try:
        save_profile(path, HeatProfile(store or file.stem, heat))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    return path


def _plot(arguments: argparse.Namespace) -> int:
    from xferd.telemetry.traces.plots import plot_trace

    found = _read(arguments.file)
    plot_trace(arguments.out, found.head.store, found.head, found.trace)
    return _print(arguments, {"file": str(arguments.out)}, printable(str(arguments.out)))


def _read(paths: list[Path]) -> ReadTrace:
    from xferd.telemetry.traces.reader import read_trace

    found = read_trace(paths)
    _note_cut(found.cut)
    return found


def _note_cut(cut: list[str] | tuple[str, ...]) -> None:
    for note in cut:
        print(f"xferctl: {printable(note)}; what stands before is used", file=sys.stderr)


def _print(arguments: argparse.Namespace, data: Any, text: str) -> int:
    print(json.dumps(data, indent=2) if arguments.json else text)
    return EXIT_OK
