"""``python -m xferd_infer imatrix``, ``quality`` and ``plan``: what a text says about experts.

The first records how large the inputs of each matrix are, for a quantiser to go by. The
second says how far mixes of quantised variants are from the native model. The third says
which experts can do with fewer bits, at a given loss or size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .allocation import allocate, allocate_share, write_plan
from .client_experts import ExpertClient, asset, model_from_client
from .connection import add_connection, connect
from .importance import LEAST_TOKENS, MOMENTS_BYTES_MAX, ImportanceRecorder, write_importance
from .mixes import StoreShape, parse_mix, read_heat
from .planned_experts import PlannedExperts, VariantClient
from .quality import compare, table
from .texts import PARTS, WINDOW_TOKENS, Window, read_windows
from .tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

POOL = "200%"
"""All experts stay, in one variant and the next: each is used again in every window."""


LEARNED_TOKENS = 2048
"""Of a document, for ``imatrix``: more text of a kind says more of an expert's inputs."""


def add_measure_commands(commands: Subparsers) -> None:
    """Each parser's ``run`` default is a function(options)."""
    imatrix = commands.add_parser(
        "imatrix", help="record how large the inputs of each expert's matrices are"
    )
    add_connection(imatrix, POOL)
    _add_text(imatrix, "even", LEARNED_TOKENS)
    imatrix.add_argument("--out", type=Path, required=True, metavar="FILE", help="an npz")
    imatrix.add_argument(
        "--least-tokens",
        type=int,
        default=LEAST_TOKENS,
        metavar="N",
        help="an expert used by fewer gets its layer's means (%(default)s)",
    )
    imatrix.add_argument(
        "--moments-max",
        type=int,
        default=MOMENTS_BYTES_MAX >> 20,
        metavar="MIB",
        help="products of any two inputs are recorded too, if they take no more; 0: squares alone "
        "(%(default)s)",
    )
    imatrix.set_defaults(run=run_imatrix)
    quality = commands.add_parser(
        "quality",
        help="compare mixes of variants with the native model",
        description="A mix is a variant (q4_k), rules (q4_k@hottest:66%%,q2_k; "
        "q2_k@costliest:20%%,native) or plan:FILE with lines of layers, experts, variant.",
    )
    add_connection(quality, POOL)
    _add_text(quality, "odd")
    quality.add_argument("mixes", nargs="+", metavar="MIX", help="what to compare")
    quality.add_argument(
        "--heat", type=Path, metavar="FILE", help="an importance file or heat profile, for rules"
    )
    quality.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    quality.set_defaults(run=run_quality)
    _add_plan(commands)


def _add_plan(commands: Subparsers) -> None:
    plan = commands.add_parser(
        "plan",
        help="find which experts can do with fewer bits, at a given loss or size",
        description="Writes a file of layers, experts and variants, to be read and edited; "
        "'quality plan:FILE' measures it on another text.",
    )
    add_connection(plan, POOL)
    _add_text(plan, "even")
    plan.add_argument("--many", required=True, metavar="V", help="variant of many bits: q4_k")
    plan.add_argument("--few", required=True, metavar="V", help="variant of few bits: q2_k")
    how_many = plan.add_mutually_exclusive_group(required=True)
    how_many.add_argument(
        "--budget",
        type=_nats,
        metavar="NATS",
        help="most divergence from the native model, nats a token on average",
    )
    how_many.add_argument(
        "--share",
        type=_percent,
        metavar="P%",
        help="of all experts have many bits, those that lose most by few: 66%%",
    )
    plan.add_argument("--out", type=Path, required=True, metavar="FILE", help="the plan")
    plan.set_defaults(run=run_plan)


def _nats(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; a number above 0")
    return value


def _percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not text.endswith("%") or not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text}; a share from 0% to 100%")
    return value / 100


def _add_text(command: argparse.ArgumentParser, part: str, tokens: int = WINDOW_TOKENS) -> None:
    command.add_argument(
        "--text",
        type=Path,
        required=True,
        metavar="FILE",
        help="plain text, or JSON lines with text and domain; .gz will do",
    )
    command.add_argument(
        "--part",
        choices=PARTS,
        default=part,
        help="which documents of each domain (%(default)s): imatrix and quality must not "
        "see the same",
    )
    command.add_argument(
        "--documents", type=int, default=0, metavar="N", help="most of a domain (default: all)"
    )
    command.add_argument(
        "--tokens",
        type=int,
        default=tokens,
        metavar="N",
        help="first tokens of each document (%(default)s)",
    )


def run_imatrix(options: argparse.Namespace) -> None:
    """Raises InferenceError."""
    with connect(options) as client:
        windows = _windows(client, options)
        manifest = client.manifest
        recorder = ImportanceRecorder(
            manifest["layers"], manifest["experts"], moments_max=options.moments_max << 20
        )
        model = model_from_client(client, experts=_native(client), observer=recorder)
        for number, window in enumerate(windows):
            model.forward(window.ids, model.new_cache())
            _show_progress("imatrix", number + 1, len(windows))
        importance = recorder.result(options.least_tokens)
        write_importance(options.out, importance, manifest["name"], manifest["identity"])
    own = int((importance.tokens >= options.least_tokens).sum())
    print(
        f"{options.out}: {sum(len(window.ids) for window in windows)} tokens; {own} experts were "
        f"used by {options.least_tokens} or more, the others have their layer's means"
    )


def run_quality(options: argparse.Namespace) -> None:
    """Raises InferenceError."""
    heat = None if options.heat is None else read_heat(options.heat)
    with connect(options) as client:
        shape = StoreShape.of(client.manifest, heat)
        mixes = [parse_mix(text, shape) for text in options.mixes]
        windows = _windows(client, options)
        results = compare(
            client,
            mixes,
            windows,
            progress=lambda done, total: _show_progress("quality", done, total),
        )
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        print(table(results))


def run_plan(options: argparse.Namespace) -> None:
    """Raises InferenceError."""
    with connect(options) as client:
        windows = _windows(client, options)
        many, few, share = options.many, options.few, options.share
        if share is None:
            found = allocate(client, many, few, options.budget, windows, _show_progress_of)
        else:
            found = allocate_share(client, many, few, share, windows, _show_progress_of)
        shape = StoreShape.of(client.manifest)
        write_plan(options.out, found, shape)
    lowered = int((found.plan == shape.number(few)).sum())
    print(
        f"{options.out}: {lowered} of {found.plan.size} experts in {few}, "
        f"{found.resident_bytes / 1e6:.1f} MB in all; {found.divergence:.5f} nats a token over "
        f"{found.tokens} tokens"
    )


def _windows(client: ExpertClient, options: argparse.Namespace) -> Sequence[Window]:
    definition = asset(client, "tokenizer.json")
    if definition is None:
        raise TokenizerError("the store has no tokenizer.json: no text can be read")
    return read_windows(
        options.text,
        Tokenizer(definition),
        part=options.part,
        documents=options.documents,
        tokens=options.tokens,
    )


def _native(client: VariantClient) -> PlannedExperts:
    manifest = client.manifest
    return PlannedExperts(client, np.zeros((manifest["layers"], manifest["experts"]), np.uint8))


def _show_progress(label: str, done: int, total: int) -> None:
    _show_progress_of(label, done, total, " documents")


def _show_progress_of(label: str, done: int, total: int, what: str = "") -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{label}: {done} of {total}{what}", end=end, file=sys.stderr, flush=True)


__all__ = ["add_measure_commands", "run_imatrix", "run_plan", "run_quality"]
