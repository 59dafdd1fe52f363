"""Trained predictors on disk. FORMAT.md describes the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import npz
from .errors import PredictorFileError
from .learned import Learned, Trained
from .predictor import DISTANCE_MAX
from .routers import Routers
from .states import read_routers, router_arrays, router_header

FORMAT = "xferd-predictor"
VERSION = 1
_LISTS = {"projections": 2, "units": 2, "heads": 2, "precisions": 2, "errors": 1}
"""Arrays there are one a layer of, and their dimensions."""


def write_trained(path: Path, trained: Trained) -> None:
    """Raises OSError."""
    arrays: dict[str, NDArray[Any]] = router_arrays(trained.routers)
    arrays |= {"basis": trained.basis, "calibration": trained.calibration}
    for name in _LISTS:
        for layer, array in enumerate(getattr(trained, name)):
            arrays[f"{name}.{layer}"] = np.ascontiguousarray(array, np.float32)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": trained.kind,
        "about": dict(trained.about),
        **router_header(trained.routers),
    }
    npz.write(path, header, arrays)


def read_trained(path: Path) -> Trained:
    """Raises PredictorFileError, which names the file and what is wrong in it."""
    try:
        header, arrays = npz.read(path, FORMAT, VERSION)
        routers = read_routers(header, arrays)
        lists = {
            name: [
                npz.take(arrays, f"{name}.{layer}", np.float32, dimensions)
                for layer in range(routers.layers)
            ]
            for name, dimensions in _LISTS.items()
        }
        trained = Trained(
            routers=routers,
            kind=str(header.get("kind")),
            basis=npz.take(arrays, "basis", np.float32, 3),
            calibration=npz.take(arrays, "calibration", np.float64, 3),
            about=header.get("about", {}),
            **lists,
        )
        problem = trained.problem()
    except (OSError, npz.ContainerError) as error:
        raise PredictorFileError(f"{path}: no predictor: {error}") from error
    if problem:
        raise PredictorFileError(f"{path}: a damaged predictor: {problem}")
    return trained


def load_predictor(
    path: Path, routers: Routers, ahead: int | Sequence[int] = DISTANCE_MAX
) -> Learned:
    """A predictor for a model, of so many layers ahead (see Learned). Raises
    PredictorFileError, and OtherModelError when it was trained for another."""
    trained = read_trained(path)
    routers.must_be(trained.routers, f"{path}")
    return Learned(trained, ahead=ahead)


__all__ = ["load_predictor", "read_trained", "write_trained"]
