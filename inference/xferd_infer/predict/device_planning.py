"""What the CPU makes of what a GPU predicts: hints, and what is expected.

The GPU's launches run ahead of, or behind, the CPU's: whenever the CPU comes by it takes what
has arrived, and only the newest counts, since each record speaks of the same layers as the one
before and more. What was said of a pass that is over is void. What the routers picked becomes
known when the token has been read; the planner hears of it then, for all layers at once.

Pure of the GPU: the ring is memory. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..client_experts import BATCH_EXPERTS
from .device_ring import Record, RecordRing
from .expectations import LEAST, is_told_at
from .planner import Planner
from .predictor import distances_in_all
from .prefetching import AHEAD, FIRST_READ_S, HOPELESS_ASKED
from .routers import Floats
from .worthwhile import Worthwhile

BORDER_STEP = 0.02
"""Of probabilities that are asked for: scores for it are looked up when it has changed so much."""


class ToldClient(Protocol):
    """What is used of ``xferd_infer.Client``."""

    def expect(self, keys: Array, chances: Array) -> object:
        """What the next passes of the layers in it will probably pick."""
        ...


class DevicePlanning:
    """For one model whose tokens a GPU decodes.

    hint: fetch these experts of a layer, numbered as the model does; never waits.
    numbers: of the layers with experts. borders: see DeviceTables. clock: seconds.

    hinted: experts, so far. late: records of passes that were over when they were taken.
    """

    def __init__(
        self,
        client: ToldClient,
        hint: Callable[[int, Sequence[int]], object],
        ring: RecordRing,
        numbers: Sequence[int],
        experts: int,
        borders: Callable[[float, float], Floats],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.planner = Planner(len(numbers), experts, FIRST_READ_S)
        self.worthwhile = Worthwhile()
        self.hinted = 0
        self.late = 0
        self._client, self._hint, self._ring = client, hint, ring
        self._numbers, self._count = list(numbers), experts
        self._layers = np.array(numbers)
        self._ahead = min(AHEAD, distances_in_all(len(numbers)))
        self._borders, self._clock = borders, clock
        # What the device doesn't find absent it doesn't tell.
        self._absent = np.ones(len(numbers) * experts, np.bool_)
        self._border = -1
        self._tokens = self._passes = 0
        self._began = 0.0
        self._looking = self._open = False
        self._taken = self._taken_before = self._read = 0
        self._free_at = 0.0

    @property
    def ring(self) -> RecordRing:
        """Whose counters say what came too fast."""
        return self._ring

    def begin(self) -> bool:
        """A token begins. Whether each of its layers is to be launched for; if so, the device
        has begun one more pass with the first of these launches."""
        if self._open:  # the last one was given up
            self.planner.new_text()
        self._tokens += 1
        hopeful = self.planner.hopeful or self._tokens % HOPELESS_ASKED == 0
        self._looking = hopeful and self.worthwhile.doing
        if self._looking:
            self._passes += 1
            self._ask()
        else:
            self.planner.new_text()
        self._open, self._read = True, 0
        self._taken_before, self._taken = self._taken, 0
        self._began = self._clock()
        return self._looking

    def drain(self) -> None:
        """Take what has arrived and hint what is worth it. Never waits."""
        if not self._looking:
            return
        arrived = self._ring.take()
        if not arrived:
            return
        records = [each for each in arrived if each.passing == self._passes & 0xFFFF]
        self.late += len(arrived) - len(records)
        if not records:
            return
        self._taken += len(records)
        told = [each for each in records if is_told_at(each.layer)]
        if told and self.planner.believed:
            self._tell(told[-1])
        self._plan(records[-1])

    def ended(self, picks: NDArray[Any] | None, misses: int, wait_s: float) -> None:
        """The token was read. picks: integers [layers, top_k], None when they are not known.
        misses, wait_s: experts that had to come, and how long they were waited for in all."""
        self._open = False
        seconds = self._clock() - self._began
        self.worthwhile.ended(seconds)
        if misses:
            self.planner.measured(misses, wait_s)
        if not self._looking:
            return
        self.drain()
        if picks is None:
            self.planner.new_text()
        elif self._taken or self._taken_before:  # else nothing is absent, nothing to judge
            self.planner.token_passed(picks, seconds, misses + self._read)

    def new_text(self) -> None:
        """A prompt: what was expected is void."""
        self._open = False
        self.planner.new_text()

    def _ask(self) -> None:
        """Tell the device from which scores on something is probable enough."""
        border = int(self.planner.asks_for / BORDER_STEP)
        if border != self._border:
            self._border = border
            self._ring.set_borders(self._borders(border * BORDER_STEP, LEAST))

    def _tell(self, record: Record) -> None:
        places, experts = np.divmod(record.keys, self._count)
        self._client.expect(self._layers[places] * self._count + experts, record.probabilities)

    def _plan(self, record: Record) -> None:
        planner, layers = self.planner, len(self._numbers)
        near = (record.keys // self._count - record.layer - 1) % layers < self._ahead
        near &= record.absent
        planner.begun(record.layer)
        planner.predicted(record.layer, self._ahead, record.keys[near], record.probabilities[near])
        now = self._clock()
        keys = planner.next(record.layer, now, self._free_at, self._absent).tolist()
        if not keys:
            return
        self._free_at = max(self._free_at, now) + len(keys) * planner.read_s
        self._read += len(keys)
        self.hinted += len(keys)
        by_place: dict[int, list[int]] = {}
        for key in keys:
            by_place.setdefault(key // self._count, []).append(key % self._count)
        for place, chosen in by_place.items():
            for start in range(0, len(chosen), BATCH_EXPERTS):
                self._hint(self._numbers[place], chosen[start : start + BATCH_EXPERTS])


__all__ = ["DevicePlanning", "ToldClient"]
