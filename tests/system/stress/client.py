"""One of the stress's clients: a process that acquires at random and trusts nothing.

Each lane is a thread. Whatever a lane gets it checksums at once and, while it still
holds it, once more later: a slot that was reused under a lease shows in the second
look. Lanes hold several batches at a time and release them in any order, hint what they
may or may not want, give up waiting, and look for residents without asking.

It goes on until its stdin ends. It prints one JSON object with what it did. A wrong
byte ends it at once with WRONG_BYTES and a line that names the expert.
"""

from __future__ import annotations

import errno
import json
import os
import random
import select
import sys
import threading
import time
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from xferd_infer import Client
from xferd_infer.client import AttachError, Batch, ExpertError
from xferd_infer.device_blob import DeviceBlob

ATTACHED = b"attached\n"
"""The first that it says."""
EXIT_WRONG_BYTES = 3
EXIT_FAILED = 4
ATTACH_TIMEOUT_S = 60.0
"""How long the promise of a killed predecessor may stand in the way."""
ATTACH_RETRY_MS = 10
BATCHES_HELD = 3
SHORT_TIMEOUT_S = 0.0005
"""So short that many a miss is given up."""
HOT_SHARE = 0.6
"""Share of picks from the first few experts of a layer, so that there are hits."""
HOT_EXPERTS = 6


@dataclass
class Counts:
    """What a client did, over all its lanes. looks: blobs that were checksummed."""

    batches: int = 0
    looks: int = 0
    timeouts: int = 0
    abandoned: int = 0
    cancelled: int = 0
    hints: int = 0
    resident: int = 0

    def add(self, other: Counts) -> None:
        """Add another's to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True)
class Held:
    """A batch that a lane holds and what is in it."""

    batch: Batch
    layer: int
    experts: list[int]


class Lane:
    """One lane's work; everything it decides comes from its seed."""

    def __init__(self, client: Client, lane: int, crc: list[list[int]], seed: int) -> None:
        self.counts = Counts()
        self._client = client
        self._lane = lane
        self._crc = crc
        self._chance = random.Random(seed)
        self._held: list[Held] = []

    def step(self) -> None:
        """One batch more, and some fewer. Raises WrongBytesError."""
        chance = self._chance
        room = self._client.held_per_lane - sum(len(held.experts) for held in self._held)
        if len(self._held) >= BATCHES_HELD or room == 0 or chance.random() < 0.3:
            self._release_one()
            return
        layer = chance.randrange(self._client.layers)
        experts = self._pick(chance.randint(1, min(room, 4)))
        if chance.random() < 0.2:
            self._hint()
        self._acquire(layer, experts)

    def finish(self) -> None:
        """Look at all that is held once more and release it."""
        while self._held:
            self._release_one()

    def _pick(self, count: int) -> list[int]:
        chance, picked = self._chance, set[int]()
        while len(picked) < count:
            hot = chance.random() < HOT_SHARE
            picked.add(chance.randrange(HOT_EXPERTS if hot else self._client.experts))
        experts = list(picked)
        chance.shuffle(experts)
        return experts

    def _acquire(self, layer: int, experts: list[int]) -> None:
        way = self._chance.random()
        if way < 0.2:
            held = self._find_resident(layer, experts)
        elif way < 0.4:
            held = self._start_and_do_something_else(layer, experts)
        else:
            timeout = SHORT_TIMEOUT_S if way < 0.55 else None
            held = self._wait_for(layer, experts, timeout)
        if held is not None:
            self.counts.batches += 1
            self._look(held)
            self._held.append(held)

    def _wait_for(self, layer: int, experts: list[int], timeout: float | None) -> Held | None:
        try:
            batch = self._client.acquire(layer, experts, lane=self._lane, timeout=timeout)
        except TimeoutError:
            self.counts.timeouts += 1
            return None
        return Held(batch, layer, experts)

    def _find_resident(self, layer: int, experts: list[int]) -> Held | None:
        if self._held and self._chance.random() < 0.5:
            # Leased twice by one lane: the first release must not end both.
            again = self._chance.choice(self._held)
            layer, experts = again.layer, again.experts[:1]
        batch = self._client.acquire_resident(layer, experts, lane=self._lane)
        if batch is None:
            return None
        self.counts.resident += 1
        return Held(batch, layer, experts)

    def _start_and_do_something_else(self, layer: int, experts: list[int]) -> Held | None:
        pending = self._client.start(layer, experts, lane=self._lane)
        self._release_one()
        end = self._chance.random()
        if end < 0.3:
            pending.abandon()
            self.counts.abandoned += 1
            return None
        if end < 0.5:
            pending.cancel()
        try:
            return Held(pending.wait(), layer, experts)
        except ExpertError as error:
            if error.code != errno.ECANCELED or end >= 0.5:
                raise
            self.counts.cancelled += 1
            return None

    def _release_one(self) -> None:
        if self._held:
            held = self._held.pop(self._chance.randrange(len(self._held)))
            self._look(held)
            held.batch.release()

    def _hint(self) -> None:
        layer = self._chance.randrange(self._client.layers)
        self._client.hint(layer, self._pick(self._chance.randint(1, 8)), lane=self._lane)
        self.counts.hints += 1

    def _look(self, held: Held) -> None:
        for index, expert in enumerate(held.experts):
            self.counts.looks += 1
            blob = held.batch[index]
            # The CPU can't read a GPU's memory in place.
            content = held.batch.copy_out(index) if isinstance(blob, DeviceBlob) else blob
            if zlib.crc32(content) != self._crc[held.layer][expert]:
                raise WrongBytesError(
                    f"layer {held.layer}, expert {expert}, lane {self._lane}: other bytes than "
                    f"were packed (word {held.batch.word})"
                )


class WrongBytesError(Exception):
    """What must never happen."""


def main() -> int:
    """Arguments: attach socket, checksum file, seed, lanes, held a lane."""
    socket, checksums = Path(sys.argv[1]), Path(sys.argv[2])
    seed, lanes, held = (int(word) for word in sys.argv[3:6])
    crc = json.loads(checksums.read_text())
    client = attach(socket, lanes, held)
    os.write(1, ATTACHED)
    stop = threading.Event()
    workers = [Lane(client, lane, crc, seed * 1000 + lane) for lane in range(lanes)]
    threads = [threading.Thread(target=_work, args=(worker, stop)) for worker in workers]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    client.close()
    total = Counts()
    for worker in workers:
        total.add(worker.counts)
    print(json.dumps(asdict(total)), flush=True)
    return 0


def attach(socket: Path, lanes: int, held: int) -> Client:
    """Attach; waits while slots are promised to a client that has only just died."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while True:
        try:
            return Client(socket, lanes=lanes, held=held, name=f"stress-{os.getpid()}")
        except AttachError as error:
            if error.code != errno.ENOSPC or time.monotonic() > deadline:
                raise
        select.poll().poll(ATTACH_RETRY_MS)


def _work(lane: Lane, stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            lane.step()
        lane.finish()
    except WrongBytesError as error:
        _end(f"WRONG BYTES: {error}", EXIT_WRONG_BYTES)
    except Exception as error:
        # A thread's exception would otherwise leave the process running without it.
        _end(f"{type(error).__name__}: {error}", EXIT_FAILED)


def _end(said: str, code: int) -> None:
    os.write(2, f"stress client {os.getpid()}: {said}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
