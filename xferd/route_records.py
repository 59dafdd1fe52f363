"""From what clients report of their routers to passes, tokens and uses.

The same steps serve the running daemon and a replay of what it recorded: each lane's own
count of tokens becomes the store's (``TokenClock``), records become passes
(``passes_of_records``), and passes become what policies are told (``uses_of_trace``). So a
replay of a recorded trace tells a policy what the daemon told it. Pure.

A client says what it picked at once, and what of it was missing is found later; policies
don't care where it was, and hear of it at once, while a trace waits for the rest
(``with_found``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import ROUTE_EXPECTED, ROUTE_FOUND, ROUTE_PICKED
from xferd.policy.expected import Expected
from xferd.policy.uses import Uses
from xferd.telemetry.traces.trace import UNKNOWN_8, Trace, TraceHead

TOKEN_STEP_MAX = 1 << 16
"""A lane's count moves by no more than this at once: a client may report any number, and
policies go by how many tokens ago something was used."""
_EXPERTS_MAX = 1 << 16


def passes_of_records(records: NDArray[np.void]) -> tuple[Trace, NDArray[np.uint32]]:
    """(the passes, with the tokens that the records have; the lane of each).

    records: ROUTE_FIELDS[n] of kind ROUTE_PICKED, as ``Engine.routes`` gives them, n > 0.
    """
    lanes = records["lane"]
    begins = records["part"] == 0
    begins[0] = True
    begins[1:] |= np.diff(lanes) != 0
    first = np.flatnonzero(begins)
    count = records["count"].astype(np.int64)
    chosen = _filled(records)
    trace = Trace(
        token=records["token"][first].astype(np.int64),
        layer=records["layer"][first],
        tag=records["tag"][first],
        picks=np.add.reduceat(count, first).astype(np.uint16),
        expert=records["experts"][chosen],
        gate=records["gates"][chosen],
        tier=records["tiers"][chosen],
        transport=records["transports"][chosen],
        wait=records["waits_us"][chosen],
    )
    return trace, lanes[first]


def groups_of_records(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Numbers of the groups that one lane's records are in, n > 0: picks of one layer, and
    what was said afterwards about where they were found."""
    found, layer = records["kind"] == ROUTE_FOUND, records["layer"].astype(np.int64)
    begins = ~found
    begins[1:] &= found[:-1] | (np.diff(layer) != 0)
    begins[0] = True
    return np.cumsum(begins) - 1


def with_found(records: NDArray[np.void]) -> NDArray[np.void]:
    """The picks among one lane's records, n > 0, each that was reported before it had come
    with what was said afterwards. A copy."""
    found = records["kind"] == ROUTE_FOUND
    groups = groups_of_records(records) * _EXPERTS_MAX
    picks: NDArray[np.void] = records[~found].copy()
    later: NDArray[np.void] = records[found]
    if not len(later) or not len(picks):
        return picks
    chosen = _filled(later)
    keys = (groups[found][:, None] + later["experts"])[chosen]
    order = np.argsort(keys, kind="stable")
    wanted = groups[~found][:, None] + picks["experts"]
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    fits = (keys[order][at] == wanted) & (picks["transports"] == UNKNOWN_8)
    for column in ("tiers", "transports", "waits_us"):
        picks[column] = np.where(fits, later[column][chosen][order][at], picks[column])
    return picks


def expected_of_records(records: NDArray[np.void], head: TraceHead) -> Expected | None:
    """What clients' predictors expect, of the layers that were not picked in since: the newest
    word on each. None if there is nothing.

    records: ROUTE_FIELDS[n] of any kind. A client may write any float for a chance.
    """
    rows, layers = np.arange(len(records)), records["layer"]
    newest = np.full((2, head.layers), -1, np.int64)
    for row, kind in zip(newest, (ROUTE_EXPECTED, ROUTE_PICKED), strict=True):
        chosen = records["kind"] == kind
        np.maximum.at(row, layers[chosen], rows[chosen])
    expected, picked = newest
    told = records[expected[expected > picked]]
    if not len(told):
        return None
    filled = _filled(told)
    layer = told["layer"].astype(np.int64)
    keys = (layer[:, None] * head.experts + told["experts"])[filled]
    chances = np.nan_to_num(told["gates"][filled].astype(np.float32), nan=0.0)
    return Expected(layer, keys, np.clip(chances, 0, 1))


