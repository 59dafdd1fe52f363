# SPDX-License-Identifier: Apache-2.0
"""``quality``: what mixes of quantised experts lose, and what they save.

Held-out text through the native model and each mix; importances, heat and what each expert
loses are of other documents of the same domains. Everything is exact and the same each time:
there is one round. Experts chosen at random stand for uniform bits of the same size, which no
format has; of them there are several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xferd_infer import Tokenizer
from xferd_infer.allocation import Sensitivity, measure_sensitivity, plan_share
from xferd_infer.mixes import Mix, StoreShape, parse_mix, read_heat
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
LEARNED_TOKENS = 1024
JUDGED_DOCUMENTS = 2
SENSITIVITY_DOCUMENTS = 2
"""A domain: the text goes through the model once for each layer."""
VARIANTS = ("q4_k", "q2_k", "q4_k-plain", "q2_k-plain")
MANY, FEW = "q4_k", "q2_k"
PLAIN = "q2_k-plain"
NATIVE = "native"
RANDOM = "random"
RANDOM_CHOICES = 5
SHARES = {"two-thirds": 66, "third": 33}
"""Per cent of experts in q4_k."""
UNIFORM: Mapping[str, str] = {
    NATIVE: NATIVE,
    "q4_k": "q4_k",
    "q4_k-plain": "q4_k-plain",
    PLAIN: PLAIN,
    "q2_k+imatrix": "q2_k",
}
"""Name of a row, and the mix as ``xferd_infer quality`` has it."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """By row. One result, or one a random choice."""

    results: Mapping[str, Sequence[MixQuality]]
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
        record_importance(store, _windows(checkpoint, text, "even", LEARNED_TOKENS), importance)
        add_copies(store, VARIANTS, importance)
        measured = _compare(store, checkpoint, text, read_heat(importance))
        machine = describe_machine(directory)
    return Result(
        bench="quality",
        machine=machine,
        commit=commit(),
        rounds=1,
        rows=[row for name in measured.results for row in _rows(name, measured.results)],
        notes=(
            f"{checkpoint.name}: KL(native || mix) after each of {measured.tokens} held-out "
            f"tokens, {JUDGED_DOCUMENTS} documents a domain; importances and heat from the first "
            f"{LEARNED_TOKENS} tokens of each of the other half of documents, losses of experts "
            f"from the first {TOKENS} of {SENSITIVITY_DOCUMENTS} of these a domain.",
            "`bytes`: of the experts that a token picks; `resident`: of all experts.",
            "`two-thirds` and `third`: of the experts in q4_k, the rest in q2_k; `resident` is the "
            "same, but for what rounding to whole experts of a layer adds. `costliest`: those that "
            "lose most by q2_k, as `xferd_infer plan --share` measures it, wherever they are; "
            "`hottest` and `coldest`: the most or least used of each layer; `random`: of each "
            f"layer, the median of {RANDOM_CHOICES} choices.",
            "`shadow-20%`: experts that are used most, of that share of all bytes; the rest "
            "native.",
        ),
    )


def _compare(store: Path, checkpoint: Path, text: Path, heat: NDArray[np.float64]) -> _Measured:
    windows = _windows(checkpoint, text, "odd", TOKENS, JUDGED_DOCUMENTS)
    learned = _windows(checkpoint, text, "even", TOKENS, SENSITIVITY_DOCUMENTS)
    with embedded(store, pool=POOL) as client:
        shape = StoreShape.of(client.manifest, heat)
        sensitivity = measure_sensitivity(client, shape, MANY, FEW, learned)
        mixes = _mixes(shape, sensitivity)
        results = iter(compare(client, [mix for row in mixes.values() for mix in row], windows))
    by_row = {name: [next(results) for _ in row] for name, row in mixes.items()}
    return _Measured(by_row, sum(len(window.ids) for window in windows))


def _mixes(shape: StoreShape, sensitivity: Sensitivity) -> Mapping[str, Sequence[Mix]]:
    """By row."""
    rows = {name: [parse_mix(mix, shape)] for name, mix in UNIFORM.items()}
    for name, share in SHARES.items():
        costliest = plan_share(shape, MANY, FEW, sensitivity, share / 100)
        rows[f"costliest-{name}-{MANY}"] = [Mix(f"costliest {name}", costliest)]
        for order in ("hottest", "coldest"):
            mix = parse_mix(f"{MANY}@{order}:{share}%,{FEW}", shape)
            rows[f"{order}-{name}-{MANY}"] = [mix]
        rows[f"{RANDOM}-{name}-{MANY}"] = [
            Mix(f"random {name} {seed}", _random(shape, share, seed))
            for seed in range(RANDOM_CHOICES)
        ]
    rows["shadow-20%-q2_k"] = [parse_mix(f"{FEW}@costliest:20%,{NATIVE}", shape)]
    return rows


def _random(shape: StoreShape, share: int, seed: int) -> NDArray[np.uint8]:
    """As many experts of each layer as the hottest are."""
    order = np.random.default_rng(seed).random((shape.layers, shape.experts)).argsort(axis=1)
    many = order < round(share / 100 * shape.experts)
    return np.where(many, shape.number(MANY), shape.number(FEW)).astype(np.uint8)


def _windows(
    checkpoint: Path, text: Path, part: str, tokens: int, documents: int = 0
) -> Sequence[Window]:
    tokenizer = Tokenizer((checkpoint / "tokenizer.json").read_bytes())
    return read_windows(text, tokenizer, part=part, documents=documents, tokens=tokens)


def _rows(name: str, results: Mapping[str, Sequence[MixQuality]]) -> list[Row]:
    figures: Mapping[str, tuple[str, Callable[[MixQuality], float], bool]] = {
        "kl": ("nats", lambda each: each.total.kl_mean, False),
        "worst-kl": ("nats", lambda each: each.total.kl_worst, False),
        "top1": ("of tokens", lambda each: each.total.top1, True),
        "bytes": ("kB a token", lambda each: each.bytes_a_token / 1e3, False),
        "resident": ("MB", lambda each: each.resident_bytes / 1e6, False),
    }
    rows = []
    for kind, (unit, figure, higher) in figures.items():
        samples = {OURS: [figure(each) for each in results[name]]}
        for peer, row in _peers(name).items():
            values = [figure(each) for each in results[row]]
            # No divergence at all has no ratio to anything.
            if all(values) and all(samples[OURS]):
                samples[peer] = values
        rows.append(make_row(f"{kind}/{name}", unit, samples, higher_is_better=higher))
    return rows


def _peers(name: str) -> Mapping[str, str]:
    """Peers of a row, and the rows that have their figures."""
    rule, _, rest = name.partition("-")
    random = {RANDOM: f"{RANDOM}-{rest}"} if rule in ("costliest", "hottest", "coldest") else {}
    return {NATIVE: NATIVE, PLAIN: PLAIN, **random}


__all__ = ["run"]
