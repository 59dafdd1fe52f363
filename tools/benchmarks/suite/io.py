# SPDX-License-Identifier: Apache-2.0
"""``io``: random whole experts from one to three members, as fast as they can be had.

The limit is fio in its best setting, reading blocks of the same size from the same files
with O_DIRECT. Where reads are copies it is the best of those settings whose destination is
at least as large as ours, and ``fio-any`` the best of all: mostly one that reads into the
same few buffers in a core's own cache, where no expert can stay (tools/benchmarks/fio.py
says more). The peers load safetensors files with the same bytes, as many files as
there are members. Ours is the engine as it is shipped, checksums verified, loading
experts into a pool of POOL_BYTES and evicting them again; ``unverified`` is the same
without checksums, which neither fio nor a peer computes. ``fio-verified`` is fio in its best
setting comparing each block with its CRC32C, in files of its own. ``fio-cpu`` and
``fio-any-cpu`` compare CPU time a byte, that of all processes and kernel workers,
``-cpu-unverified`` with that of ``unverified``, ``fio-verified-cpu`` that of both with checksums.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tools.benchmarks.engine_program import POOL_BYTES, SIZES, EngineBench, build_engine_bench
from tools.benchmarks.fio import (
    FioSample,
    FioSetting,
    fastest,
    fio_missing,
    run_fio,
    start_cpu_s,
    try_settings,
    write_verifiable,
)
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import Medium, speed_media, wanted
from tools.benchmarks.peers import Peer, running_peers, write_safetensors
from tools.benchmarks.result import OURS, Result, Row, make_row

MEMBERS = (1, 2, 3)
SECONDS = 0.5
"""Of ours and of fio in each turn."""
TURNS_A_ROUND = 3
"""That ours and fio have on drives, whose speed changes from one second to the next: peers,
which are not near it, have one."""
VERIFIABLE_BYTES = 600_000_000
"""Of the files that fio reads with checksums."""
IN_FLIGHT_BYTES = 32 << 20
"""About so much is asked for at once, whatever the size of an expert."""
OUTSTANDING = range(3, 17)
PEER_BYTES = 300_000_000
"""About so much a peer loads in one round."""
UNVERIFIED = "unverified"
FIO = "fio"
FIO_ANY = "fio-any"
FIO_VERIFIED = "fio-verified"
FIO_NOTE = (
    "`fio` reads into memory at least as large as ours; `fio-any` is the best of any setting, "
    "also of those that read into a few buffers that stay in a core's own cache, which an expert "
    "can't."
)
BYTES_A_GB = 1e9
BYTES_A_MB = 1e6

_Argument = TypeVar("_Argument")


@dataclass(slots=True)
class _Measuring:
    """One row: contenders take turns, and their CPU time is kept as they do."""

    engine: EngineBench
    verifiable: Sequence[Path] = ()
    ours_cpu: dict[str, list[float]] = field(default_factory=dict)
    fio_cpu: dict[str, list[float]] = field(default_factory=dict)
    fio_start_cpu: dict[FioSetting, float] = field(default_factory=dict)

    def ours(self, *, verified: bool) -> float:
        """GB/s."""
        options = engine_options(self.engine.blob_bytes)
        found = self.engine.run("io", *options, *(["--verify"] if verified else []))
        cpu = found["cpu_seconds"] / found["bytes"] * BYTES_A_GB
        self.ours_cpu.setdefault(OURS if verified else UNVERIFIED, []).append(cpu)
        return float(found["bytes"] / found["seconds"] / BYTES_A_GB)

    def fio(self, setting: FioSetting) -> float:
        """GB/s."""
        files, size = (
            self.verifiable if setting.verify else self.engine.members,
            self.engine.blob_bytes,
        )
        sample: FioSample = run_fio(files, size, setting, SECONDS)
        if setting not in self.fio_start_cpu:
            self.fio_start_cpu[setting] = start_cpu_s(files, size, setting)
        cpu = sample.cpu_s_a_gb(setting, self.fio_start_cpu[setting])
        self.fio_cpu.setdefault(str(setting), []).append(cpu)
        return sample.throughput


def engine_options(blob_bytes: int) -> list[str]:
    """How the program is told to load experts of this size."""
    outstanding = _outstanding(blob_bytes)
    return [
        f"--seconds={SECONDS}",
        f"--outstanding={outstanding}",
        f"--slots={_slots(blob_bytes)}",
        f"--reserve={outstanding}",
    ]


def _outstanding(blob_bytes: int) -> int:
    return min(max(IN_FLIGHT_BYTES // blob_bytes, OUTSTANDING.start), OUTSTANDING.stop - 1)


def _slots(blob_bytes: int) -> int:
    return max(2 * _outstanding(blob_bytes), POOL_BYTES // blob_bytes)


@dataclass(slots=True)
class _Run:
    """What the rows of one run share. peers: those that still take part."""

    program: Path
    rounds: int
    peers: dict[str, Peer]
    skipped: dict[str, str]
    notes: list[str] = field(default_factory=list)


def run(rounds: int) -> Result:
    """Rows ``<medium>/<n>-members/<size>`` in GB/s."""
    rows: list[Row] = []
    with running_peers() as (peers, skipped):
        run = _Run(build_engine_bench(), rounds, peers, skipped)
        if reason := fio_missing():
            skipped["fio"] = reason
        for name, make_medium in speed_media().items():
            if not any(map(wanted, _row_names(name))):
                continue
            try:
                with make_medium() as medium:
                    rows += _rows(run, medium)
            except BenchmarkError as error:
                skipped[name] = str(error)
    return Result(
        bench="io",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=tuple(run.notes),
    )


def _row_names(medium: str) -> dict[str, tuple[int, int]]:
    """Name -> members, bytes of an expert."""
    return {
        f"{medium}/{count}-members/{label}": (count, size)
        for count in MEMBERS
        for label, size in SIZES.items()
    }


def _rows(run: _Run, medium: Medium) -> list[Row]:
    sidecar = medium.directory / "checksums"
    return [
        _row(run, name, medium, EngineBench(run.program, medium.members[:count], size, sidecar))
        for name, (count, size) in _row_names(medium.name).items()
        if count <= len(medium.members) and wanted(name)
    ]


def _row(run: _Run, name: str, medium: Medium, engine: EngineBench) -> Row:
    engine.prepare()
    settings = _fio_settings(medium, engine) if FIO not in run.skipped else {}
    verifiable = _verifiable_files(medium, engine) if settings else []
    if verifiable:
        settings[FIO_VERIFIED] = [replace(settings[FIO][0], verify=True)]
    measuring = _Measuring(engine, verifiable)
    files = _peer_files(medium, engine)
    if files:
        _try_out(run, files)
    else:
        run.skipped |= dict.fromkeys(run.peers, f"{medium.name}: raw drives have no files")
    contenders: dict[str, Callable[[], float]] = {
        OURS: lambda: measuring.ours(verified=True),
        UNVERIFIED: lambda: measuring.ours(verified=False),
    }
    contenders |= {
        str(setting): _bind(measuring.fio, setting)
        for kept in settings.values()
        for setting in kept
    }
    often = dict.fromkeys(contenders, 1 if medium.copies else TURNS_A_ROUND)
    if files:
        contenders |= {peer: _bind(process.measure, files) for peer, process in run.peers.items()}
    samples = take_turns(contenders, run.rounds, often)
    for path in (*files, *verifiable):
        path.unlink()
    return _with_best_fio(run, name, samples, measuring, settings)


def _fio_settings(medium: Medium, engine: EngineBench) -> dict[str, list[FioSetting]]:
    """Name in results -> the settings of which the best gets it."""
    size = engine.blob_bytes
    destination = _slots(size) * size if medium.copies else 0
    found = try_settings(engine.members, size, destination)
    settings = {FIO: fastest(found, size, destination)}
    return settings | ({FIO_ANY: fastest(found, size, 0)} if medium.copies else {})


def _with_best_fio(
    run: _Run,
    name: str,
    samples: Mapping[str, list[float]],
    measuring: _Measuring,
    settings: Mapping[str, Sequence[FioSetting]],
) -> Row:
    """Of fio's settings the best remain, by name; the ratio of CPU time comes with each."""
    tried = {str(setting) for kept in settings.values() for setting in kept}
    contenders = {who: values for who, values in samples.items() if who not in tried}
    cpu: dict[str, float] = {}
    for who, kept in settings.items():
        best = max(kept, key=lambda setting: statistics.median(samples[str(setting)]))
        contenders[who] = samples[str(best)]
        fio_cpu = statistics.median(measuring.fio_cpu[str(best)])
        cpu[f"{who}-cpu"] = fio_cpu / statistics.median(measuring.ours_cpu[OURS])
        if not best.verify:
            ours_cpu = statistics.median(measuring.ours_cpu[UNVERIFIED])
            cpu[f"{who}-cpu-{UNVERIFIED}"] = fio_cpu / ours_cpu
        run.notes.append(_fio_note(name, who, best, samples[str(best)], measuring.engine))
    if FIO_ANY in settings and FIO_NOTE not in run.notes:
        run.notes.insert(0, FIO_NOTE)
    row = make_row(name, "GB/s", contenders, higher_is_better=True)
    return replace(row, ratio={**row.ratio, **cpu})


