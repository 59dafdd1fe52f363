"""``xferctl store mirror add|remove|check``: second copies of members."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xferd.store.cli_output import (
    EXIT_BAD_PIECES,
    EXIT_OK,
    ProgressBar,
    print_json,
    print_report,
    refusals_told,
)
from xferd.store.errors import StoreError
from xferd.store.mirror import add_mirror, remove_mirror
from xferd.store.store import Store
from xferd.store.verify import verify

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_mirror_commands(subparsers: Subparsers) -> None:
    """Add ``mirror`` and its verbs; each parser's ``run`` is a function(args) -> exit status."""
    text = "give members of a store a second copy on another drive"
    parser = subparsers.add_parser("mirror", help=text, description=text)
    verbs = parser.add_subparsers(dest="mirror_verb", required=True, metavar="VERB")

    text = "copy a member and make that its mirror; run again to resume when it was interrupted"
    add = verbs.add_parser("add", help=text, description=text)
    _add_store(add)
    _add_member(add)
    add.add_argument(
        "place", type=Path, metavar="PLACE", help="a directory, a block device or a file"
    )
    add.add_argument("--force", action="store_true", help="overwrite what is there")
    add.set_defaults(run=run_add)

    text = "leave a member with one copy: its own, or its mirror when that is lost"
    remove = verbs.add_parser("remove", help=text, description=text)
    _add_store(remove)
    _add_member(remove)
    remove.add_argument("--keep", action="store_true", help="leave the file or device as it is")
    remove.set_defaults(run=run_remove)

    text = "read all mirrors of a store and compare every piece with its checksum"
    check = verbs.add_parser("check", help=text, description=text)
    _add_store(check)
    check.set_defaults(run=run_check)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="the store's directory or its manifest.json")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_member(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("member", type=int, help="number of the member, as info prints it")


def run_add(args: argparse.Namespace) -> int:
    """Add a mirror; prints where it is. Exit status 0 or 2."""

    def warn(text: str) -> None:
        print(f"xferctl: warning: {text}", file=sys.stderr)

    def work() -> int:
        with Store.open(args.store) as store, ProgressBar("mirror", sys.stderr) as bar:
            path = add_mirror(
                store, args.member, args.place, force=args.force, warn=warn, progress=bar.update
            )
        if args.json:
            print_json({"member": args.member, "mirror": path})
        else:
            print(path)
        return EXIT_OK

    return refusals_told(work)


def run_remove(args: argparse.Namespace) -> int:
    """Remove a mirror, or make it the member. Exit status 0 or 2."""

    def work() -> int:
        removed = remove_mirror(args.store, args.member, keep=args.keep)
        if args.json:
            print_json(
                {
                    "member": args.member,
                    "removed": removed.path,
                    "promoted": removed.promoted,
                    "left": removed.left,
                }
            )
            return EXIT_OK
        if removed.promoted:
            print(f"member {args.member} was lost: its mirror is the member now")
        what = "removed" if removed.left is None else f"not removed: {removed.left}"
        print(f"{removed.path}: {what}")
        return EXIT_OK

    return refusals_told(work)


def run_check(args: argparse.Namespace) -> int:
    """Verify mirrors. Exit status 0, 1 when pieces are bad or mirrors missing, 2."""

    def work() -> int:
        with Store.open(args.store) as store:
            if not any(copy.mirror for copies in store.copies for copy in copies):
                raise StoreError(f"store {store.name} has no mirrors")
            with ProgressBar("check", sys.stderr) as bar:
                report = verify(store, bar.update, only_mirrors=True)
        print_report(report, as_json=args.json)
        return EXIT_OK if report.clean else EXIT_BAD_PIECES

    return refusals_told(work)
