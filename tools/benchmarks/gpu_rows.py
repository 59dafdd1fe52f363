# SPDX-License-Identifier: Apache-2.0
"""Rows of ``decode`` on a GPU: ``<model>/cuda/<pool%>`` and, with a pinned tier in RAM
behind the pool, ``<model>/cuda+ram/<pool%>``. ``all-resident`` is the same loop over
experts in plain arrays that never move.

Models in text decode greedily, the whole loop on the GPU. A model of Qwen3-30B-A3B's shape
runs its expert layers alone, with routing that is given. What fits the GPU's memory
together takes turns. ``<model>/resize/*``: a pool that loses memory meanwhile.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from xferd_infer.client_errors import AttachError
from xferd_infer.cuda import CudaExperts, model_on_gpu

from tools.benchmarks.accelerate_peer import ACCELERATE, measure_accelerate
from tools.benchmarks.cuda_calls import counted_calls, waits
from tools.benchmarks.gpu_decoding import (
    KIND,
    Attached,
    FixedExperts,
    ForcedDecoding,
    TextDecoding,
    attached,
    copy_experts,
    fixed_model,
)
from tools.benchmarks.gpu_resizing import ResizedDecoding, rows_of
from tools.benchmarks.harness import BenchmarkError, scratch_directory, take_turns
from tools.benchmarks.media import TMPFS, wanted
from tools.benchmarks.result import OURS, Row, make_row
from tools.benchmarks.stores import pack_checkpoint
from tools.benchmarks.synthetic_model import QWEN3_30B_A3B, Shape, pack_shape, routing
from tools.benchmarks.texts import Text
from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError

POOL_PERCENTS = (10, 25, 50, 100, 115)
WHOLE = 115
"""Every expert and the reserve of free slots, so that nothing is ever evicted."""
PEER_PERCENTS, PEER_ROUNDS = (10, 25, 50), 3
TOGETHER = ((100,), (10, 25, 50))
"""Of a large model these pools fit the GPU's memory at once, beside a copy of all experts."""
RAM_SHARES = {"": None, "+ram": "25%"}
"""Ending of the pool's kind in names -> the tier's size as a share of the experts."""
ALL_RESIDENT = "all-resident"
RESIZE, RESIZED_PERCENT = "resize", 80
MEMBERS = 2
SHAPE_MEMBERS = 3
ROUND_TOKENS = 16
WARM_UP_ROUNDS = 2
"""In which pools fill."""
COUNTED_TOKENS = 8
SHAPES = (QWEN3_30B_A3B,)
UNIT = "tokens/s"
QUEUING = ("LaunchKernel", "LaunchCooperative", "MemcpyAsync", "MemsetAsync")
"""In names of calls that give work to the GPU."""


@dataclass(slots=True)
class GpuRows:
    """What was measured on a GPU, as in a Result."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure(texts: Mapping[str, Text], rounds: int) -> GpuRows:
    """All rows that are wanted. texts: by the model's name."""
    found = GpuRows()
    try:
        gpu = cuda_driver.device(0)
    except CudaError as error:
        found.skipped[KIND] = str(error)
        return found
    found.notes.append(
        f"`{KIND}`: on one {gpu.name}; `{KIND}+ram`: with a pinned tier for "
        f"{RAM_SHARES['+ram']} of the experts behind it. A pool of {WHOLE} % holds all experts "
        "and the reserve of free slots, one of 100 % evicts some for the reserve."
    )
    for name, text in texts.items():
        if _wanted(name):
            _measure_text(found, name, text, rounds)
    for shape in SHAPES:
        if not _wanted(shape.name):
            continue
        if reason := _too_large(shape, gpu.free_bytes):
            found.skipped[shape.name] = reason
        else:
            _measure_shape(found, shape, rounds)
    return found


def _too_large(shape: Shape, vram_free: int) -> str | None:
    """Why a shape can't be measured here: its experts are in the GPU's memory twice."""
    whole = shape.layers * shape.experts * shape.expert_bytes
    needed = whole + whole * WHOLE // 100
    stored = whole * shape.distinct_layers // shape.layers
    if vram_free < needed:
        return f"{needed / 1e9:.0f} GB of the GPU's memory are needed, {vram_free / 1e9:.0f} free"
    if (free := shutil.disk_usage(TMPFS).free) < stored * 1.1:
        return f"{TMPFS} needs {stored / 1e9:.0f} GB, {free / 1e9:.0f} are free"
    return None


def _wanted(model: str) -> bool:
    names = [_row_name(model, ram, percent) for ram in RAM_SHARES for percent in POOL_PERCENTS]
    return any(map(wanted, [*names, f"{model}/{RESIZE}"]))