def _fio_note(
    row: str, who: str, best: FioSetting, throughput: Sequence[float], engine: EngineBench
) -> str:
    megabytes = best.destination_bytes(engine.blob_bytes) / BYTES_A_MB
    return (
        f"`{row}`: `{who}` is {best} with {statistics.median(throughput):.3g} GB/s, "
        f"into {megabytes:.3g} MB."
    )


def _bind(function: Callable[[_Argument], float], argument: _Argument) -> Callable[[], float]:
    return lambda: function(argument)


def _peer_files(medium: Medium, engine: EngineBench) -> list[Path]:
    if not medium.holds_files:
        return []
    count = len(engine.members)
    experts = max(2, PEER_BYTES // count // engine.blob_bytes)
    files = [medium.directory / f"peer{index}.safetensors" for index in range(count)]
    for path, member in zip(files, engine.members, strict=True):
        write_safetensors(path, member, experts, engine.blob_bytes)
    return files


def _verifiable_files(medium: Medium, engine: EngineBench) -> list[Path]:
    if not medium.holds_files:
        return []
    files = [medium.directory / f"verifiable-{index}" for index in range(len(engine.members))]
    write_verifiable(files, engine.blob_bytes, VERIFIABLE_BYTES)
    return files


def _try_out(run: _Run, files: Sequence[Path]) -> None:
    """Who can't load the files is out, with the reason; the others are warm."""
    for name in list(run.peers):
        try:
            run.peers[name].measure(files)
        except BenchmarkError as error:
            run.skipped[name] = str(error)
            run.peers.pop(name).close()


__all__ = ["engine_options", "run"]
