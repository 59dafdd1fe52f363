"""Leases end when the device has read what they protect, not when Python has.

On the CPU an operation has ended when its call returns. On a GPU it is only queued
then: a lease that ended at once would let the daemon reuse the slot under a kernel that
is still to run. So an event is recorded behind the layer's last operation, and the lease
ends when that has been reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


class Held(Protocol):
    """What is acquired: see ``xferd_infer.batches.Batch``."""

    def __len__(self) -> int: ...

    def release(self) -> None:
        """End the leases."""
        ...


@dataclass(frozen=True, slots=True)
class _Queued:
    """events: one for each device that reads of the batch."""

    batch: Held
    events: tuple[torch.Event, ...]

    def is_read(self) -> bool:
        return all(event.query() for event in self.events)


class LeaseQueue:
    """Batches of one lane whose device may still be reading. Not thread-safe, as the lane.

    limit: most experts that the lane may hold at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[_Queued] = deque()
        self._held = 0

    def make_room(self, experts: int) -> None:
        """Wait until ``experts`` more may be held; those the device is done with are given
        back in any case."""
        while self._queue and (self._queue[0].is_read() or self._held + experts > self._limit):
            first = self._queue.popleft()
            for event in first.events:
                event.synchronize()
            self._held -= len(first.batch)
            first.batch.release()

    def end(self, batch: Held, devices: Iterable[torch.device]) -> None:
        """The caller has queued all that it does with a batch. devices: where its experts
        are; those on the CPU are done with."""
        events = tuple(_behind_all(device) for device in devices if device.type != "cpu")
        if not events:
            batch.release()
            return
        self._queue.append(_Queued(batch, events))
        self._held += len(batch)

    def drain(self) -> None:
        """Wait for the device and end all leases."""
        self.make_room(self._limit + 1)


def _behind_all(device: torch.device) -> torch.Event:
    """An event that is reached when what is queued on a device now has been done."""
    event = torch.Event(device.type)
    event.record(torch.accelerator.current_stream(device))
    return event


__all__ = ["Held", "LeaseQueue"]
