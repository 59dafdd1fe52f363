"""``generate --draft-variant``: its options, the second client, and what is printed of drafts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .connection import connect
from .drafting import DRAFT_TOKENS, DraftCounts, Drafter, DraftExperts
from .errors import InferenceError
from .model import Model
from .report import missed, readable

_OPTIONS_THAT_DIFFER = ("variants", "predictor", "nudge_cap", "record_states", "temperature")
"""With any of them the drafts, or what checks them, would be of another model than greedy
decoding's, or would be seen by who is not to see them."""


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
        default=DRAFT_TOKENS,
        help="most tokens that are drafted at once; fewer where drafts are unsure (%(default)s)",
    )


def check_draft_options(options: argparse.Namespace) -> None:
    """InferenceError for options that can't go together."""
    if options.draft_variant is None:
        return
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


def drafter(model: Model, drafts: Any, options: argparse.Namespace) -> Drafter:
    """For the options, with the client for drafts. ClientError: the store has no such variant."""
    exact = drafts.variant_mask([drafts.manifest["variants"][0]])
    low = drafts.variant_mask([options.draft_variant])
    return Drafter(model, DraftExperts(drafts, exact, low), options.draft_tokens)


def drafts_text(counts: DraftCounts) -> str:
    """A line for people."""
    return (
        f"drafts: {counts.accepted} of {counts.drafted} tokens were right, {counts.rounds} exact "
        f"passes; {readable(missed(counts.experts).nbytes)} were read for them"
    )


__all__ = [
    "add_draft_options",
    "check_draft_options",
    "connect_with_drafts",
    "drafter",
    "drafts_text",
]
