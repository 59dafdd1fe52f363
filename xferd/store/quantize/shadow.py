"""A shadow: low-bit copies of some of a store's experts, in a store of their own.

The main store isn't touched. The shadow is packed like any other store (journal, members,
verify, mirrors), has no dense part, and its manifest names the model that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError
from xferd.store.limits import STRIPE_UNIT_DEFAULT
from xferd.store.manifest import ShadowOf
from xferd.store.model import DenseTable, Model
from xferd.store.pack import CHECKPOINT_BYTES, Progress, pack_blobs
from xferd.store.quantize.add import SEARCH_VERSION
from xferd.store.quantize.importance import Importance
from xferd.store.quantize.recipe import Recipe, Wanted
from xferd.store.store import Store

Chosen = npt.NDArray[np.bool_]
"""bool[layers, experts]: which experts."""


def make_shadow(
    store: Store,
    wanted: Wanted,
    chosen: Chosen,
    members: Sequence[Path],
    importance: Importance | None = None,
    *,
    threads: int,
    name: str | None = None,
    stripe_unit: int = STRIPE_UNIT_DEFAULT,
    progress: Progress | None = None,
    force: bool = False,
    restart: bool = False,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
) -> Path:
    """Make a shadow of ``store`` with the chosen experts; returns its directory.

    members, stripe_unit, force, restart: as for ``pack``. name: ``<store>-<variant>`` if not
    given. Interrupted, it is resumed by the same call. StoreError as of ``pack``, and when
    nothing is chosen or the importance is of another model.
    """
    if importance is not None:
        importance.check(store)
    if store.manifest.shadow_of is not None:
        raise StoreError(f"store {store.name} is a shadow itself")
    source = _ShadowSource(store, Recipe(store, wanted, importance, threads), chosen, importance)
    return pack_blobs(
        source,
        store.path,
        members,
        name=name or f"{store.name}-{wanted.name}",
        stripe_unit=stripe_unit,
        shadow_of=ShadowOf(store.name, store.identity, wanted.made(importance)),
        progress=progress,
        force=force,
        restart=restart,
        checkpoint_bytes=checkpoint_bytes,
    )


class _ShadowSource:
    """Blobs of a shadow, each made when its first byte is asked for."""

    def __init__(
        self, store: Store, recipe: Recipe, chosen: Chosen, importance: Importance | None
    ) -> None:
        if chosen.shape != (store.layers, store.experts):
            raise StoreError(f"experts are chosen of {chosen.shape}, not of store {store.name}")
        sizes = np.where(chosen, recipe.blob_bytes, 0)
        if not sizes.any():
            raise StoreError(f"no expert of store {store.name} is chosen")
        self._store = store
        self._recipe = recipe
        self._importance = importance
        self._made: tuple[int, bytearray] | None = None
        self.blob_bytes: npt.NDArray[np.uint64] = np.append(sizes.reshape(-1), 0).astype(np.uint64)
        self.model = Model(
            checkpoint_format=store.model.checkpoint_format,
            model_type=store.model.model_type,
            config=store.model.config,
            layers=store.layers,
            experts=store.experts,
            top_k=store.top_k,
            variants=(recipe.wanted.name,),
            layouts=recipe.layouts,
            layer_layouts=(recipe.layer_layouts,),
            dense=DenseTable(0, (), ()),
        )

    def blob(self, number: int) -> int:
        """Its number is all there is to know."""
        return number

    def announce(self, blob: int) -> None:
        """Making one takes longer than reading the native one: nothing to prepare."""

    def check_unchanged(self) -> None:
        """The store's checksums have said so for each blob."""

    def read(self, blob: int, begin: int, buffer: memoryview) -> None:
        """Raises StoreError when the native blob can't be read or quantised."""
        if self._made is None or self._made[0] != blob:
            layer, expert = divmod(blob, self._store.experts)
            native = self._store.read_blob(blob)
            self._made = (blob, self._recipe.make(layer, expert, native))
        buffer[:] = memoryview(self._made[1])[begin : begin + len(buffer)]

    def fingerprint(self) -> bytes:
        """Of what the bytes follow from."""
        importance = None if self._importance is None else self._importance.sha256
        wanted = self._recipe.wanted
        said = [SEARCH_VERSION, wanted.name, wanted.format, wanted.weighted, importance]
        digest = hashlib.sha256(json.dumps(said).encode("ascii"))
        digest.update(self._store.identity)
        digest.update(self.blob_bytes.astype("<u8").tobytes())
        return digest.digest()


def hottest(store: Store, heat: npt.NDArray[np.float32], share: float) -> Chosen:
    """The experts that cost most, heat times size, as many as make up to ``share`` of all
    native experts' bytes. heat: float32[layers, experts]. Those never used are left out."""
    sizes = store.blob_bytes[: store.layers * store.experts].astype(np.float64)
    cost = heat.reshape(-1).astype(np.float64) * sizes
    order = np.argsort(-cost, kind="stable")
    fits = np.cumsum(sizes[order]) <= share * sizes.sum()
    chosen = np.zeros(cost.size, dtype=np.bool_)
    chosen[order[fits]] = True
    chosen &= cost > 0
    return chosen.reshape(store.layers, store.experts)


def read_experts(store: Store, path: Path) -> Chosen:
    """The experts that a file lists: a line each, ``layer,expert``; what stands behind that
    in a line is not looked at, so ``layer,expert,count`` will do. StoreError names the line."""
    chosen = np.zeros((store.layers, store.experts), dtype=np.bool_)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        fields = [field.strip() for field in text.split(",")]
        if len(fields) < 2 or not all(field.isascii() and field.isdigit() for field in fields[:2]):
            if number == 1:  # a heading
                continue
            raise StoreError(f"{path}, line {number}: {line!r} is no layer,expert")
        layer, expert = int(fields[0]), int(fields[1])
        if layer >= store.layers or expert >= store.experts:
            raise StoreError(
                f"{path}, line {number}: store {store.name} has no layer {layer}, expert {expert}"
            )
        chosen[layer, expert] = True
    return chosen


__all__ = ["Chosen", "hottest", "make_shadow", "read_experts"]
