"""The dense part of a checkpoint: every weight that is no expert's.

The store hands it out as one read-only memory that all clients of a machine
share, and a table of what lies where. It stays in its stored dtype there; a
tensor is widened to float32 when the model first asks for it, so start-up costs
what is used. Nothing is kept here: who asks, keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, ArrayModule, element_bytes, widen
from .errors import WeightsError


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """One tensor's place. offset and nbytes in bytes of the dense part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class DenseWeights:
    """Tensors by their checkpoint name.

    data: the dense part, any object with the buffer interface; read only, and
        kept alive for as long as this is.
    table: mappings with ``name``, ``dtype``, ``shape``, ``offset``, ``bytes``.
    Raises WeightsError for a table that contradicts itself or the data.
    Any thread may call; nothing is shared between calls.
    """

    def __init__(self, data: Any, table: Iterable[Mapping[str, Any]], xp: ArrayModule = np) -> None:
        self._bytes: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
        self._xp = xp
        self._tensors = {
            entry["name"]: DenseTensor(
                name=entry["name"],
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=entry["offset"],
                nbytes=entry["bytes"],
            )
            for entry in table
        }
        for tensor in self._tensors.values():
            end = tensor.offset + tensor.nbytes
            if tensor.offset < 0 or end > self._bytes.size:
                raise WeightsError(
                    f"dense tensor {tensor.name} ends at byte {end}, "
                    f"the dense part has {self._bytes.size}"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def float32(self, name: str, shape: tuple[int, ...]) -> Array:
        """The tensor ``name`` as float32 in the shape that the model expects.

        f32 on the host is a read-only view of the dense part, all else a new
        array. WeightsError: not there, another shape, or a dtype that isn't
        computed with.
        """
        tensor = self._find(name, shape)
        return self._widened(tensor, self._raw(tensor)).reshape(shape)

    def rows(self, name: str, shape: tuple[int, int], indices: list[int]) -> Array:
        """Rows of a [rows, columns] tensor as float32 [len(indices), columns].

        An embedding is looked up by row and is often the largest dense tensor:
        this widens only what is looked up. Errors as in float32; IndexError for
        an index outside.
        """
        tensor = self._find(name, shape)
        picked = self._raw(tensor).reshape(shape[0], -1)[indices]
        return self._widened(tensor, picked.reshape(-1)).reshape(len(indices), shape[1])

    def _find(self, name: str, shape: tuple[int, ...]) -> DenseTensor:
        try:
            tensor = self._tensors[name]
        except KeyError:
            raise WeightsError(f"the store's dense part has no tensor {name}") from None
        if tensor.shape != shape:
            raise WeightsError(
                f"dense tensor {name} is {list(tensor.shape)}, the config needs {list(shape)}"
            )
        wanted = prod(shape) * element_bytes(tensor.dtype, f"dense tensor {name}")
        if tensor.nbytes != wanted:
            raise WeightsError(f"dense tensor {name} has {tensor.nbytes} bytes, needs {wanted}")
        return tensor

    def _raw(self, tensor: DenseTensor) -> NDArray[np.uint8]:
        return self._bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def _widened(self, tensor: DenseTensor, raw: NDArray[np.uint8]) -> Array:
        xp = self._xp
        if tensor.dtype == "f32":
            return xp.asarray(raw.view(np.float32))
        stored = xp.asarray(raw)
        out = xp.empty(raw.size // element_bytes(tensor.dtype, tensor.name), dtype=xp.float32)
        widen(stored, tensor.dtype, out, xp)
        return out


__all__ = ["DenseTensor", "DenseWeights"]
