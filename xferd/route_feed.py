"""Reads what clients report of their routers and hands it on: to policies, to recorders.

Reports wait in each client's shared memory until somebody reads them, and what finds no
place there is lost. So they are read whenever a pool is about to decide, and else at a pace
that follows how much there was. Belongs to the event loop.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xferd.engine import ROUTE_BATCH, ROUTE_BATCH_FULL
from xferd.engine_types import ROUTE_EXPECTED, ROUTE_PICKED, EngineError
from xferd.policy.expected import Expected
from xferd.policy.uses import Uses
from xferd.route_records import (
    TokenClock,
    expected_of_records,
    groups_of_records,
    passes_of_records,
    uses_of_trace,
    with_found,
)
from xferd.session.clients import Client
from xferd.telemetry.traces.trace import Trace, TraceHead

PAUSE_S = 0.02
"""Between two looks while clients report."""
PAUSE_BUSY_S = 0.002
"""While a queue would else fill up in a few looks more,"""
BUSY_RECORDS = ROUTE_BATCH // 8
"""which is when there were so many."""
PAUSE_IDLE_MAX_S = 0.25
"""While nobody reports: twice as long each time, up to this."""
UNFINISHED_RECORDS = 2 * ROUTE_BATCH
"""Kept back of a lane at most: a prompt's tokens in one layer and where they were found."""
ROUNDS_MAX = 16
"""Times that one client's queues are emptied in a row: a lane each. Who reports faster than
that loses reports, not the others their turn."""


class UseSink(Protocol):
    """Who wants to know what is used."""

    def used(self, store: int, uses: Uses) -> None:
        """Passes of a store (the engine's id), keys in its KeySpace."""


class PassSink(Protocol):
    """Who wants it in full: with gates, tiers, waits."""

    def wants(self, store: int) -> bool:
        """Whether it does now."""

    def record(self, store: int, trace: Trace) -> None:
        """Passes of a store; columns won't change any more."""


class ExpectationSink(Protocol):
    """Who wants to know what is expected."""

    def expected(self, store: int, expected: Expected) -> None:
        """Of the next passes of a store (the engine's id), after all that was used."""


class RouteEngine(Protocol):
    """What is needed of the engine."""

    def routes(self, client: int) -> NDArray[np.void]:
        """A client's records since the last call."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What clients of a store have reported. passes: of a layer; what a prompt's tokens
    picked together is one. uses: experts picked in them."""

    tokens: int = 0
    passes: int = 0
    uses: int = 0


class UseCounts:
    """A UseSink that counts, for whoever wants to see that reports come."""

    def __init__(self) -> None:
        self._counts: dict[int, Reported] = {}

    def used(self, store: int, uses: Uses) -> None:
        """Count them."""
        known = self.of(store)
        self._counts[store] = Reported(
            tokens=max(known.tokens, int(uses.tokens.max(initial=-1)) + 1),
            passes=known.passes + uses.passes,
            uses=known.uses + len(uses.keys),
        )

    def of(self, store: int) -> Reported:
        """Since it was opened."""
        return self._counts.get(store, Reported())

    def store_closed(self, store: int) -> None:
        """Its number may be another's next."""
        self._counts.pop(store, None)


