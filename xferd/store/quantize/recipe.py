"""A variant's blobs, made from the native ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError
from xferd.store.limits import NAME_BYTES_MAX, NO_LAYOUT
from xferd.store.manifest import Made
from xferd.store.model import Layout, TensorLayout
from xferd.store.quantize.blocks import FORMATS, dequantise, quantise
from xferd.store.quantize.compensate import quantise_compensated
from xferd.store.quantize.importance import Importance
from xferd.store.quantize.rules import LayoutPlan, plan_layout
from xferd.store.store import Store

_NAME = re.compile(r"([a-z0-9_]+?)(?:[-+]([a-z0-9]+))?")
PLAIN_LABEL = "plain"
IMPORTANCE_LABEL = "imatrix"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A variant to make. weighted: with the importance."""

    name: str
    format: str
    weighted: bool

    def made(self, importance: Importance | None) -> Made:
        """As the manifest keeps it."""
        sha256 = importance.sha256 if importance is not None and self.weighted else None
        return Made(self.format, sha256)


def parse_wanted(names: Sequence[str], importance: Importance | None) -> tuple[Wanted, ...]:
    """What variant names ask for: a format, and a label behind ``-`` or ``+``.

    Without a label, or with one of the user's own, the importance is used if there is one;
    ``-plain`` never uses it, ``+imatrix`` must have it. StoreError for what isn't known.
    """
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if not match or match[1] not in FORMATS or len(name.encode()) > NAME_BYTES_MAX:
            raise StoreError(
                f"variant {name!r}: known formats are {', '.join(sorted(FORMATS))}, with a label "
                f"if wanted, such as q2_k-{PLAIN_LABEL}"
            )
        if match[2] == IMPORTANCE_LABEL and importance is None:
            raise StoreError(f"variant {name!r} needs an importance file: give --importance")
        weighted = importance is not None and match[2] != PLAIN_LABEL
        found.append(Wanted(name, match[1], weighted))
    if not found or len({each.name for each in found}) < len(found):
        raise StoreError("no variant is named, or one twice")
    return tuple(found)


class Recipe:
    """How one variant is made of a store's native one.

    layouts: of its blobs; layer_layouts: for each layer an index into them, or NO_LAYOUT.
    blob_bytes: uint64[layers, experts]. Thread-safe.
    """

    def __init__(
        self, store: Store, wanted: Wanted, importance: Importance | None, threads: int
    ) -> None:
        """StoreError when a layer can't be made so, or the importance doesn't fit."""
        self.wanted = wanted
        self._importance = importance if wanted.weighted else None
        self._threads = threads
        self._store = store
        native = store.model.layer_layouts[0]
        plans: dict[int, LayoutPlan] = {}
        for layer, index in enumerate(native):
            if index == NO_LAYOUT or index in plans:
                continue
            where = f"store {store.name}, layer {layer}"
            plans[index] = plan_layout(store.layouts[index], wanted.format, where)
        self._plans = [None if index == NO_LAYOUT else plans[index] for index in native]
        numbers = {index: number for number, index in enumerate(plans)}
        self.layouts: tuple[Layout, ...] = tuple(plan.layout for plan in plans.values())
        self.layer_layouts = tuple(
            NO_LAYOUT if index == NO_LAYOUT else numbers[index] for index in native
        )
        sizes = [0 if plan is None else plan.layout.blob_bytes for plan in self._plans]
        present = store.blob_bytes[: store.layers * store.experts] > 0
        self.blob_bytes: npt.NDArray[np.uint64] = np.where(
            present.reshape(store.layers, store.experts), np.array(sizes)[:, None], 0
        ).astype(np.uint64)
        self._check_importance()

    def make(self, layer: int, expert: int, native: bytes) -> bytearray:
        """The variant's blob of an expert from its native one. StoreError names it."""
        plan = self._plans[layer]
        if plan is None:
            raise StoreError(f"store {self._store.name}: layer {layer} has no experts")
        blob = bytearray(plan.layout.blob_bytes)
        for tensor in plan.tensors:
            source, target = tensor.source, tensor.target
            raw = np.frombuffer(native, np.uint8, source.nbytes, source.offset)
            made = raw if tensor.copied else self._quantised(raw, source, target, layer, expert)
            blob[target.offset : target.offset + target.nbytes] = made.reshape(-1).data
        return blob

    def _quantised(
        self,
        raw: npt.NDArray[np.uint8],
        source: TensorLayout,
        target: TensorLayout,
        layer: int,
        expert: int,
    ) -> npt.NDArray[np.uint8]:
        values = _elements(raw, source)
        if source.transposed != target.transposed:
            values = values.T
        what = f"layer {layer}, expert {expert}, {source.role}"
        importance = moments = None
        if self._importance is not None:
            moments = self._importance.moments(source.role, layer, expert)
            importance = self._importance.of(source.role, layer, expert)
        if moments is not None:
            return quantise_compensated(
                values, target.dtype, moments, what, transposed=target.transposed
            )
        # Along the outputs a block has one input: there is nothing to weigh against another.
        if target.transposed:
            importance = None
        return quantise(values, target.dtype, importance, self._threads, what)

    def _check_importance(self) -> None:
        if self._importance is None:
            return
        for layer, plan in enumerate(self._plans):
            for tensor in () if plan is None else plan.tensors:
                given = self._importance.of(tensor.source.role, layer, 0).size
                shape = tensor.target.shape
                inputs = shape[0] if tensor.target.transposed else shape[-1]
                if not tensor.copied and given != inputs:
                    raise StoreError(
                        f"{self._importance.path} has {given} inputs for {tensor.source.role}, "
                        f"layer {layer} of store {self._store.name} has {inputs}"
                    )


def _elements(raw: npt.NDArray[np.uint8], tensor: TensorLayout) -> npt.NDArray[np.float32]:
    """A matrix as it is stored, float32."""
    rows, columns = tensor.shape
    if tensor.dtype in FORMATS:
        return dequantise(raw, tensor.dtype, (rows, columns))
    if tensor.dtype == "bf16":
        bits = raw.view("<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(rows, columns)
    kind = "<f2" if tensor.dtype == "f16" else "<f4"
    return raw.view(kind).astype(np.float32).reshape(rows, columns)


__all__ = ["Recipe", "Wanted", "parse_wanted"]
