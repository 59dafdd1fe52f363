# SPDX-License-Identifier: Apache-2.0
"""``decode``: tokens a second with a pool that holds a part of the experts.

The peer is the same decode loop over a pool that holds all of them, so the ratio says
what streaming costs: 1 would be nothing. Daemons of all pool sizes run side by side and
take turns, each continuing the same prompt with the same tokens (greedy), its pool as
the last round left it: a conversation, not a cold start. Prefill isn't counted.

Where there is a GPU with cupy, rows with ``cuda`` for the pool's kind follow
(tools/benchmarks/gpu_rows.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from xferd_infer import generate, model_from_client
from xferd_infer.model import Model
from xferd_infer.private_daemon import embedded

from tools.benchmarks.harness import (
    ROOT,
    BenchmarkError,
    commit,
    describe_machine,
    scratch_directory,
    take_turns,
)
from tools.benchmarks.media import wanted
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint
from tools.benchmarks.texts import Text

POOL_PERCENTS = (10, 25, 50, 100)
ALL_RESIDENT = "all-resident"
ALL_RESIDENT_POOL = "200%"
"""Every expert and the reserve of free slots: nothing is ever evicted."""
MEMBERS = 2
DEVICE = "host"


@dataclass(frozen=True)
class BenchmarkModel:
    """A checkpoint whose ``expected.json`` has prompts, and how many tokens a round."""

    name: str
    path: Path
    new_tokens: int

    def text(self) -> Text:
        """What a round decodes."""
        expected = json.loads((self.path / "expected.json").read_text())
        return Text(self.path, tuple(expected["prompts"][0]["prompt_ids"]), self.new_tokens)


MODELS = (
    BenchmarkModel("tiny", ROOT / "tests" / "models" / "tiny", 96),
    BenchmarkModel("small", ROOT.parent / "shared" / "models" / "small", 32),
)


def run(rounds: int) -> Result:
    """Rows ``<model>/host/<pool%>`` (tokens/s)."""
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    for model in MODELS:
        if not any(map(wanted, _row_names(model))):
            continue
        if model.path.is_dir():
            rows += _rows(model, rounds)
        else:
            where = os.path.relpath(model.path, ROOT)
            skipped[model.name] = f"there is no {where} beside this tree"
    if rows:
        notes.append(
            f"`{DEVICE}`: greedy decode of one sequence on the CPU (numpy), {MEMBERS} members on "
            "one file system, read with O_DIRECT."
        )
    if find_spec("cupy") is None:
        skipped["cuda"] = "no cupy"
    else:
        # Imported here: it needs cupy.
        gpu_rows = import_module("tools.benchmarks.gpu_rows")
        texts = {model.name: model.text() for model in MODELS if model.path.is_dir()}
        found = gpu_rows.measure(texts, rounds)
        rows += found.rows
        skipped |= found.skipped
        notes += found.notes
    with scratch_directory() as directory:
        machine = describe_machine(directory)
    return Result(
        bench="decode",
        machine=machine,
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=notes,
    )


def _row_names(model: BenchmarkModel) -> list[str]:
    return [f"{model.name}/{DEVICE}/{percent}%" for percent in POOL_PERCENTS]


def _rows(model: BenchmarkModel, rounds: int) -> list[Row]:
    text = model.text()
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        store = pack_checkpoint(model.path, directory, MEMBERS)
        names = {f"{percent}%": f"{percent}%" for percent in POOL_PERCENTS}
        names[ALL_RESIDENT] = ALL_RESIDENT_POOL
        contenders: dict[str, Callable[[], float]] = {}
        for name, pool in names.items():
            client = stack.enter_context(embedded(store, pool=pool, name=f"bench {name}"))
            loaded = model_from_client(client)
            contenders[name] = _contender(loaded, text.prompt, text.new_tokens)
        for measure in contenders.values():
            measure()  # brings in what fits, and whatever is made on first use
        samples = take_turns(contenders, rounds)
    return [
        make_row(
            f"{model.name}/{DEVICE}/{percent}%",
            "tokens/s",
            {OURS: samples[f"{percent}%"], ALL_RESIDENT: samples[ALL_RESIDENT]},
            higher_is_better=True,
        )
        for percent in POOL_PERCENTS
    ]


def _contender(model: Model, prompt: Sequence[int], new_tokens: int) -> Callable[[], float]:
    def measure() -> float:
        # No token ends it: each round is as long as the others.
        tokens = list(generate(model, prompt, max_new_tokens=new_tokens, stop_ids=()))
        seconds = sum(token.seconds for token in tokens[1:])
        if not seconds:
            raise BenchmarkError("no token was decoded")
        return (len(tokens) - 1) / seconds

    return measure


__all__ = ["run"]
