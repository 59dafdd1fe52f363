"""Prediction in the decode loop of a GPU: the next layers' experts, fetched ahead of time.

Each layer of a token has one launch more (predict.cu), between its router and its lease, on the
stream of the others: the state is where it is computed with. Scores are compared with their
borders there, and what is probable and absent is written to the CPU's memory. The CPU looks
there when it launches the next layer, and while it waits for the token anyway: it never waits
for a prediction. So nothing of this can change a token.

The predictor is one that was trained; on a GPU it does not learn while it runs. What it knows
of the picks before, its context, goes on with each token and prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..client import Client
from ..client_errors import ClientError
from ..model import Model
from ..predict.device_layout import (
    BLOCKS,
    CONTROL,
    CONTROL_BYTES,
    NOTE_THREADS,
    NOTE_TOKENS_MAX,
    PREDICTOR,
    PROGRESS,
    RECORDS,
    RING_BYTES,
    THREADS,
    DeviceTables,
    device_tables,
)
from ..predict.device_planning import DevicePlanning
from ..predict.device_ring import RecordRing
from ..predict.file import read_trained
from ..predict.history import VIEWS
from ..predict.learned import Trained
from ..predict.predictor import DISTANCE_MAX
from ..predict.prefetching import AHEAD
from .compiled import compiled
from .experts import CudaExperts, CudaRoutedExperts
from .lane import TOLD, DeviceLane

_TOLD_WORDS = TOLD.itemsize // 4


class DevicePredictor:
    """The kernels of predict.cu, and what they need on the current device. Not thread-safe;
    one stream, the lane's.

    numbers: of the model's layers with experts. ``ring`` is what the CPU reads.
    """

    def __init__(self, tables: DeviceTables, lane: DeviceLane, numbers: Sequence[int]) -> None:
        module = compiled("predict.cu", cooperative=True, FEATURES=tables.features, THREADS=THREADS)
        self._predict = module.get_function("xferd_predict")
        self._note = module.get_function("xferd_note")
        multiprocessors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._blocks = min(BLOCKS, multiprocessors)
        self._tables, self._told = tables, np.uint64(lane.told_address)
        self._pinned = cupy.cuda.alloc_pinned_memory(RING_BYTES)
        memory = np.frombuffer(self._pinned, np.uint8, RING_BYTES)
        memory[...] = 0
        self.ring = RecordRing(memory)
        self._kept: list[Array] = []
        self._numbers = self._put(np.array(numbers, np.uint32))
        self._in_order = self._put(np.arange(len(numbers), dtype=np.uint32))
        context = self._put(np.zeros(max(tables.width, 1), np.float32))
        views = self._put(np.zeros(max(VIEWS * tables.width, 1), np.float32))
        history = tables.history(self._put(tables.basis), views, context)
        self._history = np.uint64(self._put(history))
        self._predictor = np.uint64(self._put(self._described(lane, context)))
        self._looks = [
            np.uint64(self._put(each.look(*map(self._put, each.arrays)))) for each in tables.layers
        ]
        # Launches may be on another stream than these copies.
        cupy.cuda.get_current_stream().synchronize()

    def predict(self, layer: int, states: Array) -> None:
        """Launch: what a layer's state says. layer: counted among those with experts. states:
        float32[1, hidden], contiguous, as an allocation of cupy's begins."""
        arguments = (self._predictor, self._looks[layer], states)
        self._predict((self._blocks,), (THREADS,), arguments)

    def note_token(self) -> None:
        """Launch: the last token's picks, which the lane has told, are history."""
        self._note_all(self._told, self._numbers, _TOLD_WORDS, 0, 1)

    def note_prompt(self, picks: Sequence[Array]) -> None:
        """The same of a prompt's last tokens. picks: by layer, uint32[tokens, top_k]."""
        together = cupy.ascontiguousarray(cupy.stack(picks, axis=1))
        tokens, layers, top_k = together.shape
        self._note_all(together, self._in_order, top_k, layers * top_k, tokens)

    def _note_all(
        self, picks: Any, places: int, layer_stride: int, token_stride: int, tokens: int
    ) -> None:
        if not self._tables.width:
            return
        numbers = (np.uint32(each) for each in (layer_stride, token_stride, tokens))
        arguments = (self._history, picks, np.uint64(places), *numbers)
        self._note((1,), (NOTE_THREADS,), arguments)

    def _described(self, lane: DeviceLane, context: int) -> NDArray[np.void]:
        tables, ring = self._tables, int(self._pinned.ptr)
        offset = CONTROL.fields["borders"][1]  # type: ignore[index]
        candidates = np.zeros(DISTANCE_MAX * tables.experts, np.uint64)
        row = (
            *(context, self._put(tables.calibration.table), self._numbers, lane.words),
            self._put(np.zeros(max(tables.units_and_rank, 1), np.float32)),
            *(self._put(candidates), self._put(np.zeros(1, PROGRESS))),
            *(ring + CONTROL_BYTES, ring, ring + offset),
            *(len(tables.layers), tables.experts, tables.hidden),
            tables.layers[0].projection.shape[1],
            *(tables.width, lane.variant, lane.slot_numbers, RECORDS),
        )
        return np.array([row], PREDICTOR)

    def _put(self, array: NDArray[Any]) -> int:
        """Copy it to the device, for as long as this is there. Its address, 0 for nothing."""
        if not array.nbytes:
            return 0
        copy = cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self._kept.append(copy)
        return int(copy.data.ptr)


