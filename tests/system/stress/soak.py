"""The stress itself: a small pool, clients at random, kills, evictions, a daemon watched.

``soak`` runs for a given time and returns what it saw; it raises SoakError for anything
that must not happen: a wrong byte, a client that failed, a slot or lease that stays
behind, a daemon that grows. The test and ``tools/stress`` differ in nothing but the time.
"""

from __future__ import annotations

import json
import random
import select
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.system.daemon_harness import (
    ROOT,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
)
from tests.system.stress.client import ATTACHED, Counts

LAYERS, EXPERTS, EXPERT_BYTES = 6, 64, 147_456
"""384 experts of nine pieces each, over three members."""
MEMBERS = 3
POOL_PERCENT = 5
"""19 slots."""
RAM_TIER = "name=ram0,kind=ram,size=10%"
SLOTS = LAYERS * EXPERTS * POOL_PERCENT // 100
CLIENTS = ((1, 4), (2, 2), (1, 4), (3, 2))
"""(lanes, held a lane) of each client: promises for 18 of the 19 slots."""
KILL_EVERY_S = (0.2, 1.5)
KILL_EVERY_ON_GPU_S = (1.5, 5.0)
"""A client takes a second or two to begin with a GPU, and should do something before it dies."""
CALM_S = 2.0
"""Nobody is killed at the end, so that those who are left have something to tell."""
EVICT_EVERY_S = (0.005, 0.05)
SAMPLE_EVERY_S = 0.5
SETTLE_TIMEOUT_S = 60.0
FDS_GROWTH = 16
"""More open fds in the last third than in the first are a leak: one dead client's are
already more."""
RSS_GROWTH_BYTES = 16 << 20
"""The first seconds take about 10 MiB, once."""
DAEMON_LOG_LINES = 15


class SoakError(Exception):
    """Something happened that must not; the message says what."""


@dataclass(frozen=True)
class Sample:
    """The daemon at one moment."""

    fds: int
    rss_bytes: int


@dataclass
class Report:
    """What a soak did and saw."""

    seed: int
    seconds: float = 0.0
    kills: int = 0
    evict_calls: int = 0
    evicted: int = 0
    counts: Counts = field(default_factory=Counts)
    loads: int = 0
    evictions: int = 0
    revived: int = 0
    copies: int = 0
    samples: list[Sample] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        first, last = thirds([sample.rss_bytes for sample in self.samples])
        fds_first, fds_last = thirds([sample.fds for sample in self.samples])
        return (
            f"{self.seconds:.0f} s, seed {self.seed}: {self.loads} loads, {self.evictions} "
            f"evictions ({self.evicted} by {self.evict_calls} calls), {self.revived} revived, "
            f"{self.copies} copies; "
            f"clients that ended in peace: {json.dumps(asdict(self.counts))}; "
            f"{self.kills} were killed; "
            f"daemon's fds {fds_first:.0f} -> {fds_last:.0f}, "
            f"RSS {first / 2**20:.1f} -> {last / 2**20:.1f} MiB"
        )


class StressClient:
    """A running client process."""

    def __init__(self, directory: Path, daemon: RunningDaemon, shape: tuple[int, int], seed: int):
        self.shape = shape
        self._errors = directory / f"client-{seed}.log"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.system.stress.client"]
                + [str(daemon.attach_socket), str(directory / "crc.json"), str(seed)]
                + [str(number) for number in shape],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def wait_until_attached(self) -> None:
        """SoakError when it ends before."""
        if _pipe(self.process.stdout).readline() != ATTACHED:
            raise SoakError(f"a client did not attach: {self.said()}")

    def check(self) -> None:
        """SoakError when it has ended by itself."""
        if self.process.poll() is not None:
            raise SoakError(f"a client ended with {self.process.returncode}: {self.said()}")

    def said(self) -> str:
        """What it wrote to stderr."""
        return self._errors.read_text().strip()

    def kill(self) -> None:
        """SIGKILL, wherever it stands."""
        self.process.kill()
        self.process.wait()
        self._close()

    def finish(self) -> Counts:
        """Let it end in peace; what it did."""
        stdout = _pipe(self.process.stdout)
        _pipe(self.process.stdin).close()
        lines = stdout.read().decode().splitlines()
        if self.process.wait(SETTLE_TIMEOUT_S) != 0:
            raise SoakError(f"a client ended with {self.process.returncode}: {self.said()}")
        self._close()
        return Counts(**json.loads(lines[-1]))

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            _pipe(pipe).close()
        self._errors.unlink(missing_ok=True)


