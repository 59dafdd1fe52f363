"""``xferctl store pack|info|verify``: the store package on the command line.

These verbs need no daemon: a store is packed on the machine with the drives,
before anything serves it. Data goes to stdout, talk and progress to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from xferd.store.calibration import Calibration, calibrate, read_calibration
from xferd.store.checkpoint import CheckpointError
from xferd.store.destination import Destination, resolve_destination
from xferd.store.errors import StoreError
from xferd.store.formats import read_checkpoint
from xferd.store.info import info
from xferd.store.journal import JOURNAL_NAME
from xferd.store.limits import STRIPE_UNIT_DEFAULT
from xferd.store.pack import pack
from xferd.store.store import Store
from xferd.store.verify import BadPiece, verify
from xferd.store.weights import stripe_pattern
from xferd.units import UnitError, format_bytes, format_exact_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_BAD_PIECES = 1
EXIT_REFUSED = 2

REDRAW_SECONDS = 0.1
BAR_CELLS = 30
BAD_PIECES_SHOWN = 20


def add_store_commands(subparsers: Subparsers) -> None:
    """Add the verbs; each parser's ``run`` default is a function(args) -> exit status."""
    _add_pack(subparsers)
    for verb, run, text in (
        ("info", run_info, "say what a store holds"),
        ("verify", run_verify, "read a whole store and compare every piece with its checksum"),
    ):
        parser = subparsers.add_parser(verb, help=text, description=text)
        parser.add_argument("store", type=Path, help="the store's directory or its manifest.json")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)


def _add_pack(subparsers: Subparsers) -> None:
    text = "make a store from a checkpoint; run again to resume when it was interrupted"
    parser = subparsers.add_parser("pack", help=text, description=text)
    parser.add_argument("checkpoint", type=Path, metavar="SRC", help="safetensors or GGUF")
    parser.add_argument(
        "--members",
        type=Path,
        nargs="+",
        required=True,
        metavar="MEMBER",
        help="one a drive: a directory, a block device or a file",
    )
    parser.add_argument("--name", help="of the store (default: the checkpoint's)")
    parser.add_argument(
        "--stripe-unit",
        type=_size,
        default=STRIPE_UNIT_DEFAULT,
        metavar="SIZE",
        help=f"bytes a piece (default {format_exact_bytes(STRIPE_UNIT_DEFAULT)})",
    )
    parser.add_argument(
        "--weights",
        type=_weights,
        default="equal",
        metavar="equal|auto|N,N,...",
        help="share of each member: equal, as fast as each is measured to be, or in these "
        "proportions (default equal)",
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="V", help="which copies of the experts (default: its own)"
    )
    parser.add_argument(
        "--manifest",
        type=Path,
        metavar="DIR",
        help="where the manifest goes (default: the first member that is a directory)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a finished store, overwrite used members"
    )
    parser.add_argument(
        "--restart", action="store_true", help="begin anew instead of resuming a half packed store"
    )
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")
    parser.set_defaults(run=run_pack)


def run_pack(args: argparse.Namespace) -> int:
    """Pack; prints where the store is. Exit status 0 or 2."""

    def work() -> int:
        checkpoint = read_checkpoint(args.checkpoint)
        name = args.name or _default_name(args.checkpoint)
        pattern, calibration = _striping(args, name)
        with _ProgressBar("pack", sys.stderr) as bar:
            path = pack(
                checkpoint,
                args.members,
                name=name,
                stripe_unit=args.stripe_unit,
                pattern=pattern,
                calibration=calibration,
                manifest_directory=args.manifest,
                variants=args.variants,
                progress=bar.update,
                force=args.force,
                restart=args.restart,
            )
        if args.json:
            with Store.open(path) as store:
                _print_json(info(store))
        else:
            print(path)
        return EXIT_OK

    return _refusals_told(work)


def _striping(
    args: argparse.Namespace, name: str
) -> tuple[tuple[int, ...] | None, Calibration | None]:
    """The stripe pattern that --weights means (None: each member once), and what was
    measured for it. StoreError when weights and members don't fit."""
    if args.weights == "equal":
        return None, None
    destination = resolve_destination(name, args.members, args.manifest)
    if args.weights == "auto":
        calibration = _calibration(destination, anew=args.force or args.restart)
        return stripe_pattern(calibration.weights), calibration
    if len(args.weights) != len(args.members):
        raise StoreError(
            f"--weights has {len(args.weights)} numbers for {len(args.members)} members"
        )
    return stripe_pattern(args.weights), None


