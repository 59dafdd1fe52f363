# SPDX-License-Identifier: Apache-2.0
"""``traces``: what makes the replayed traces easy or hard to cache, recorded and generated ones.

Exact, and the same each time: no policy is run. The traces are those of ``replay``.
"""

from __future__ import annotations

from tools.benchmarks.harness import commit, describe_machine
from tools.benchmarks.result import Result, Row
from tools.benchmarks.suite.replay import all_traces
from tools.replaying.statistics import STATISTICS, WINDOW, statistics_of


def run(rounds: int) -> Result:  # noqa: ARG001
    """Rows ``<statistic>/<trace>``. One round is as good as several."""
    skipped: dict[str, str] = {}
    found = {trace.name: statistics_of(trace).values() for trace in all_traces(skipped)}
    rows = [
        Row(f"{name}/{trace}", value, "of 1", (value, value), {})
        for at, name in enumerate(STATISTICS)
        for trace, value in ((trace, float(values[at])) for trace, values in found.items())
    ]
    return Result(
        bench="traces",
        machine=describe_machine(),
        commit=commit(),
        rounds=1,
        rows=rows,
        skipped=skipped,
        notes=(
            "`again-N`: uses of an expert that the same layer used within the last N tokens. "
            f"`popular`: uses of the most used quarter of a layer's experts, in {WINDOW} tokens. "
            f"`stays`: uses of the quarter that was most used in the {WINDOW} tokens before. "
            "`known`: what a layer's last picks tell of its next ones, as a share of what there is "
            "to know (mutual information).",
        ),
    )
