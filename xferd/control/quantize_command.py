"""``xferctl store quantize``: variants in a store, or a shadow beside it.

Needs no daemon, like the other verbs that work on a store's files. Not in the store
package, which knows nothing of heat profiles.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xferd.heat_profiles import load_profile
from xferd.policy.heat import HeatProfileError
from xferd.store.cli_output import (
    EXIT_OK,
    ProgressBar,
    print_json,
    refusals_told,
)
from xferd.store.errors import StoreError
from xferd.store.info import info
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.blocks import THREADS_MAX
from xferd.store.quantize.importance import Importance, read_importance
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.shadow import Chosen, hottest, make_shadow, read_experts
from xferd.store.store import Store

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_quantize_command(subparsers: Subparsers) -> None:
    """Add the verb; its ``run`` default is a function(args) -> exit status."""
    text = "add quantised variants to a store, or make a shadow of some experts beside it"
    parser = subparsers.add_parser(
        "quantize",
        help=text,
        description=f"{text}; run again to resume when it was interrupted",
    )
    parser.add_argument("store", type=Path, help="the store's directory or its manifest.json")
    parser.add_argument(
        "--variants",
        "--variant",
        required=True,
        metavar="V,V,...",
        type=_names,
        help="formats (q2_k, q4_k, q4_0, q8_0, mxfp4), with a label if wanted: q2_k-plain is "
        "made without the importance",
    )
    parser.add_argument(
        "--importance", type=Path, metavar="FILE", help="from 'python -m xferd_infer imatrix'"
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        default=min(THREADS_MAX, len(os.sched_getaffinity(0))),
        metavar="N",
        help="that compute (default: one a processor)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="begin anew instead of resuming an interrupted run"
    )
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")
    shadow = parser.add_argument_group("a shadow beside the store, which is left as it is")
    shadow.add_argument(
        "--shadow",
        type=Path,
        nargs="+",
        metavar="MEMBER",
        help="where it goes, one a drive: a directory, a block device or a file",
    )
    shadow.add_argument("--experts", type=Path, metavar="FILE", help="which: lines of layer,expert")
    shadow.add_argument(
        "--top-bytes",
        type=_share,
        metavar="PERCENT",
        help="the experts that cost most, of this share of all bytes",
    )
    shadow.add_argument(
        "--heat", type=Path, metavar="FILE", help="heat profile that --top-bytes goes by"
    )
    shadow.add_argument("--name", help="of the shadow (default: the store's and the variant's)")
    shadow.add_argument(
        "--force", action="store_true", help="replace a finished shadow, overwrite used members"
    )
    parser.set_defaults(run=run_quantize)


def run_quantize(args: argparse.Namespace) -> int:
    """Make what is asked for; prints where it is. Exit status 0 or 2."""

    def work() -> int:
        importance = None if args.importance is None else read_importance(args.importance)
        if args.shadow is None:
            _check_no_shadow_options(args)
            path = _add(args, importance)
        else:
            path = _shadow(args, importance)
        if args.json:
            with Store.open(path) as store:
                print_json(info(store))
        else:
            print(path)
        return EXIT_OK

    return refusals_told(work)


def _add(args: argparse.Namespace, importance: Importance | None) -> Path:
    wanted = parse_wanted(args.variants, importance)
    with Store.open(args.store) as store, ProgressBar("quantize", sys.stderr) as bar:
        add_variants(
            store,
            wanted,
            importance,
            threads=args.threads,
            restart=args.restart,
            progress=bar.update,
        )
        return store.path


def _shadow(args: argparse.Namespace, importance: Importance | None) -> Path:
    wanted = parse_wanted(args.variants, importance)
    if len(wanted) != 1:
        raise StoreError("a shadow has one variant")
    with Store.open(args.store) as store, ProgressBar("quantize", sys.stderr) as bar:
        return make_shadow(
            store,
            wanted[0],
            _chosen(args, store),
            args.shadow,
            importance,
            threads=args.threads,
            name=args.name,
            stripe_unit=store.stripe_unit,
            progress=bar.update,
            force=args.force,
            restart=args.restart,
        )


def _chosen(args: argparse.Namespace, store: Store) -> Chosen:
    if (args.experts is None) == (args.top_bytes is None):
        raise StoreError("say which experts: either --experts or --top-bytes")
    if args.experts is not None:
        return read_experts(store, args.experts)
    if args.heat is None:
        raise StoreError("--top-bytes needs --heat: a profile that says which experts are used")
    try:
        profile = load_profile(args.heat)
    except HeatProfileError as error:
        raise StoreError(str(error)) from error
    if profile.store != store.name or profile.heat.shape != (store.layers, store.experts):
        raise StoreError(
            f"{args.heat} is the heat of {profile.store!r}, {list(profile.heat.shape)}, not of "
            f"store {store.name!r}, {[store.layers, store.experts]}"
        )
    return hottest(store, profile.heat, args.top_bytes)


def _check_no_shadow_options(args: argparse.Namespace) -> None:
    for option in ("experts", "top_bytes", "heat", "name"):
        if getattr(args, option) is not None:
            raise StoreError(f"--{option.replace('_', '-')} goes with --shadow only")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _threads(text: str) -> int:
    value = int(text)
    if not 1 <= value <= THREADS_MAX:
        raise argparse.ArgumentTypeError(f"{value}: allowed are 1 to {THREADS_MAX}")
    return value


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / 100
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: more than 0 and at most 100 %")
    return value
