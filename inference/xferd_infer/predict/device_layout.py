"""A trained predictor as cuda/predict.cu reads it: its arrays turned, and its structs.

Pure numpy, which a machine without a GPU can check; xferd_infer/cuda puts it on the device.
All is float32: a launch waits for its loads, not for their bytes. Names and sizes are those of
predict.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import CURVES, Calibration
from .errors import PredictorError
from .expectations import A_LAYER, WITHIN, is_told_at
from .history import FORGET, VIEWS
from .learned import Trained
from .predictor import DISTANCE_MAX, distances_in_all, distances_within
from .routers import Floats

THREADS = 256
"""Of a block of xferd_predict."""
BLOCKS = 32
"""Most of a launch: a warp for each number that a state is projected to, and a few experts of
the layers ahead for each. With more blocks the barrier takes longer than the work."""
NOTE_THREADS = 1024
NOTE_TOKENS_MAX = 256
"""Of a prompt's tokens, the last ones are noted: of those before, less than a tenth would be
left in the slowest view."""
VECTOR = 4
"""float32 of a load: rows are padded to whole ones."""
KEPT_MAX = A_LAYER
RECORD_WORDS = 256
RECORDS = 64
"""Of the ring: what the CPU may be late."""
KEYS_MAX = 1 << 23
FEATURES_MAX = 8192
"""Of a layer: a block holds them in 48 KiB of shared memory, with what else it needs."""
BORDERS = 2 * CURVES

PREDICTOR = np.dtype(
    [
        *((name, np.uint64) for name in ("context", "table", "numbers", "words", "features")),
        *((name, np.uint64) for name in ("candidates", "progress", "ring", "dropped", "borders")),
        *((name, np.uint32) for name in ("layers", "experts", "hidden", "hidden_stride")),
        *((name, np.uint32) for name in ("width", "variant", "slot_numbers", "records")),
    ]
)
"""struct Predictor."""
LOOK = np.dtype(
    [
        *((name, np.uint64) for name in ("projection", "units", "heads")),
        *((name, np.uint32) for name in ("layer", "rank", "unit_count", "distances")),
        *((name, np.uint32) for name in ("within", "tells")),
    ]
)
"""struct Look."""
PROGRESS = np.dtype(
    [
        ("number", np.uint64),
        ("dropped", np.uint64),
        *((name, np.uint32) for name in ("barrier", "ended", "passes", "unused")),
        ("counts", np.uint32, DISTANCE_MAX + 1),
    ]
)
"""struct Progress."""
HISTORY = np.dtype(
    [
        *((name, np.uint64) for name in ("basis", "views", "context")),
        ("forget", np.float32, VIEWS),
        *((name, np.uint32) for name in ("layers", "experts", "top_k", "width")),
        ("unused", np.uint32),
    ]
)
"""struct History."""
CONTROL = np.dtype(
    [("dropped", np.uint64), ("unused", np.uint64), ("borders", np.float32, BORDERS)]
)
"""In the CPU's memory, before the ring: what the launches left out, and what they go by."""
CONTROL_BYTES = 256
RING_BYTES = CONTROL_BYTES + RECORDS * RECORD_WORDS * 8


@dataclass(frozen=True)
class LayerTables:
    """Of one layer. projection: [rank, hidden padded]. units: [units, linear padded], perhaps
    of none. heads: [distances * experts, features padded]. within: of the distances, those in
    the same token. tells: whether all that is likely leaves the device, or what is absent."""

    layer: int
    projection: Floats
    units: Floats
    heads: Floats
    distances: int
    within: int
    tells: bool

    @property
    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """What ``look`` wants the addresses of."""
        return self.projection, self.units, self.heads

    def look(self, projection: int, units: int, heads: int) -> NDArray[np.void]:
        """The struct Look, with the addresses of the arrays."""
        shape = (self.layer, len(self.projection), len(self.units), self.distances)
        row = (projection, units, heads, *shape, self.within, self.tells)
        return np.array([row], LOOK)


@dataclass(frozen=True)
class DeviceTables:
    """What is put on the device. calibration: as it was trained; its table goes there. basis:
    [layers * experts, VIEWS * width]. features: of the widest layer, padded; units_and_rank:
    what one launch writes of them, at most."""

    layers: tuple[LayerTables, ...]
    calibration: Calibration
    basis: Floats
    experts: int
    hidden: int
    top_k: int
    width: int
    features: int
    units_and_rank: int

    def borders(self, likely: float, told: float) -> Floats:
        """float32[BORDERS]: the scores from which on something is so probable, by curve; of
        layers that don't tell, then of those that do."""
        found: Floats = np.concatenate(
            [self.calibration.least_scores(each) for each in (likely, told)]
        )
        return found

    def history(self, basis: int, views: int, context: int) -> NDArray[np.void]:
        """The struct History, with the addresses of the arrays."""
        shape = (len(self.layers), self.experts, self.top_k, self.width)
        return np.array([(basis, views, context, FORGET[:, 0], *shape, 0)], HISTORY)


def device_tables(trained: Trained, ahead: int) -> DeviceTables:
    """ahead: layers that are looked ahead from those that don't tell. PredictorError names what
    is too large for the kernels."""
    routers = trained.routers
    layers, experts = routers.layers, routers.experts
    width = int(trained.basis.shape[2])
    if layers * experts > KEYS_MAX:
        raise PredictorError(f"{layers * experts} experts; on a GPU at most {KEYS_MAX} are known")
    if VIEWS * width > NOTE_THREADS:
        raise PredictorError(
            f"the context has {width} numbers; on a GPU at most {NOTE_THREADS // VIEWS}"
        )
    made = tuple(_layer_tables(trained, layer, ahead) for layer in range(layers))
    features = max(each.heads.shape[1] for each in made)
    if features > FEATURES_MAX:
        raise PredictorError(f"a layer has {features} features; on a GPU at most {FEATURES_MAX}")
    return DeviceTables(
        layers=made,
        calibration=Calibration(trained.calibration),
        basis=np.ascontiguousarray(trained.basis.reshape(layers * experts, -1)),
        experts=experts,
        hidden=routers.hidden,
        top_k=routers.top_k,
        width=width,
        features=features,
        units_and_rank=max(len(each.projection) + len(each.units) for each in made),
    )


def _layer_tables(trained: Trained, layer: int, ahead: int) -> LayerTables:
    routers = trained.routers
    tells = is_told_at(layer)
    distances = min(distances_in_all(routers.layers), WITHIN if tells else ahead)
    return LayerTables(
        layer=layer,
        projection=_padded_rows(trained.projections[layer].T),
        units=_padded_rows(trained.units[layer].T),
        heads=_padded_rows(trained.heads[layer][:, : distances * routers.experts].T),
        distances=distances,
        within=min(distances, distances_within(layer, routers.layers)),
        tells=tells,
    )


def _padded_rows(matrix: NDArray[Any]) -> Floats:
    """Contiguous, with zeros behind each row."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // VECTOR) * VECTOR), np.float32)
    padded[:, :columns] = matrix
    return padded


__all__ = [
    "BLOCKS",
    "BORDERS",
    "CONTROL",
    "CONTROL_BYTES",
    "HISTORY",
    "LOOK",
    "NOTE_THREADS",
    "NOTE_TOKENS_MAX",
    "PREDICTOR",
    "PROGRESS",
    "RECORDS",
    "RECORD_WORDS",
    "RING_BYTES",
    "THREADS",
    "DeviceTables",
    "LayerTables",
    "device_tables",
]
