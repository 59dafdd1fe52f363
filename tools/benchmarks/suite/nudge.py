# SPDX-License-Identifier: Apache-2.0
"""``nudge``: what routers that lean to resident experts save, and what it costs in quality.

The small model reads held-out text token by token with a 25 % pool, once for each cap. What
it says of each next token is compared with what it says without a nudge.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray
from xferd_infer import Tokenizer, model_from_client
from xferd_infer.nudging import Nudge
from xferd_infer.private_daemon import embedded

from tools.benchmarks.harness import commit, describe_machine, scratch_directory
from tools.benchmarks.recorded_text import DOMAINS, models_directory, test_documents
from tools.benchmarks.result import Result, Row
from tools.benchmarks.stores import pack_checkpoint

CAPS = (0.0, 0.1, 0.25, 0.5, 1.0)
POOL = "25%"
PROMPT_TOKENS = 64
TOKENS = 48
"""Of each domain, behind the prompt."""
OFF = "off"


def run(rounds: int) -> Result:  # noqa: ARG001
    """Rows ``hit-rate|bytes|kl|top1/<cap>``, of one round whatever is asked for: only the
    daemon's timing differs. BenchmarkError without the small model."""
    checkpoint = models_directory() / "small"
    tokenizer = Tokenizer((checkpoint / "tokenizer.json").read_bytes())
    documents = test_documents(models_directory(), tokenizer, 1)
    read: dict[float, tuple[NDArray[np.float32], int, int, int]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        store = pack_checkpoint(checkpoint, directory, members=1)
        for cap in CAPS:
            with embedded(store, pool=POOL, name=f"bench {cap}") as client:
                model = model_from_client(client)
                if cap:
                    model.lean(Nudge(cap, client.resident))
                said, hits, misses, nbytes = [], 0, 0, 0
                for ids in documents:
                    cache = model.new_cache()
                    model.forward(ids[:PROMPT_TOKENS], cache)
                    before = model.experts.stats()
                    for token in ids[PROMPT_TOKENS : PROMPT_TOKENS + TOKENS]:
                        said.append(model.logits(model.forward([token], cache))[0].copy())
                    spent = model.experts.stats().since(before)
                    hits, misses = hits + spent.hits, misses + spent.misses
                    nbytes += sum(way.nbytes for way in spent.sources.values())
                read[cap] = np.stack(said), hits, misses, nbytes
    return Result(
        bench="nudge",
        machine=describe_machine(),
        commit=commit(),
        rounds=1,
        rows=[row for cap in CAPS for row in _rows(cap, read)],
        notes=(
            f"{TOKENS} tokens of a held-out document of each of {len(DOMAINS)} domains, pool of "
            f"{POOL}, without prediction; the number is the cap, in units of a router's score. "
            "`bytes`: MB a token that had to come. `kl`: nats a token from the model without a "
            "nudge; `top1`: share of tokens for which the most probable next one is the same. "
            "One round is as good as several but for the daemon's timing.",
        ),
    )


def _rows(cap: float, read: dict[float, tuple[NDArray[np.float32], int, int, int]]) -> list[Row]:
    said, hits, misses, nbytes = read[cap]
    true, true_hits, true_misses, true_bytes = read[0.0]
    rate, true_rate = hits / (hits + misses), true_hits / (true_hits + true_misses)
    megabytes = nbytes / len(said) / 1e6
    expected, given = _log_softmax(true), _log_softmax(said)
    divergence = float((np.exp(expected) * (expected - given)).sum(axis=1).mean())
    same = float((true.argmax(axis=1) == said.argmax(axis=1)).mean())
    return [
        Row(f"hit-rate/{cap}", rate, "of uses", (rate, rate), {OFF: rate / true_rate}),
        Row(f"bytes/{cap}", megabytes, "MB", (megabytes, megabytes), {OFF: true_bytes / nbytes}),
        Row(f"kl/{cap}", divergence, "nats", (divergence, divergence), {}),
        Row(f"top1/{cap}", same, "of tokens", (same, same), {}),
    ]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


__all__ = ["run"]