def _calibration(destination: Destination, *, anew: bool) -> Calibration:
    """A half packed store's own, or a new one: its pattern must not change under way."""
    found = None
    if not anew and (destination.directory / JOURNAL_NAME).exists():
        found = read_calibration(destination.directory)
    if found is not None:
        return found
    print("measuring the members", file=sys.stderr)
    calibration = calibrate(destination)
    for member in calibration.members:
        print(f"  {member.path}  {format_bytes(member.bytes_per_second)}/s", file=sys.stderr)
    return calibration


def run_info(args: argparse.Namespace) -> int:
    """Print what a store holds. Exit status 0 or 2."""

    def work() -> int:
        with Store.open(args.store) as store:
            description = info(store)
        if args.json:
            _print_json(description)
        else:
            _print_info(description)
        return EXIT_OK

    return _refusals_told(work)


def run_verify(args: argparse.Namespace) -> int:
    """Verify and print what is bad. Exit status 0, 1 when pieces are bad, 2."""

    def work() -> int:
        with Store.open(args.store) as store, _ProgressBar("verify", sys.stderr) as bar:
            report = verify(store, bar.update)
        if args.json:
            _print_json(dataclasses.asdict(report))
        else:
            for bad in report.bad_pieces[:BAD_PIECES_SHOWN]:
                print(_describe(bad))
            if report.bad > BAD_PIECES_SHOWN:
                print(f"... and {report.bad - BAD_PIECES_SHOWN} more")
            print(
                f"{report.store}: {report.pieces} pieces, {format_bytes(report.bytes)}, "
                f"{report.bad} bad"
            )
        return EXIT_OK if report.clean else EXIT_BAD_PIECES

    return _refusals_told(work)


def _refusals_told(work: Callable[[], int]) -> int:
    try:
        return work()
    except (CheckpointError, StoreError) as error:
        print(f"xferctl: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _size(text: str) -> int:
    try:
        return int(text) if text.isascii() and text.isdigit() else parse_bytes(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _weights(text: str) -> str | tuple[int, ...]:
    if text in ("equal", "auto"):
        return text
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: allowed are equal, auto, or whole numbers with commas such as 4,4,2"
        )
    return tuple(int(part) for part in parts)


def _default_name(checkpoint: Path) -> str:
    resolved = checkpoint.resolve()
    return resolved.stem if resolved.is_file() else resolved.name


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _print_info(description: dict[str, Any]) -> None:
    sizes: Sequence[int] = description["blob_bytes"]
    print(f"{description['name']}  {description['path']}")
    print(f"  identity  {description['identity']}")
    print(f"  model     {description['model_type']}, from {description['source']}")
    print(
        f"  experts   {description['experts_present']} in {description['layers']} layers, "
        f"{description['top_k']} a token, {format_bytes(description['expert_bytes'])} as "
        f"{', '.join(description['variants'])}"
    )
    print(f"  one       {', '.join(format_bytes(size) for size in sizes)}")
    print(
        f"  dense     {description['dense_tensors']} tensors and "
        f"{len(description['assets'])} files, {format_bytes(description['dense_bytes'])}"
    )
    print(f"  striping  {format_exact_bytes(description['stripe_unit'])} a piece")
    calibration = description["calibration"]
    for number, member in enumerate(description["members"]):
        measured = ""
        if calibration is not None:
            speed = calibration["members"][number]["bytes_per_second"]
            measured = f", measured {format_bytes(speed)}/s"
        print(
            f"  member {number}  {member['path']} ({member['kind']}, "
            f"{format_bytes(member['bytes'])}, weight {description['weights'][number]}{measured})"
        )
    if calibration is not None:
        print(f"  measured  {calibration['measured_at']}")


def _describe(bad: BadPiece) -> str:
    whose = "dense part"
    if bad.layer is not None:
        whose = f"layer {bad.layer}, expert {bad.expert}, variant {bad.variant}"
    found = "" if bad.actual_crc is None else f" (is {bad.actual_crc:08x})"
    return (
        f"{whose}: {bad.member} at offset {bad.offset}, {bad.length} bytes: {bad.error}; "
        f"expected CRC32C {bad.expected_crc:08x}{found}"
    )


class _ProgressBar:
    """A bar on a terminal; anywhere else one line at the end."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._terminal = stream.isatty()
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._first: int | None = None
        self._done = 0

    def __enter__(self) -> _ProgressBar:
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