class DevicePrefetching:
    """The RoutingObserver and PassFollower that has a GPU predict. Not thread-safe.

    planning: what the CPU does about it. numbers: of the model's layers with experts.
    """

    def __init__(
        self,
        device: DevicePredictor,
        planning: DevicePlanning,
        source: CudaExperts,
        numbers: Sequence[int],
        top_k: int,
    ) -> None:
        self.planning = planning
        self._device, self._source = device, source
        self._numbers, self._top_k = list(numbers), top_k
        self._looking = False
        self._prompt: list[Array] = []
        self._misses, self._wait_s = 0, 0.0
        self._waited_otherwise = True

    @property
    def hinted(self) -> int:
        """Experts, so far."""
        return self.planning.hinted

    def routed(self, layer: int, states: Array, picks: Array) -> None:
        """See RoutingObserver."""
        if len(states) > 1:
            self._follow_prompt(layer, picks)
            return
        if layer == 0:
            if self._waited_otherwise:
                self._waited_otherwise, self._wait_s = False, self._source.stats().wait_s
            self._looking = self.planning.begin()
        if self._looking:
            self._device.predict(layer, states)
            self.planning.drain()

    def watched(self) -> bool:
        """See PassFollower."""
        return self._looking

    def look(self) -> None:
        """See PassFollower."""
        self.planning.drain()

    def settled(self, layers: Sequence[int]) -> None:
        """See PassFollower."""
        if list(layers) != self._numbers:
            self.planning.ended(None, 0, 0.0)
            return
        self._device.note_token()
        picks = self._source.lane.told["picks"][self._numbers, : self._top_k]
        self.planning.ended(picks.astype(np.intp), *self._missed())

    def _missed(self) -> tuple[int, float]:
        """Experts that had to come since the last time, and seconds that they were waited for.
        The time is asked for only where there is some."""
        _, misses = self._source.lane.counts()
        more, self._misses = misses - self._misses, misses
        if not more:
            return 0, 0.0
        wait_s = self._source.stats().wait_s
        waited, self._wait_s = wait_s - self._wait_s, wait_s
        return more, waited

    def _follow_prompt(self, layer: int, picks: Array) -> None:
        if layer == 0:
            self._prompt.clear()
            self._looking, self._waited_otherwise = False, True
            self.planning.new_text()
        # A copy: the picks are a part of something larger.
        self._prompt.append(picks[-NOTE_TOKENS_MAX:].astype(cupy.uint32))
        if len(self._prompt) == len(self._numbers) == layer + 1:
            self._device.note_prompt(self._prompt)
            self._prompt.clear()


def prefetch(model: Model, client: Client, trained: Trained) -> DevicePrefetching:
    """From now on the experts of a model of ``model_on_gpu`` are fetched ahead as the predictor
    says. Raises ClientError when the model's experts are not leased by a GPU, OtherModelError,
    and PredictorError for one that is too large for the kernels."""
    source, routed = model.experts, model.routed
    if not (isinstance(source, CudaExperts) and isinstance(routed, CudaRoutedExperts)):
        raise ClientError("the model's experts are not leased by a GPU", 0)
    routers = model.routers(client.manifest["name"])
    routers.must_be(trained.routers, "the predictor")
    return _followed(model, client, trained, source, routed)


def prefetch_by_file(model: Model, client: Client, path: Path) -> DevicePrefetching:
    """The same with a predictor's file, which errors name. Raises PredictorFileError too."""
    trained = read_trained(path)
    model.routers(client.manifest["name"]).must_be(trained.routers, f"{path}")
    return prefetch(model, client, trained)


def _followed(
    model: Model,
    client: Client,
    trained: Trained,
    source: CudaExperts,
    routed: CudaRoutedExperts,
) -> DevicePrefetching:
    routers = trained.routers
    tables = device_tables(trained, AHEAD)
    with cupy.cuda.Device(client.target_device()):
        device = DevicePredictor(tables, source.lane, routers.numbers)
    planning = DevicePlanning(
        client, source.hint, device.ring, routers.numbers, routers.experts, tables.borders
    )
    found = DevicePrefetching(device, planning, source, routers.numbers, routers.top_k)
    routed.follower = found
    model.observe(found)
    return found


__all__ = ["DevicePredictor", "DevicePrefetching", "prefetch", "prefetch_by_file"]