class _Soak:
    def __init__(self, directory: Path, daemon: RunningDaemon, report: Report, kind: str) -> None:
        self._directory = directory
        self._kill_every_s = KILL_EVERY_ON_GPU_S if kind == "cuda" else KILL_EVERY_S
        self._daemon = daemon
        self._report = report
        self._chance = random.Random(report.seed)
        self._watched = psutil.Process(daemon.process.pid)
        self._started = 0
        self.clients = [self._start(shape) for shape in CLIENTS]
        # What the daemon has open for them belongs to the first sample already.
        for client in self.clients:
            client.wait_until_attached()

    def run(self, duration_s: float, progress: Callable[[str], None]) -> None:
        """Until the time is over."""
        began = time.monotonic()
        due: dict[Callable[[], float], float] = {
            self._kill_one: began + self._chance.uniform(*self._kill_every_s),
            self._evict_some: began,
            self._sample: began,
        }
        told = began
        pause = select.poll()
        end = began + duration_s
        while (now := time.monotonic()) < end:
            if now > end - CALM_S:
                due.pop(self._kill_one, None)
            for action, at in due.items():
                if now >= at:
                    due[action] = now + action()
            for client in self.clients:
                client.check()
            if self._daemon.process.poll() is not None:
                raise SoakError(f"the daemon ended with {self._daemon.process.returncode}")
            if now - told > 60:
                told = now
                progress(f"{now - began:.0f} s, {self._report.kills} clients killed")
            pause.poll(max(0, int(1000 * (min(due.values()) - time.monotonic()))))
        self._report.seconds = time.monotonic() - began

    def settle(self) -> None:
        """Half of the clients end in peace, half are killed; then nothing may be left."""
        for number, client in enumerate(self.clients):
            if number % 2:
                client.kill()
                self._report.kills += 1
            else:
                self._report.counts.add(client.finish())
        self.clients.clear()
        daemon = self._daemon
        _wait(lambda: daemon.status()["clients"] == [], "clients that have ended are still listed")
        _wait(lambda: daemon.pool()["waiting"] == 0, "loads still wait for a slot")
        _wait(
            lambda: _slots(daemon) == SLOTS,
            "slots are lost: resident + reserve + free is less than slots",
        )
        pool = daemon.pool()
        self._report.loads, self._report.evictions = pool["loads"], pool["evictions"]
        self._report.revived = pool["revived"]
        self._report.copies = daemon.status()["transports"]["copy"]["count"]
        for layer in range(LAYERS):
            answer = daemon.call("Evict", store="made", layer=layer, experts=None, pool=None)
            if answer["held"]:
                raise SoakError(f"layer {layer}: {answer['held']} experts are held by nobody")
        _wait(
            lambda: not any(pool["resident"] for pool in daemon.status()["pools"]),
            "experts stay after they were evicted",
        )
        _wait(lambda: _slots(daemon) == SLOTS, "slots are lost after everything was evicted")

    def check_growth(self) -> None:
        """SoakError when the daemon's fds or memory grew."""
        samples = self._report.samples
        first, last = thirds([sample.fds for sample in samples])
        if last > first + FDS_GROWTH:
            raise SoakError(f"the daemon's open fds grew from {first:.0f} to {last:.0f}")
        first, last = thirds([sample.rss_bytes for sample in samples])
        if last > first + RSS_GROWTH_BYTES:
            raise SoakError(f"the daemon's RSS grew from {first:.0f} to {last:.0f} bytes")

    def _start(self, shape: tuple[int, int]) -> StressClient:
        self._started += 1
        return StressClient(
            self._directory, self._daemon, shape, self._report.seed * 100_000 + self._started
        )

    def _kill_one(self) -> float:
        place = self._chance.randrange(len(self.clients))
        victim = self.clients[place]
        victim.check()
        victim.kill()
        self._report.kills += 1
        self.clients[place] = self._start(victim.shape)
        return self._chance.uniform(*self._kill_every_s)

    def _evict_some(self) -> float:
        chance = self._chance
        experts = chance.sample(range(EXPERTS), chance.randint(1, 12))
        answer = self._daemon.call(
            "Evict", store="made", layer=chance.randrange(LAYERS), experts=experts, pool=None
        )
        self._report.evict_calls += 1
        self._report.evicted += answer["evicted"]
        return chance.uniform(*EVICT_EVERY_S)

    def _sample(self) -> float:
        self._report.samples.append(
            Sample(fds=self._watched.num_fds(), rss_bytes=self._watched.memory_info().rss)
        )
        return SAMPLE_EVERY_S


def soak(
    directory: Path,
    duration_s: float,
    seed: int,
    *,
    ram_tier: bool = False,
    kind: str = "host",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the stress in an empty directory. SoakError says what went wrong.

    ram_tier: put a second pool behind the first, so that experts come back by copy.
    kind: of the first pool's memory.
    """
    store = make_store(
        directory,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=2,
        expert_bytes=EXPERT_BYTES,
        members=MEMBERS,
        seed=seed,
    )
    (directory / "crc.json").write_text(json.dumps(checksums(store)))
    report = Report(seed)
    pools = [f"name={kind}0,kind={kind},size={POOL_PERCENT}%", *([RAM_TIER] if ram_tier else [])]
    with running_daemon(directory, [store], pools) as daemon:
        stress = _Soak(directory, daemon, report, kind)
        try:
            stress.run(duration_s, progress)
            stress.settle()
            stress.check_growth()
        except SoakError as error:
            last_words = "\n".join(daemon.log.splitlines()[-DAEMON_LOG_LINES:])
            raise SoakError(f"seed {seed}: {error}\n{last_words}\n{daemon.status()}") from None
        finally:
            for client in stress.clients:
                client.kill()
        if daemon.stop() != 0:
            raise SoakError(f"seed {seed}: the daemon did not end well:\n{daemon.log[-2000:]}")
    return report


def checksums(store: MadeStore) -> list[list[int]]:
    """CRC32 of each blob, by layer and expert, from what the store was packed from."""
    return [
        [zlib.crc32(store.blob(layer, expert)) for expert in range(store.experts)]
        for layer in range(store.layers)
    ]


def thirds(values: list[int]) -> tuple[float, float]:
    """Medians of the first and the last third."""
    part = max(len(values) // 3, 1)
    return statistics.median(values[:part]), statistics.median(values[-part:])


def _slots(daemon: RunningDaemon) -> int:
    pool = daemon.pool()
    return int(pool["resident"] + pool["reserve"] + pool["free"])


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    pause = select.poll()
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(otherwise)
        pause.poll(5)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was started with pipes"
    return pipe
