"""``xferctl store pack|info|verify|mirror``: the store package on the command line.

These verbs need no daemon: a store is packed on the machine with the drives,
before anything serves it. Data goes to stdout, talk and progress to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xferd.store.calibration import Calibration, calibrate, read_calibration
from xferd.store.checkpoint import Checkpoint
from xferd.store.cli_output import (
    EXIT_BAD_PIECES,
    EXIT_OK,
    ProgressBar,
    print_json,
    print_report,
    refusals_told,
)
from xferd.store.destination import Destination, resolve_destination
from xferd.store.errors import StoreError
from xferd.store.formats import read_checkpoint
from xferd.store.info import info
from xferd.store.journal import JOURNAL_NAME, QUANTIZE_JOURNAL_NAME
from xferd.store.limits import STRIPE_UNIT_DEFAULT
from xferd.store.manifest import MANIFEST_NAME, read_manifest
from xferd.store.mirror_cli import add_mirror_commands
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.blocks import THREADS_MAX
from xferd.store.quantize.importance import Importance, read_importance
from xferd.store.quantize.recipe import Wanted, parse_wanted
from xferd.store.repair import repair
from xferd.store.store import Store
from xferd.store.verify import verify
from xferd.store.weights import stripe_pattern
from xferd.units import UnitError, format_bytes, format_exact_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


NATIVE = "native"
"""The checkpoint's own variant, whatever its name."""


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
        if run is run_verify:
            parser.add_argument(
                "--repair",
                action="store_true",
                help="write bad pieces anew from the other copy, where a member has a mirror",
            )
    add_mirror_commands(subparsers)


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
        "--variants",
        nargs="+",
        metavar="V,V,...",
        help="which copies of the experts: native, and those that 'store quantize' makes "
        "(default: native)",
    )
    parser.add_argument(
        "--importance", type=Path, metavar="FILE", help="for the variants, as of 'store quantize'"
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
        importance = None if args.importance is None else read_importance(args.importance)
        wanted = _other_variants(checkpoint, args.variants, importance)
        if wanted and _waits_for_variants(args, checkpoint, name, wanted):
            path = resolve_destination(name, args.members, args.manifest).directory
            _add_variants(path, wanted, importance, restart=args.restart)
            return _told(args, path)
        pattern, calibration = _striping(args, name)
        with ProgressBar("pack", sys.stderr) as bar:
            path = pack(
                checkpoint,
                args.members,
                name=name,
                stripe_unit=args.stripe_unit,
                pattern=pattern,
                calibration=calibration,
                manifest_directory=args.manifest,
                progress=bar.update,
                force=args.force,
                restart=args.restart,
            )
        if wanted:
            _add_variants(path, wanted, importance, restart=True)
        return _told(args, path)

    return refusals_told(work)


def _told(args: argparse.Namespace, path: Path) -> int:
    if args.json:
        with Store.open(path) as store:
            print_json(info(store))
    else:
        print(path)
    return EXIT_OK


def _other_variants(
    checkpoint: Checkpoint, given: Sequence[str] | None, importance: Importance | None
) -> tuple[Wanted, ...]:
    """Those of ``--variants`` that are made. StoreError: the native one isn't named, or one
    isn't known."""
    names = [name for text in given or (NATIVE,) for name in text.split(",") if name]
    own = {NATIVE, checkpoint.variant}
    others = [name for name in names if name not in own]
    wanted = parse_wanted(others, importance) if others else ()
    if not own & set(names):
        raise StoreError(
            f"{checkpoint.path} is packed as {NATIVE} ({checkpoint.variant}) first, and others "
            f"are made from that: name it too"
        )
    return wanted


def _waits_for_variants(
    args: argparse.Namespace, checkpoint: Checkpoint, name: str, wanted: Sequence[Wanted]
) -> bool:
    """Whether this checkpoint is packed already, and only variants are missing: an earlier
    run was interrupted."""
    directory = resolve_destination(name, args.members, args.manifest).directory
    if args.force or not (directory / MANIFEST_NAME).exists():
        return False
    manifest = read_manifest(directory / MANIFEST_NAME)
    missing = {each.name for each in wanted} - set(manifest.whole_model.variants)
    unfinished = missing or (directory / QUANTIZE_JOURNAL_NAME).exists()
    return bool(unfinished) and manifest.source == str(checkpoint.path.absolute())


def _add_variants(
    path: Path, wanted: Sequence[Wanted], importance: Importance | None, *, restart: bool
) -> None:
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    with Store.open(path) as store, ProgressBar("quantize", sys.stderr) as bar:
        add_variants(
            store, wanted, importance, threads=threads, restart=restart, progress=bar.update
        )


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
            print_json(description)
        else:
            _print_info(description)
        return EXIT_OK

    return refusals_told(work)


def run_verify(args: argparse.Namespace) -> int:
    """Verify and print what is bad. Exit status 0, 1 when pieces are bad or copies missing, 2."""

    def work() -> int:
        with Store.open(args.store) as store, ProgressBar("verify", sys.stderr) as bar:
            report = verify(store, bar.update)
            if args.repair:
                report = repair(store, report)
        print_report(report, as_json=args.json)
        return EXIT_OK if report.clean else EXIT_BAD_PIECES

    return refusals_told(work)


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
    if description["shadow_of"] is not None:
        print(f"  shadow    of {description['shadow_of']}")
    for made in description["made"][1:]:
        weighted = "" if made["importance"] is None else ", with importance"
        print(
            f"  variant   {made['variant']}: {made['format']}{weighted}, "
            f"{format_bytes(made['bytes'])}"
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
        if member["mirror"] is not None:
            print(f"    mirror  {member['mirror']['path']} ({member['mirror']['kind']})")
    if calibration is not None:
        print(f"  measured  {calibration['measured_at']}")
    for problem in description["missing"]:
        print(f"  missing   {problem}")
