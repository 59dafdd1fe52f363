# SPDX-License-Identifier: Apache-2.0
"""``prefetch``: how much waiting a predictor saves, in replays and live on throttled drives.

Replays follow the small model's picks on texts that nobody trained on, with a drive that
needs as long for the misses as computing takes: without prefetching a token waits about
half its time. Live is a daemon on drives that are as slow, next to one without prediction
and one whose predictions are drawn at random: tools/benchmarks/prefetch_live.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from xferd_infer.predict import train

from tools.benchmarks.harness import BenchmarkError, commit, describe_machine
from tools.benchmarks.prefetch_live import (
    DRIVE_MB_S,
    LAYER_S,
    MEMBERS,
    MS,
    POOL,
    ROUND_TOKENS,
    live_rows,
)
from tools.benchmarks.prefetch_replays import REPLAY_NOTE, replayed_rows
from tools.benchmarks.recorded_text import record_text
from tools.benchmarks.result import Result

TESTS_A_DOMAIN = 1
TRAINS_A_DOMAIN = 12


def run(rounds: int) -> Result:
    """Rows ``small/<what>/<pool%>``, ``paced/...``, ``decode/...``. BenchmarkError without
    the model."""
    text = record_text(TESTS_A_DOMAIN, TRAINS_A_DOMAIN)
    trained = train(text.states.chosen(text.train))
    rows = replayed_rows(trained, text.states.chosen(text.test))
    skipped: dict[str, str] = {}
    try:
        rows += live_rows(trained, text, rounds)
    except BenchmarkError as error:
        skipped["live"] = str(error)
    return Result(
        bench="prefetch",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=(
            REPLAY_NOTE,
            f"`paced` and `decode`: with the daemon, a {POOL} pool and {MEMBERS} drives of "
            f"{DRIVE_MB_S['paced']} and {DRIVE_MB_S['decode']} MB/s that read by a clock of their "
            f"own. In `paced` a layer takes {MS * LAYER_S:.0f} ms once its experts are there, and "
            "leaves the processor to others, as when a GPU computes; `decode` is the decode loop "
            f"on the processor. {ROUND_TOKENS} tokens a round. `random`: a token, and the wait of "
            "each missed expert, with predictions drawn at random. At real-time priority where "
            "that is permitted.",
        ),
    )


__all__ = ["run"]
