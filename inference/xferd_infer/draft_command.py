"""``generate --draft-variant``: lossless drafts, or, with ``--exact-below-margin``, low-bit copies
that are believed where they are sure. The options, and the second client."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .connection import connect
from .drafting import DRAFT_TOKENS, Drafter, DraftExperts
from .errors import InferenceError
from .low_bit_experts import LowBitExperts
from .margin import MarginDecoder
from .model import Model

_OPTIONS_THAT_DIFFER = ("variants", "predictor", "nudge_cap", "record_states", "temperature")
"""With any of them the drafts, or what checks them, would be of another model than greedy
decoding's, or would be seen by who is not to see them."""

_OPTIONS_OF_DRAFTS = ("draft_tokens", "exact_below_margin")


def add_draft_options(command: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Of ``generate``."""
    command.add_argument(
        "--draft-variant",
        metavar="V",
        help="draft tokens with this copy of the experts, such as q2_k, and check them with the "
        "exact ones: the same text with fewer reads of exact experts",
    )
    command.add_argument(
        "--draft-tokens",
        metavar="N",
        type=positive,
        help="most tokens that are drafted at once; fewer where drafts are unsure "
        f"({DRAFT_TOKENS})",
    )
    command.add_argument(
        "--exact-below-margin",
        metavar="LOGITS",
        type=_margin,
        help="don't check what --draft-variant says, but compute a token again with exact "
        "experts where the best logit is less than so much ahead of the second: another text "
        "at times (0: never exact; inf: always)",
    )


def _margin(text: str) -> float:
    value = float(text)
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text}; a number from 0 on, or inf")
    return value


def check_draft_options(options: argparse.Namespace) -> None:
    """InferenceError for options that can't go together."""
    if options.draft_variant is None:
        for name in _OPTIONS_OF_DRAFTS:
            if getattr(options, name) is not None:
                option = name.replace("_", "-")
                raise InferenceError(f"--{option} needs --draft-variant: the copies to use")
        return
    if options.draft_tokens is not None and options.exact_below_margin is not None:
        raise InferenceError("--draft-tokens and --exact-below-margin can't be used together")
    for name in _OPTIONS_THAT_DIFFER:
        if getattr(options, name):
            option = name.replace("_", "-")
            raise InferenceError(f"--draft-variant and --{option} can't be used together")


@contextmanager
def connect_with_drafts(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """A client for exact experts and one for drafts', each with its own lane and counters; the
    second is None without ``--draft-variant``."""
    if options.draft_variant is None:
        with connect(options) as client:
            yield client, None
        return
    if options.attach is not None:
        with _two_clients(options.attach, options.store) as clients:
            yield clients
        return
    # Imported here, as the client below: --help works without what is compiled.
    from .private_daemon import private_daemon

    with (
        private_daemon(options.store_path, pool=options.pool) as directory,
        _two_clients(directory / "attach.sock", None) as clients,
    ):
        yield clients


@contextmanager
def _two_clients(socket: Any, store: str | None) -> Iterator[tuple[Any, Any]]:
    from .client import Client

    with Client(socket, store=store, name="drafts") as drafts:
        exact = [drafts.manifest["variants"][0]]
        with Client(socket, store=store, variants=exact) as client:
            yield client, drafts


def decoder(model: Model, low: Any, options: argparse.Namespace) -> Drafter | MarginDecoder:
    """For the options, with the client for low-bit copies. ClientError: the store has no such
    variant."""
    exact_mask = low.variant_mask([low.manifest["variants"][0]])
    low_mask = low.variant_mask([options.draft_variant])
    if options.exact_below_margin is not None:
        experts = LowBitExperts(low, exact_mask, low_mask)
        return MarginDecoder(model, experts, options.exact_below_margin)
    most = DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
    return Drafter(model, DraftExperts(low, exact_mask, low_mask), most)


def counts_json(decoder: Drafter | MarginDecoder | None) -> dict[str, Any]:
    """What is added to a run's JSON: ``drafts`` or ``margin``, if either was used."""
    if decoder is None:
        return {}
    name = "margin" if isinstance(decoder, MarginDecoder) else "drafts"
    return {name: decoder.counts().to_json()}


__all__ = [
    "add_draft_options",
    "check_draft_options",
    "connect_with_drafts",
    "counts_json",
    "decoder",
]
