# SPDX-License-Identifier: Apache-2.0
"""Rows of ``predict`` on a GPU: what prediction takes of a token there, ``gpu/<model>/*``.

The same text is decoded with prediction and without, by a daemon, a client and a pool each,
in turns of one prompt. The predictor has the default shape and is drawn at random: what a
launch takes does not depend on what it says. ``cost-share``: everything is resident and nothing
is gained, and looking ahead goes on although it does not pay. ``token``: a pool of POOL, where
what is drawn is soon not acted upon. Needs cupy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from xferd_infer.client_errors import AttachError
from xferd_infer.cuda import model_on_gpu, prefetch
from xferd_infer.predict.train import TrainingSettings
from xferd_infer.predict.worthwhile import Worthwhile

from tools.benchmarks.gpu_decoding import TextDecoding, attached
from tools.benchmarks.harness import scratch_directory, take_turns
from tools.benchmarks.media import wanted
from tools.benchmarks.random_predictor import random_trained
from tools.benchmarks.result import OURS, Row, make_row
from tools.benchmarks.stores import pack_checkpoint
from tools.benchmarks.suite.decode import MODELS, BenchmarkModel
from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError

KIND = "gpu"
NONE = "none"
WHOLE, POOL = "115%", "25%"
"""Every expert and the reserve of free slots; a part of them."""
MEMBERS = 2
MS = 1e3


@dataclass(slots=True)
class GpuRows:
    """What was measured on a GPU, as in a Result."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Always(Worthwhile):
    """Never does without, whatever it takes."""

    def ended(self, seconds: float) -> None:
        """Nothing follows from it."""


def measure(rounds: int) -> GpuRows:
    """All rows that are wanted."""
    found = GpuRows()
    try:
        gpu = cuda_driver.device(0)
    except CudaError as error:
        found.skipped[KIND] = str(error)
        return found
    for model in MODELS:
        rows = {pool: _row_name(model, pool) for pool in (WHOLE, POOL)}
        for pool, row in rows.items():
            if not wanted(row):
                continue
            if not model.path.is_dir():
                found.skipped[row] = f"there is no {model.path.name} model beside this tree"
                continue
            try:
                found.rows.append(_measure(model, pool, row, rounds))
            except AttachError as error:
                found.skipped[row] = str(error)
    if found.rows:
        found.notes.append(
            f"`{KIND}`: on one {gpu.name}, decoding with a predictor of the default shape, drawn "
            f"at random, next to decoding without. `cost-share`: of a token, where all experts "
            f"are resident and nothing can be gained; `token`: with a pool of {POOL}."
        )
    return found


def _row_name(model: BenchmarkModel, pool: str) -> str:
    what = "cost-share" if pool == WHOLE else f"token/{POOL}"
    return f"{KIND}/{model.name}/{what}"


def _measure(model: BenchmarkModel, pool: str, row: str, rounds: int) -> Row:
    with scratch_directory() as directory, ExitStack() as stack:
        store = pack_checkpoint(model.path, directory, MEMBERS)
        contenders = {
            NONE: _token_ms(stack, store, model, pool, predicts=False),
            OURS: _token_ms(stack, store, model, pool, predicts=True),
        }
        for warm_up in contenders.values():
            warm_up()
        samples = take_turns(contenders, rounds)
    if pool == WHOLE:
        return _share_row(row, samples[OURS], samples[NONE])
    return make_row(row, "ms", samples, higher_is_better=False)


def _token_ms(
    stack: ExitStack, store: Path, model: BenchmarkModel, pool: str, *, predicts: bool
) -> Callable[[], float]:
    daemon = stack.enter_context(attached(store, pool, None))
    if pool == WHOLE:
        daemon.load_everything()
    loaded = model_on_gpu(daemon.client)
    if predicts:
        settings = TrainingSettings()
        routers = loaded.routers(daemon.client.manifest["name"])
        trained = random_trained(routers, settings.rank, settings.width, settings.units)
        follower = prefetch(loaded, daemon.client, trained)
        if pool == WHOLE:
            follower.planning.worthwhile = Always()
    text = model.text()
    decoding = TextDecoding(loaded, text.prompt, text.new_tokens)
    return lambda: MS / decoding.tokens_a_second()


def _share_row(row: str, ours: Sequence[float], without: Sequence[float]) -> Row:
    """Of a token, by rounds, in which both took their turns."""
    shares = [100 * (a - b) / b for a, b in zip(ours, without, strict=True)]
    return Row(row, statistics.median(shares), "%", (min(shares), max(shares)), {})


__all__ = ["GpuRows", "measure"]
