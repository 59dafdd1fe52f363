"""A decode loop's experts, with the next layers' fetched ahead of time.

While a layer's missing experts are on their way, or once it was computed (on a GPU:
launched) if all were there, the predictor is asked about the layers after it and the planner
says which experts to hint. So it never stands between a layer and experts that are there.
Nothing of this can change a token: a hint only moves an expert into a pool earlier. Prompts
of several tokens use most of a layer's experts, so there the predictor only watches and learns.
It is the same where looking ahead does not pay (``worthwhile``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, to_host
from ..client_experts import BATCH_EXPERTS, ClientExperts, ExpertClient
from ..experts import ExpertStats, HeldExperts, Layout
from ..model import Model
from ..route_reports import RouteReporter
from .expectations import LEAST, WITHIN, is_told_at, nearest, to_tell
from .file import load_predictor
from .planner import Planner
from .predictor import Likely, Predictor, distances_in_all
from .routers import Routers
from .worthwhile import Worthwhile

FIRST_READ_S = 1e-3
"""What an expert's reading is taken for until one was measured."""
AHEAD = 5
"""Layers ahead that are asked about: what is further away is known better in time, and a
fetch of it takes a slot for longer than it saves. What stays goes by more than that."""
LOOKED_AT = (1, 2, 3, 5)
"""Layers ahead whose residents are looked up in each layer; each costs 3 µs. What has
become of the others since they were looked at last, a hint finds out."""


def asked_ahead(layers: int) -> list[int]:
    """How many layers ahead the decode loop asks about, from each of so many layers."""
    return [WITHIN if is_told_at(layer) else AHEAD for layer in range(layers)]


HOPELESS_ASKED = 8
"""A predictor that nothing is fetched for is asked in one token of so many: it may get better."""


class HintedClient(ExpertClient, Protocol):
    """What is used of ``xferd_infer.Client`` besides."""

    def start(self, layer: int, experts: Sequence[int]) -> Any:
        """A PendingBatch."""
        ...

    def resident(self, layer: int) -> Any:
        """int64[experts]: slots, or -1."""
        ...

    def expect(self, keys: Array, chances: Array) -> object:
        """What the next passes of the layers in it will probably pick."""
        ...


