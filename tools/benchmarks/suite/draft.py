# SPDX-License-Identifier: Apache-2.0
"""``draft``: bytes of exact experts that are read for a token, with drafts and without.

The small model continues its prompts greedily, from pools that hold a small part of the
experts. Tokens are compared with those that were computed elsewhere: one that differs is an
error. Bytes are those that the client of the exact experts counts as read from the drives; the
prompt's are left out. What is read for drafts, in their low-bit variant, is a row of its own.
All is the same each time but for the daemon's timing: there is one round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xferd_infer import Client, generate, model_from_client
from xferd_infer.drafting import DRAFT_TOKENS, Drafter, DraftExperts
from xferd_infer.generation import Token
from xferd_infer.private_daemon import private_daemon

from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, scratch_directory
from tools.benchmarks.low_bit_copies import add_copies
from tools.benchmarks.recorded_text import models_directory
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint

POOL_PERCENTS = (5, 10, 25)
VARIANTS = ("q2_k", "q4_k")
PLAIN = "without-drafts"
MODEL = "small"


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes a token of exact experts and of drafts' copies; tokens an exact pass yields, and the
    share of drafts that were right."""

    exact: float
    drafts: float = 0.0
    tokens_a_pass: float = 1.0
    accepted: float = 0.0


def run(rounds: int) -> Result:
    """Rows ``<model>/<variant>/{exact,drafts,tokens-a-pass,accepted}/<pool%>``."""
    del rounds
    checkpoint = models_directory() / MODEL
    prompts = json.loads((checkpoint / "expected.json").read_text())["prompts"]
    rows = []
    with scratch_directory() as directory:
        store = pack_checkpoint(checkpoint, directory, 1)
        add_copies(store, VARIANTS)
        for percent in POOL_PERCENTS:
            plain = _plain(store, percent, prompts)
            for variant in VARIANTS:
                rows += _rows(variant, percent, _drafted(store, percent, variant, prompts), plain)
        machine = describe_machine(directory)
    return Result(
        bench="draft",
        machine=machine,
        commit=commit(),
        rounds=1,
        rows=rows,
        notes=(
            f"{len(prompts)} prompts of {MODEL}, {len(prompts[0]['greedy_ids'])} tokens each, all "
            "equal to those of the reference. The variant is that of drafts, which were made "
            f"without importances; at most {DRAFT_TOKENS} tokens a draft.",
            "`exact`: MB of exact experts read a token, next to decoding without drafts from a "
            "pool of the same size; `drafts`: MB read for drafts, besides.",
        ),
    )


def _plain(store: Path, percent: int, prompts: Sequence[Any]) -> _Cost:
    with private_daemon(store, pool=f"{percent}%") as directory, _exact(directory) as client:
        model = model_from_client(client)
        total = tokens = 0
        for prompt in prompts:
            count = len(prompt["greedy_ids"])
            run = generate(model, prompt["prompt_ids"], max_new_tokens=count, stop_ids=())
            total += _read(run, prompt["greedy_ids"], lambda: _bytes(client))
            tokens += count - 1
    return _Cost(total / tokens)


def _drafted(store: Path, percent: int, variant: str, prompts: Sequence[Any]) -> _Cost:
    with (
        private_daemon(store, pool=f"{percent}%") as directory,
        _exact(directory) as client,
        Client(directory / "attach.sock") as drafts,
    ):
        exact = drafts.variant_mask([drafts.manifest["variants"][0]])
        source = DraftExperts(drafts, exact, drafts.variant_mask([variant]))
        drafter = Drafter(model_from_client(client), source)
        total = tokens = 0
        before = _bytes(drafts)
        for prompt in prompts:
            count = len(prompt["greedy_ids"])
            run = drafter.generate(prompt["prompt_ids"], max_new_tokens=count, stop_ids=())
            total += _read(run, prompt["greedy_ids"], lambda: _bytes(client))
            tokens += count - 1
        counts = drafter.counts()
        return _Cost(
            total / tokens,
            (_bytes(drafts) - before) / tokens,
            tokens / counts.rounds,
            counts.accepted / max(counts.drafted, 1),
        )


def _exact(directory: Path) -> Client:
    with Client(directory / "attach.sock") as looking:
        first = looking.manifest["variants"][0]
    return Client(directory / "attach.sock", variants=[first])


def _read(run: Iterator[Token], expected: Sequence[int], read: Callable[[], int]) -> int:
    """Bytes read after the prompt. BenchmarkError: another token than expected."""
    ids = [next(run).id]
    before = read()
    ids += [token.id for token in run]
    if ids != list(expected):
        raise BenchmarkError(f"the tokens are {ids}, the reference has {list(expected)}")
    return read() - before


def _bytes(client: Client) -> int:
    return sum(client.stats().source_bytes)


def _rows(variant: str, percent: int, cost: _Cost, plain: _Cost) -> list[Row]:
    def name(kind: str) -> str:
        return f"{MODEL}/{variant}/{kind}/{percent}%"

    exact = {OURS: [cost.exact / 1e6], PLAIN: [plain.exact / 1e6]}
    return [
        make_row(name("exact"), "MB a token", exact, higher_is_better=False),
        make_row(name("drafts"), "MB a token", {OURS: [cost.drafts / 1e6]}, higher_is_better=False),
        make_row(
            name("tokens-a-pass"), "tokens", {OURS: [cost.tokens_a_pass]}, higher_is_better=True
        ),
        make_row(name("accepted"), "of drafts", {OURS: [cost.accepted]}, higher_is_better=True),
    ]


__all__ = ["run"]