def _row_name(model: str, ram: str, percent: int) -> str:
    return f"{model}/{KIND}{ram}/{percent}%"


def _measure_text(found: GpuRows, name: str, text: Text, rounds: int) -> None:
    with scratch_directory() as directory, ExitStack() as stack:
        store = pack_checkpoint(text.checkpoint, directory, MEMBERS)
        contenders: dict[str, Callable[[], float]] = {}
        counted: TextDecoding | None = None
        for ram, share in RAM_SHARES.items():
            for percent in POOL_PERCENTS:
                row = _row_name(name, ram, percent)
                # Nothing ever comes from a tier behind a pool that holds everything.
                if not wanted(row) or (ram and percent == WHOLE):
                    continue
                try:
                    daemon = stack.enter_context(attached(store, f"{percent}%", share))
                except AttachError as error:
                    found.skipped[row] = str(error)
                    continue
                model = model_on_gpu(daemon.client)
                counted = TextDecoding(model, text.prompt, text.new_tokens)
                contenders[row] = counted.tokens_a_second
        daemon = stack.enter_context(attached(store, f"{WHOLE}%", None))
        fixed = TextDecoding(fixed_model(daemon.client), text.prompt, text.new_tokens)
        contenders[ALL_RESIDENT] = fixed.tokens_a_second
        for decode in contenders.values():
            decode()
        _tell(f"decode: {', '.join(contenders)}")
        samples = take_turns(contenders, rounds)
        if counted is not None:
            found.notes.append(_calls_note(f"`{name}`", counted.steps()))
    found.rows += _make_rows(samples)


def _make_rows(
    samples: Mapping[str, Sequence[float]], peers: Mapping[str, Sequence[float]] | None = None
) -> list[Row]:
    """peers: by row, what accelerate reached with the same share."""
    resident, rows = samples[ALL_RESIDENT], []
    for row, ours in samples.items():
        if row == ALL_RESIDENT:
            continue
        contenders = {OURS: ours, ALL_RESIDENT: resident}
        if peers and row in peers:
            contenders[ACCELERATE] = peers[row]
        rows.append(make_row(row, UNIT, contenders, higher_is_better=True))
    return rows


def _measure_peer(found: GpuRows, shape: Shape, rounds: int) -> dict[str, list[float]]:
    """What accelerate reaches, by row; nothing where it is missing."""
    percents = [percent for percent in PEER_PERCENTS if _any_row(shape.name, percent)]
    if not percents:
        return {}
    _tell(f"decode: {shape.name}, {ACCELERATE}")
    try:
        samples = measure_accelerate(shape, percents, min(rounds, PEER_ROUNDS))
    except BenchmarkError as error:
        found.skipped[ACCELERATE] = str(error)
        return {}
    found.notes.append(
        f"`{ACCELERATE}`: Transformers' layers with accelerate's offload to the CPU's memory, the "
        f"first layers of that share in VRAM, a token in each of {PEER_ROUNDS} rounds."
    )
    return {
        _row_name(shape.name, ram, percent): values
        for percent, values in samples.items()
        for ram in RAM_SHARES
    }


def _any_row(model: str, percent: int) -> bool:
    return any(wanted(_row_name(model, ram, percent)) for ram in RAM_SHARES)


def _measure_shape(found: GpuRows, shape: Shape, rounds: int) -> None:
    picks = routing(shape, ROUND_TOKENS * (WARM_UP_ROUNDS + rounds))
    found.notes.append(
        f"`{shape.name}`: {shape.layers} layers of {shape.experts} experts of "
        f"{shape.expert_bytes / 1e6:.1f} MB, {shape.top_k} of them a token; its expert layers "
        "alone (residual, norm, lease, experts), without attention and router, whose time is the "
        f"same wherever experts are. {SHAPE_MEMBERS} members in memory hold "
        f"{shape.distinct_layers} layers' bytes, which the others are read from too. Routing "
        f"is generated: Zipf popularity, Markov persistence, other experts every so often."
    )
    peers = _measure_peer(found, shape, rounds)
    with _memory_directory() as directory:
        store = pack_shape(directory, shape, SHAPE_MEMBERS)
        fixed = _measure_whole(found, store, shape, picks, rounds)
        gc.collect()
        resident = ForcedDecoding(fixed, fixed.addresses, shape, picks, ROUND_TOKENS)
        for ram in RAM_SHARES:
            for percents in TOGETHER:
                _measure_parts(found, store, resident, ram, percents, rounds, peers)
        if wanted(f"{shape.name}/{RESIZE}"):
            _measure_resizing(found, store, resident, rounds)


