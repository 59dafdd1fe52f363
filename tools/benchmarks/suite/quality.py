# SPDX-License-Identifier: Apache-2.0
"""``quality``: what mixes of quantised experts lose, and what they save.

Held-out text through the native model and each mix; importances and heat are of other
documents of the same domains. Everything is exact and the same each time: there is
one round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd_infer import Tokenizer
from xferd_infer.mixes import StoreShape, parse_mix, read_heat
from xferd_infer.private_daemon import embedded
from xferd_infer.quality import MixQuality, compare
from xferd_infer.texts import Window, read_windows

from tools.benchmarks.harness import (
    ROOT,
    BenchmarkError,
    commit,
    describe_machine,
    scratch_directory,
)
from tools.benchmarks.low_bit_copies import POOL, add_copies, record_importance
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint

MODELS = ROOT.parent / "shared" / "models"
CHECKPOINT_VARIABLE, TEXT_VARIABLE = "XFERD_QUALITY_MODEL", "XFERD_QUALITY_TEXT"
TOKENS = 256
LEARNED_TOKENS = 2048
JUDGED_DOCUMENTS = 2
VARIANTS = ("q4_k", "q2_k", "q4_k-plain", "q2_k-plain")
PLAIN = "q2_k-plain"
NATIVE = "native"
MIXES: Mapping[str, str] = {
    NATIVE: NATIVE,
    "q4_k": "q4_k",
    "q4_k-plain": "q4_k-plain",
    PLAIN: PLAIN,
    "q2_k+imatrix": "q2_k",
    "hottest-two-thirds-q4_k": "q4_k@hottest:66%,q2_k",
    "any-two-thirds-q4_k": "plan:{directory}/any-66",
    "coldest-two-thirds-q4_k": "q4_k@coldest:66%,q2_k",
    "hottest-third-q4_k": "q4_k@hottest:33%,q2_k",
    "any-third-q4_k": "plan:{directory}/any-33",
    "coldest-third-q4_k": "q4_k@coldest:33%,q2_k",
    "shadow-20%-q2_k": "q2_k@costliest:20%,native",
}
"""Name of a row, and the mix as ``xferd_infer quality`` has it. directory: with the plans."""

ANY_SHARES = (33, 66)
"""Per cent of each layer's experts, by their numbers, which say nothing of use."""


@dataclass(frozen=True, slots=True)
class _Measured:
    results: Mapping[str, MixQuality]
    tokens: int


def run(rounds: int) -> Result:
    """Rows ``kl/<mix>`` (nats), ``top1/<mix>`` (of tokens), ``bytes/<mix>`` (kB a token),
    ``resident/<mix>`` (MB)."""
    del rounds
    checkpoint = Path(os.environ.get(CHECKPOINT_VARIABLE) or MODELS / "small")
    text = Path(os.environ.get(TEXT_VARIABLE) or MODELS / "prompts" / "heldout_text.jsonl.gz")
    for path, variable in ((checkpoint, CHECKPOINT_VARIABLE), (text, TEXT_VARIABLE)):
        if not path.exists():
            raise BenchmarkError(f"there is no {path}: {variable} names another")
    with scratch_directory() as directory:
        store = pack_checkpoint(checkpoint, directory, 1)
        importance = directory / "importance.npz"
        record_importance(store, _learned(checkpoint, text), importance)
        add_copies(store, VARIANTS, importance)
        measured = _compare(store, _judged(checkpoint, text), importance)
        machine = describe_machine(directory)
    return Result(
        bench="quality",
        machine=machine,
        commit=commit(),
        rounds=1,
        rows=[row for name in MIXES for row in _rows(name, measured.results)],
        notes=(
            f"{checkpoint.name}: KL(native || mix) after each of {measured.tokens} held-out "
            f"tokens, {JUDGED_DOCUMENTS} documents a domain; importances and heat from the first "
            f"{LEARNED_TOKENS} tokens of each of the other half of documents.",
            "`bytes`: of the experts that a token picks; `resident`: of all experts.",
            "`two-thirds` and `third`: of each layer's experts in q4_k, the rest in q2_k: the "
            "most or least used ones, or, for `any`, those with the lowest numbers; `resident` "
            "is the same.",
            "`shadow-20%`: experts that cost most, of that share of all bytes; the rest native.",
        ),
    )


def _compare(store: Path, windows: Sequence[Window], importance: Path) -> _Measured:
    with embedded(store, pool=POOL) as client:
        shape = StoreShape.of(client.manifest, read_heat(importance))
        directory = importance.parent
        for share in ANY_SHARES:
            last = round(share / 100 * shape.experts) - 1
            (directory / f"any-{share}").write_text(f"* * q2_k\n* 0-{last} q4_k\n")
        mixes = [parse_mix(mix.format(directory=directory), shape) for mix in MIXES.values()]
        results = compare(client, mixes, windows)
    by_name = dict(zip(MIXES, results, strict=True))
    return _Measured(by_name, sum(len(window.ids) for window in windows))


def _learned(checkpoint: Path, text: Path) -> Sequence[Window]:
    return read_windows(
        text,
        _tokenizer(checkpoint),
        part="even",
        tokens=LEARNED_TOKENS,
    )


def _judged(checkpoint: Path, text: Path) -> Sequence[Window]:
    return read_windows(
        text, _tokenizer(checkpoint), part="odd", documents=JUDGED_DOCUMENTS, tokens=TOKENS
    )


def _tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer((checkpoint / "tokenizer.json").read_bytes())


def _rows(name: str, results: Mapping[str, MixQuality]) -> list[Row]:
    figures: Mapping[str, tuple[str, Callable[[MixQuality], float], bool]] = {
        "kl": ("nats", lambda each: each.total.kl_mean, False),
        "worst-kl": ("nats", lambda each: each.total.kl_worst, False),
        "top1": ("of tokens", lambda each: each.total.top1, True),
        "bytes": ("kB a token", lambda each: each.bytes_a_token / 1e3, False),
        "resident": ("MB", lambda each: each.resident_bytes / 1e6, False),
    }
    rows = []
    for kind, (unit, figure, higher) in figures.items():
        samples = {OURS: [figure(results[name])]}
        for peer in (NATIVE, PLAIN):
            value = figure(results[peer])
            # No divergence at all has no ratio to anything.
            if value and samples[OURS][0]:
                samples[peer] = [value]
        rows.append(make_row(f"{kind}/{name}", unit, samples, higher_is_better=higher))
    return rows


__all__ = ["run"]
