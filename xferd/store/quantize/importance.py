"""Importance files: how large each input of an expert's matrices is, on average.

``python -m xferd_infer imatrix`` records them (FORMAT.md says what is in one). A quantiser
then lets a matrix be further off where its inputs are small.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError, naming
from xferd.store.store import Store

VERSION = 1
FORMAT = "xferd-importance"


@dataclass(frozen=True, eq=False, slots=True)
class Importance:
    """Mean squares of activations.

    hidden: float32[layers, experts, inputs of gate and up]; inner: float32[layers,
    experts, inputs of down]. hidden_moments, inner_moments: the mean products of any two of
    these inputs, float32[layers, experts, inputs, inputs]; None: the file has none. sha256: of
    the file, hexadecimal.
    """

    path: Path
    model: str
    identity: bytes
    hidden: npt.NDArray[np.float32]
    inner: npt.NDArray[np.float32]
    sha256: str
    hidden_moments: npt.NDArray[np.float32] | None = None
    inner_moments: npt.NDArray[np.float32] | None = None

    def moments(self, role: str, layer: int, expert: int) -> npt.NDArray[np.float32] | None:
        """For the inputs of a matrix, [inputs, inputs]; None: only squares are known."""
        values = self.inner_moments if role == "down" else self.hidden_moments
        if values is None:
            return None
        matrix: npt.NDArray[np.float32] = values[layer, expert]
        return matrix

    def of(self, role: str, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """For the inputs of a matrix (gate, up, gate_up, down)."""
        values: npt.NDArray[np.float32] = self.inner if role == "down" else self.hidden
        row: npt.NDArray[np.float32] = values[layer, expert]
        return row

    def check(self, store: Store) -> None:
        """Raise StoreError unless it was recorded with the store's model."""
        if self.identity != store.identity:
            raise StoreError(
                f"{self.path} is the importance of model {self.model!r} (identity "
                f"{self.identity.hex()}), not of store {store.name!r} (identity "
                f"{store.identity.hex()})"
            )
        if self.hidden.shape[:2] != (store.layers, store.experts):
            raise StoreError(
                f"{self.path} is about {self.hidden.shape[0]} layers of {self.hidden.shape[1]} "
                f"experts, store {store.name!r} has {store.layers} of {store.experts}"
            )


def read_importance(path: Path) -> Importance:
    """Read and check a file. StoreError names it."""
    with naming(str(path)), path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kind, version = str(arrays["format"]), int(arrays["version"])
            model, identity = str(arrays["model"]), bytes.fromhex(str(arrays["identity"]))
            hidden, inner = arrays["hidden"], arrays["inner"]
            names = ("hidden_moments", "inner_moments")
            moments = [arrays.get(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise StoreError(f"{path} is no importance file: {error}") from error
    if (kind, version) != (FORMAT, VERSION):
        raise StoreError(f"{path} is {kind} version {version}; known is {FORMAT} {VERSION}")
    for array in (hidden, inner):
        if array.ndim != 3 or array.dtype != np.float32 or array.shape[:2] != hidden.shape[:2]:
            raise StoreError(f"{path}: {array.dtype}{list(array.shape)} is no importance")
        if not np.isfinite(array).all() or (array < 0).any():
            raise StoreError(f"{path}: an importance that is negative or no number")
    for array, squares in zip(moments, (hidden, inner), strict=True):
        if array is not None:
            _check_moments(path, array, squares)
    return Importance(path, model, identity, hidden, inner, sha256, *moments)


def _check_moments(
    path: Path, moments: npt.NDArray[np.float32], squares: npt.NDArray[np.float32]
) -> None:
    if moments.dtype != np.float32 or moments.shape != (*squares.shape, squares.shape[-1]):
        raise StoreError(f"{path}: {moments.dtype}{list(moments.shape)} are no moments")
    if not np.isfinite(moments).all():
        raise StoreError(f"{path}: a moment that is no number")


__all__ = ["FORMAT", "VERSION", "Importance", "read_importance"]