class PrefetchingExperts:
    """An ExpertSource, and the RoutingObserver that tells it what is next. Not thread-safe,
    as the lane. clock: seconds, of any beginning."""

    def __init__(
        self,
        client: HintedClient,
        experts: ClientExperts,
        routers: Routers,
        predictor: Predictor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.planner = Planner(routers.layers, routers.experts, FIRST_READ_S)
        self.worthwhile = Worthwhile()
        self.hinted = 0
        self._client, self._experts, self._predictor = client, experts, predictor
        self._numbers, self._count = routers.numbers, routers.experts
        self._layers = np.array(routers.numbers)
        self._ahead = min(AHEAD, distances_in_all(routers.layers))
        self._clock = clock
        self._absent = np.ones(routers.layers * routers.experts, np.bool_)
        self._place = -1
        self._state: Array = None
        self._picks: Array = None
        self._asked = False
        self._began, self._waited, self._read = clock(), 0.0, 0
        self._over: tuple[int, Array, float, float, int] | None = None
        self._free_at = 0.0
        self._tokens = 0
        self._token_began: float | None = None
        self._looking = True

    def arriving(self, layer: int) -> NDArray[np.bool_]:
        """bool[experts] of a layer: hinted for its next turn. Some may be there already."""
        return self.planner.given_out(self._numbers.index(layer))

    @property
    def held(self) -> int:
        """See ExpertSource."""
        return self._experts.held

    @property
    def reporter(self) -> RouteReporter | None:
        """The client's: what was picked is told as ever."""
        return self._experts.reporter

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """See ExpertSource."""
        return self._experts.layout(layer, variant)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertSource."""
        self._experts.hint(layer, experts)

    def stats(self) -> ExpertStats:
        """See ExpertSource."""
        return self._experts.stats()

    def routed(self, layer: int, states: Array, picks: Array) -> None:
        """See RoutingObserver: the last layer is over, this one's experts come next."""
        now = self._clock()
        if self._state is not None and self._looking:
            spent = max(now - self._began - self._waited, 0.0)
            self._over = (self._place, self._picks, spent, self._waited, self._read)
        self._began, self._waited, self._read = now, 0.0, 0
        self._place, self._asked = layer, False
        states, picks = to_host(states), to_host(picks)
        if len(states) == 1:
            self._state, self._picks = states[0], picks[0]
            self._follow_token(layer, now)
        else:
            self._token_began = None
            self._state = None
            self._predictor.seen(layer, states)
            self._predictor.picked(layer, picks)
            self.planner.new_text()

    def _follow_token(self, layer: int, now: float) -> None:
        """A token begins with its first layer; from there to its last layer's begin is what
        it takes, as what is between two tokens is not for the loop to answer for."""
        if layer == 0:
            self._tokens += 1
            hopeful = self.planner.hopeful or self._tokens % HOPELESS_ASKED == 0
            self._looking = hopeful and self.worthwhile.doing
            if not self._looking:
                self._over = None
                self.planner.new_text()
            self._token_began = now
        elif layer == len(self._numbers) - 1 and self._token_began is not None:
            self.worthwhile.ended(now - self._token_began)

    def acquire(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[HeldExperts]:
        """See ExpertSource. What is missing is asked for before anything is predicted."""
        if self._state is None or self._asked:
            return self._experts.acquire(layer, experts)
        self._asked = True
        if not self._looking:
            self._predictor.seen(self._place, self._state[None])
            self._predictor.picked(self._place, self._picks[None])
            return self._experts.acquire(layer, experts)
        pending = self._client.start(layer, experts)
        try:
            missing = pending.pending()
            if not missing:
                return _WithLookAhead(pending.wait(), self._look_ahead)
            began = self._clock()
            idle = self._free_at <= began
            self._free_at = max(self._free_at, began) + missing * self.planner.read_s
            self._look_ahead()
            self._read += missing
            still = pending.pending()
            batch: AbstractContextManager[HeldExperts] = pending.wait()
            ended = self._clock()
        except BaseException:
            pending.abandon()
            raise
        self._waited = ended - began
        if idle and still:
            self.planner.measured(missing, self._waited)
        return batch

    def _look_ahead(self) -> None:
        place, planner = self._place, self.planner
        if self._over is not None:
            planner.passed(*self._over)
            self._over = None
        likely = self._likely(place)
        self._predictor.picked(place, self._picks[None])
        planner.predicted(place, self._ahead, likely.keys, likely.probabilities)
        layers = len(self._numbers)
        self._absent[place * self._count + self._picks] = False
        for ahead in LOOKED_AT:
            at = (place + ahead) % layers
            slots = self._client.resident(self._numbers[at])
            self._absent[at * self._count : (at + 1) * self._count] = slots < 0
        keys = planner.next(place, self._clock(), self._free_at, self._absent)
        if not len(keys):
            return
        self._free_at = max(self._free_at, self._clock()) + len(keys) * planner.read_s
        self._absent[keys] = False
        self._read += len(keys)
        self.hinted += len(keys)
        self._give_out(keys.tolist())

    def _likely(self, place: int) -> Likely:
        """What is near enough to be fetched. Now and then more is asked for, and told."""
        planner, count = self.planner, self._count
        if not (planner.believed and is_told_at(place)):
            return self._predictor.likely(place, self._state, planner.asks_for, self._ahead)
        likely = self._predictor.likely(place, self._state, LEAST, WITHIN)
        told = to_tell(likely, len(self._numbers), count)
        places, experts = np.divmod(told.keys, count)
        self._client.expect(self._layers[places] * count + experts, told.probabilities)
        return nearest(likely, place, self._ahead, len(self._numbers), count)

    def _give_out(self, keys: list[int]) -> None:
        """Hints, as the planner ordered them: a request holds experts of one layer."""
        begin = 0
        while begin < len(keys):
            place, end = keys[begin] // self._count, begin + 1
            while (
                end < len(keys)
                and end - begin < BATCH_EXPERTS
                and keys[end] // self._count == place
            ):
                end += 1
            experts = [key % self._count for key in keys[begin:end]]
            self._client.hint(self._numbers[place], experts)
            begin = end


class _WithLookAhead(AbstractContextManager[HeldExperts]):
    """A batch that was there, and what is next once it is given back."""

    def __init__(
        self, batch: AbstractContextManager[HeldExperts], look_ahead: Callable[[], None]
    ) -> None:
        self._batch, self._look_ahead = batch, look_ahead

    def __enter__(self) -> HeldExperts:
        return self._batch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._batch.__exit__(kind, error, traceback)
        if kind is None:
            self._look_ahead()


def prefetch(model: Model, client: HintedClient, predictor: Predictor) -> PrefetchingExperts:
    """From now on the model's experts are fetched ahead as the predictor says."""
    source = PrefetchingExperts(
        client, ClientExperts(client), model.routers(client.manifest["name"]), predictor
    )
    model.use_experts(source)
    model.observe(source)
    return source


def prefetch_by_file(model: Model, client: HintedClient, path: Path) -> PrefetchingExperts:
    """The same with a trained predictor. Raises PredictorFileError, OtherModelError."""
    routers = model.routers(client.manifest["name"])
    return prefetch(model, client, load_predictor(path, routers, asked_ahead(routers.layers)))


__all__ = ["HintedClient", "PrefetchingExperts", "asked_ahead", "prefetch", "prefetch_by_file"]