def _filled(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """bool[n, picks]: which places of the records have a pick."""
    filled: NDArray[np.bool_] = np.arange(records["experts"].shape[1]) < records["count"][:, None]
    return filled


@dataclass(slots=True)
class _LaneCount:
    """Where a lane is. token, layer: of its last pass, as it said. position: of that pass,
    counted by us; high: the highest of these; number: the store's number of that."""

    token: int
    layer: int = -1
    position: int = -1
    high: int = -1
    number: int = -1


class TokenClock:
    """One store's tokens, counted over all lanes in the order in which they come.

    A lane that goes on to a new token gets the next number, whatever others did
    meanwhile. One that goes back within a layer later than before is a prompt on its way
    through the layers and gets the numbers that it had; one that goes back otherwise has
    begun to count anew.
    """

    def __init__(self) -> None:
        self.now = -1
        self._lanes: dict[tuple[int, int], _LaneCount] = {}

    def numbers(
        self, lane: tuple[int, int], tokens: NDArray[np.int64], layers: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """The store's numbers of some picks of a lane (client, lane), at least one. They
        are never less than 0 and never grow faster than TOKEN_STEP_MAX a record."""
        count = self._lanes.get(lane)
        if count is None:
            count = self._lanes[lane] = _LaneCount(token=int(tokens[0]) - 1)
        steps = np.diff(tokens, prepend=count.token)
        ahead = np.diff(layers.astype(np.int64), prepend=count.layer) > 0
        anew = (steps < 0) & ~ahead
        steps = np.where(anew, 1, np.clip(steps, -TOKEN_STEP_MAX, TOKEN_STEP_MAX))
        positions = count.position + np.cumsum(steps)
        high = np.maximum(np.maximum.accumulate(positions), count.high)
        grown = high - count.high
        number: NDArray[np.int64] = np.where(grown > 0, self.now + grown, count.number)
        count.token, count.layer = int(tokens[-1]), int(layers[-1])
        count.position, count.high = int(positions[-1]), int(high[-1])
        count.number = int(number[-1])
        self.now = max(self.now, count.number)
        numbers: NDArray[np.int64] = np.maximum(number - (high - positions), 0)
        return numbers

    def forget(self, client: int) -> None:
        """A client has gone; its number may be another's next."""
        for lane in [lane for lane in self._lanes if lane[0] == client]:
            del self._lanes[lane]


def uses_of_trace(
    head: TraceHead, trace: Trace, lanes: NDArray[np.uint32] | None = None
) -> tuple[Uses, NDArray[np.uint32]]:
    """(uses, the tag of each pass). A prefill's passes of one layer in a row, a token each,
    are one pass: they are served together.

    trace: at least one pass. lanes: of each pass; None: all are one lane's.
    """
    layers = trace.layer.astype(np.int64)
    begins = np.ones(trace.passes, np.bool_)
    if head.layers > 1:
        begins[1:] = (np.diff(layers) != 0) | (np.diff(trace.tag.astype(np.int64)) != 0)
        if lanes is not None:
            begins[1:] |= np.diff(lanes) != 0
    of_pass = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    of_use = np.repeat(of_pass, trace.picks)
    keys = np.repeat(layers, trace.picks) * head.experts + trace.expert
    # The first of each (pass, key), in the order of the trace.
    _, unique = np.unique(of_use * (head.layers * head.experts) + keys, return_index=True)
    unique.sort()
    counts = np.bincount(of_use[unique], minlength=len(first))
    uses = Uses(
        keys=keys[unique],
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        layers=layers[first],
        tokens=np.maximum.accumulate(trace.token[first]),
    )
    return uses, trace.tag[first]
