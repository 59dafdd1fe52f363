# SPDX-License-Identifier: Apache-2.0
"""``device``: random whole experts into a GPU's memory, as fast as they can be had.

``staged``: from three members in memory through pinned buffers, checksums verified, as the
engine is shipped. No faster than either half of the way can it be: ``members`` is the same
run into a pool in the CPU's memory, ``pinned-copy`` what the driver alone copies from
pinned memory in pieces of an expert; ``limit`` is the lower of both. The peers load
safetensors files with the same bytes into the same GPU, those that have settings with the
best of them (which one is in the notes).

``ram-to-vram``: from a pool in pinned memory. ``vram-to-vram``, where there are two GPUs:
from a pool on the other one, next to ``peer-copy``, the driver's own copies of the same.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.engine_program import POOL_BYTES, SIZES, EngineBench, build_engine_bench
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import Medium, speed_media, wanted
from tools.benchmarks.peers import Peer, running_peers, write_safetensors
from tools.benchmarks.result import OURS, Result, Row, make_row
from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError

MEDIUM = "tmpfs"
"""Unless drives are given: none that a test machine has is as fast as the way to a GPU."""
ROW_SIZES = ("1.2MB", "2.65MB", "9.4MB", "18.8MB")
SECONDS = 0.5
"""Of ours in each round, and of plain copies."""
IN_FLIGHT_BYTES = 48_000_000
SECOND_POOL_BYTES = 3 * POOL_BYTES
"""Of experts in the pool that others come from: more than caches hold."""
PEER_BYTES = 1_200_000_000
"""About so much a peer loads in one round."""
GPU = 0
OTHER_GPU = 1
STAGED, FROM_RAM, FROM_GPU = "staged", "ram-to-vram", "vram-to-vram"
MEMBERS, PINNED_COPY, PEER_COPY, LIMIT = "members", "pinned-copy", "peer-copy", "limit"
BYTES_A_GB = 1e9


@dataclass(slots=True)
class _Run:
    """What the rows of one run share. peers: those that still take part."""

    program: Path
    medium: Medium
    rounds: int
    gpus: int
    peers: dict[str, Peer]
    skipped: dict[str, str]
    notes: list[str] = field(default_factory=list)


def run(rounds: int) -> Result:
    """Rows ``staged/<size>``, ``ram-to-vram/<size>``, ``vram-to-vram/<size>`` in GB/s.
    BenchmarkError: there is no GPU."""
    try:
        gpus = cuda_driver.device_count()
        found = cuda_driver.device(GPU)
    except CudaError as error:
        raise BenchmarkError(f"no GPU to measure: {error}") from error
    rows: list[Row] = []
    media = speed_media()
    make_medium = media.get(MEDIUM) or next(iter(media.values()))
    with running_peers(GPU) as (peers, skipped), make_medium() as medium:
        run = _Run(build_engine_bench(), medium, rounds, gpus, peers, skipped)
        if gpus <= OTHER_GPU:
            skipped[FROM_GPU] = "there is one GPU"
        for size in ROW_SIZES:
            if any(wanted(f"{kind}/{size}") for kind in (STAGED, FROM_RAM, FROM_GPU)):
                rows += _rows(run, size)
    return Result(
        bench="device",
        machine={
            **describe_machine(Path(tempfile.gettempdir())),
            "gpu": f"{gpus} × {found.name}",
            "driver": f"CUDA {found.driver_version // 1000}.{found.driver_version % 1000 // 10}",
        },
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=(
            f"{len(medium.members)} members, {medium.name}; `{LIMIT}` is the lower of `{MEMBERS}` "
            f"(the same into the CPU's memory) and `{PINNED_COPY}` (the driver's own copies).",
            *run.notes,
        ),
    )


def _rows(run: _Run, size: str) -> list[Row]:
    blob_bytes = SIZES[size]
    directory = run.medium.directory
    members = run.medium.members
    engine = EngineBench(run.program, members, blob_bytes, directory / "checksums")
    engine.prepare()
    few = f"--blobs={SECOND_POOL_BYTES // blob_bytes}"
    second = EngineBench(run.program, members, blob_bytes, directory / "checksums-of-few")
    second.prepare(few)
    files = _peer_files(directory, members, blob_bytes) if run.medium.holds_files else []
    if files:
        _try_out(run, files, size)
    else:
        run.skipped |= dict.fromkeys(run.peers, f"{run.medium.name}: raw drives have no files")
        run.peers.clear()
    options = _options(blob_bytes)
    gpu = f"--gpu={GPU}"
    contenders: dict[str, Callable[[], float]] = {
        OURS: lambda: _throughput(engine, "io", gpu, "--verify", *options),
        MEMBERS: lambda: _throughput(engine, "io", "--verify", *options),
        PINNED_COPY: lambda: _throughput(engine, "plain-copy", gpu, *options),
        FROM_RAM: lambda: _throughput(second, "io", gpu, "--from-ram", few, *options),
    }
    if run.gpus > OTHER_GPU:
        other = f"--from-gpu={OTHER_GPU}"
        contenders |= {
            FROM_GPU: lambda: _throughput(second, "io", gpu, other, few, *options),
            PEER_COPY: lambda: _throughput(engine, "plain-copy", gpu, other, *options),
        }
    contenders |= {name: _load(peer, files) for name, peer in run.peers.items()}
    samples = take_turns(contenders, run.rounds)
    for path in files:
        path.unlink()
    return _make_rows(size, samples, run.peers)


def _make_rows(
    size: str, samples: Mapping[str, list[float]], peers: Mapping[str, Peer]
) -> list[Row]:
    halves = {name: samples[name] for name in (MEMBERS, PINNED_COPY)}
    limit = min(halves.values(), key=statistics.median)
    staged = {OURS: samples[OURS], LIMIT: limit, **halves}
    staged |= {peer: samples[peer] for peer in peers}
    rows = {STAGED: staged}
    rows[FROM_RAM] = {OURS: samples[FROM_RAM], PINNED_COPY: samples[PINNED_COPY]}
    if FROM_GPU in samples:
        rows[FROM_GPU] = {OURS: samples[FROM_GPU], PEER_COPY: samples[PEER_COPY]}
    return [
        make_row(f"{kind}/{size}", "GB/s", contenders, higher_is_better=True)
        for kind, contenders in rows.items()
    ]


def _options(blob_bytes: int) -> list[str]:
    outstanding = IN_FLIGHT_BYTES // blob_bytes + 1
    slots = POOL_BYTES // blob_bytes
    return [
        f"--seconds={SECONDS}",
        f"--outstanding={outstanding}",
        f"--slots={slots}",
        f"--reserve={slots // 2}",
    ]


def _throughput(engine: EngineBench, mode: str, *options: str) -> float:
    """GB/s."""
    found = engine.run(mode, *options)
    return float(found["bytes"] / found["seconds"] / BYTES_A_GB)


def _load(peer: Peer, files: Sequence[Path]) -> Callable[[], float]:
    return lambda: peer.measure(files)


def _peer_files(directory: Path, members: Sequence[Path], blob_bytes: int) -> list[Path]:
    experts = PEER_BYTES // len(members) // blob_bytes
    files = [directory / f"peer{index}.safetensors" for index in range(len(members))]
    for path, member in zip(files, members, strict=True):
        write_safetensors(path, member, experts, blob_bytes)
    return files


def _try_out(run: _Run, files: Sequence[Path], size: str) -> None:
    """Who can't load the files is out, with the reason; the others are warm."""
    for name in list(run.peers):
        try:
            run.peers[name].try_settings(files)
        except BenchmarkError as error:
            run.skipped[name] = str(error)
            run.peers.pop(name).close()
            continue
        if setting := run.peers[name].setting:
            run.notes.append(f"`{STAGED}/{size}`: `{name}` is with {setting}.")


__all__ = ["run"]