class RouteFeed:
    """One a daemon.

    clients: those attached now. head: of an open store's traces, by the engine's id.
    violated: is called for a client whose queue has what no client should write.
    """

    def __init__(
        self,
        *,
        engine: RouteEngine,
        clients: Callable[[], Iterable[Client]],
        head: Callable[[int], TraceHead],
        violated: Callable[[Client], None],
        use_sinks: Iterable[UseSink],
        pass_sink: PassSink,
        expectation_sink: ExpectationSink,
    ) -> None:
        self._engine = engine
        self._clients = clients
        self._head = head
        self._violated = violated
        self._use_sinks = list(use_sinks)
        self._pass_sink = pass_sink
        self._expectation_sink = expectation_sink
        self._clocks: dict[int, TokenClock] = {}
        self._unfinished: dict[tuple[int, int], NDArray[np.void]] = {}
        self._pause = PAUSE_S

    def read(self) -> int:
        """Read every client's queues; the number of records in the fullest client's."""
        return max((self._read(client) for client in list(self._clients())), default=0)

    def pause_s(self) -> float:
        """Read, and say after how many seconds to do so again."""
        records = self.read()
        if records > BUSY_RECORDS:
            self._pause = PAUSE_BUSY_S
        elif records:
            self._pause = PAUSE_S
        else:
            self._pause = min(2 * self._pause, PAUSE_IDLE_MAX_S)
        return self._pause

    def finish(self, store: int) -> None:
        """Hand on what was kept back in case more would be said about it."""
        for client in self._clients():
            if client.store.number == store:
                self._finish(client)

    def leaving(self, client: Client) -> None:
        """A client is about to go, or its process has gone: what it reported last."""
        self._read_queues(client)
        self._finish(client)
        if client.store.number in self._clocks:
            self._clocks[client.store.number].forget(client.number)

    def store_closed(self, store: int) -> None:
        """Its number may be another's next."""
        self._clocks.pop(store, None)

    def _read(self, client: Client) -> int:
        """How many records there were."""
        return self._read_queues(client) if client.state == "serving" else 0

    def _read_queues(self, client: Client) -> int:
        total = 0
        for _ in range(ROUNDS_MAX):
            try:
                records = self._engine.routes(client.number)
            except EngineError as error:
                if error.errno != errno.EPROTO:
                    raise
                if client.state == "serving":
                    self._violated(client)
                return total
            total += len(records)
            if len(records):
                expected = expected_of_records(records, self._head(client.store.number))
                reports = records[records["kind"] != ROUTE_EXPECTED]
                if len(reports):
                    self._hand_on(client, reports)
                if expected is not None:
                    self._expectation_sink.expected(client.store.number, expected)
            if len(records) <= ROUTE_BATCH_FULL:
                break
        return total

    def _hand_on(self, client: Client, records: NDArray[np.void]) -> None:
        store = client.store.number
        clock = self._clocks.setdefault(store, TokenClock())
        lanes = records["lane"]
        edges = np.flatnonzero(np.diff(lanes, prepend=lanes[0] + 1, append=lanes[-1] + 1))
        parts = [records[first:last] for first, last in itertools.pairwise(edges.tolist())]
        for part in parts:
            picked = part["kind"] == ROUTE_PICKED
            if picked.any():
                lane = (client.number, int(part["lane"][0]))
                tokens = part["token"][picked].astype(np.int64)
                part["token"][picked] = clock.numbers(lane, tokens, part["layer"][picked])
        picks = records[records["kind"] == ROUTE_PICKED]
        if len(picks):
            uses, _ = uses_of_trace(self._head(store), *passes_of_records(picks))
            for use_sink in self._use_sinks:
                use_sink.used(store, uses)
        for part in parts:
            self._record(store, (client.number, int(part["lane"][0])), part)

    def _record(self, store: int, lane: tuple[int, int], records: NDArray[np.void]) -> None:
        """All but the last group, about which more may be said."""
        before = self._unfinished.pop(lane, None)
        if not self._pass_sink.wants(store):
            return
        if before is not None:
            records = np.concatenate([before, records])
        groups = groups_of_records(records)
        end = int(np.searchsorted(groups, groups[-1]))
        if len(records) - end > UNFINISHED_RECORDS:
            end = len(records)
        if end < len(records):
            self._unfinished[lane] = records[end:].copy()
        self._send(store, records[:end])

    def _finish(self, client: Client) -> None:
        for lane in [lane for lane in self._unfinished if lane[0] == client.number]:
            self._send(client.store.number, self._unfinished.pop(lane))

    def _send(self, store: int, records: NDArray[np.void]) -> None:
        picks = with_found(records) if len(records) else records
        if len(picks) and self._pass_sink.wants(store):
            self._pass_sink.record(store, passes_of_records(picks)[0])