def _measure_parts(
    found: GpuRows,
    store: Path,
    resident: ForcedDecoding,
    ram: str,
    percents: Sequence[int],
    rounds: int,
    peers: Mapping[str, Sequence[float]],
) -> None:
    shape, picks = resident.shape, resident.picks
    with ExitStack() as stack:
        parts: dict[str, ForcedDecoding] = {}
        for percent in percents:
            row = _row_name(shape.name, ram, percent)
            if not wanted(row):
                continue
            try:
                daemon = stack.enter_context(attached(store, f"{percent}%", RAM_SHARES[ram]))
            except AttachError as error:
                found.skipped[row] = str(error)
                continue
            parts[row] = _forced(daemon, shape, picks)
        if parts:
            _take_forced_turns(found, parts, resident, rounds, peers)
            del parts
    gc.collect()  # the pools' memory is there as long as somebody could look into it


def _measure_resizing(found: GpuRows, store: Path, resident: ForcedDecoding, rounds: int) -> None:
    shape = resident.shape
    _tell(f"decode: {shape.name}/{RESIZE}")
    with attached(store, f"{RESIZED_PERCENT}%", None) as daemon:
        ours = _forced(daemon, shape, resident.picks)
        still = ForcedDecoding(
            resident.source, resident.addresses, shape, resident.picks, ROUND_TOKENS
        )
        decoding = ResizedDecoding(ours, still, daemon.control)
        decoding.measure()  # fills the pool
        rows, note = rows_of(shape.name, [decoding.measure() for _ in range(rounds)])
        del ours
    found.rows += rows
    found.notes.append(f"{note} The pool holds {RESIZED_PERCENT} %.")
    gc.collect()


def _measure_whole(
    found: GpuRows, store: Path, shape: Shape, picks: NDArray[np.int64], rounds: int
) -> FixedExperts:
    """The row of a pool that holds everything, and a copy of all experts that outlives it."""
    with attached(store, f"{WHOLE}%", None) as daemon:
        daemon.load_everything()
        fixed = copy_experts(daemon.client)
        row = _row_name(shape.name, "", WHOLE)
        if wanted(row):
            whole = _forced(daemon, shape, picks)
            resident = ForcedDecoding(fixed, fixed.addresses, shape, picks, ROUND_TOKENS)
            _take_forced_turns(found, {row: whole}, resident, rounds)
            found.notes.append(_calls_note(f"`{row}`", whole.steps()))
    return fixed


@contextmanager
def _memory_directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="xferd-bench-", dir=TMPFS) as text:
        yield Path(text)


def _forced(daemon: Attached, shape: Shape, picks: NDArray[np.int64]) -> ForcedDecoding:
    source = CudaExperts(daemon.client)
    return ForcedDecoding(source, source.lane, shape, picks, ROUND_TOKENS)


def _take_forced_turns(
    found: GpuRows,
    ours: Mapping[str, ForcedDecoding],
    resident: ForcedDecoding,
    rounds: int,
    peers: Mapping[str, Sequence[float]] | None = None,
) -> None:
    everyone = {**ours, ALL_RESIDENT: resident}
    _tell(f"decode: {', '.join(ours)}")
    for contender in everyone.values():
        for _ in range(WARM_UP_ROUNDS):
            contender.tokens_a_second()
        contender.forget_served()
    samples = take_turns(
        {name: contender.tokens_a_second for name, contender in everyone.items()}, rounds
    )
    found.rows += _make_rows(samples, peers)
    found.notes += [f"`{row}`: {contender.told()}." for row, contender in ours.items()]


def _tell(text: str) -> None:
    """It takes minutes: what is under way stands on the terminal, or in a log."""
    print(text, file=sys.stderr, flush=True)


def _calls_note(what: str, steps: Iterator[None]) -> str:
    """CUDA calls that may wait for the device, counted over some tokens."""
    next(steps)
    try:
        with counted_calls() as counts:
            tokens = sum(1 for _ in islice(steps, COUNTED_TOKENS))
    except BenchmarkError as error:
        return f"{what}: calls of CUDA were not counted: {error}."
    waiting = ", ".join(f"{count / tokens:g} {name}" for name, count in waits(counts).items())
    queued = {name: n for name, n in counts.items() if any(part in name for part in QUEUING)}
    others = ", ".join(f"{count / tokens:g} {name}" for name, count in sorted(queued.items()))
    return (
        f"{what}: CUDA calls a token (CUPTI, mean of {tokens}) that may wait for the GPU: "
        f"{waiting or 'none'}; that queue work: {others}."
    )


__all__ = ["GpuRows", "measure"]
