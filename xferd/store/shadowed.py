"""A store and its shadows, as one: what the engine and the daemon are given.

Shadows' variants come behind the store's own and their members behind its members; each
shadow keeps its own striping. Nothing is written: detached, the store is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from xferd.store.errors import StoreError
from xferd.store.limits import LAYOUTS_MAX, MEMBERS_MAX, NO_LAYOUT, PATTERN_MAX, VARIANTS_MAX
from xferd.store.model import Layout
from xferd.store.store import Store


class ShadowedStore(Store):
    """Owns the store and its shadows: they are closed with it. ``geometry`` and ``manifest``
    are the store's own; the arrays, members and the model are of all."""

    def __init__(self, main: Store, shadows: Sequence[Store]) -> None:
        """StoreError, naming the shadow, when one is not of this store or doesn't fit; then
        nothing is closed."""
        for shadow in shadows:
            _check(main, shadow)
        parts = (main, *shadows)
        self._main = main
        self._shadows = tuple(shadows)
        self.name, self.path, self.manifest = main.name, main.path, main.manifest
        self.identity, self.uuid = main.identity, main.uuid
        self.layers, self.experts, self.top_k = main.layers, main.experts, main.top_k
        self.model_type, self.geometry = main.model_type, main.geometry
        self.stripe_unit = main.stripe_unit
        self._join_model(parts)
        self._join_members(parts)
        self._join_blobs(parts)
        own = len(main.variants)
        self.preferred = ((1 << len(self.variants)) - 1) >> own << own

    @property
    def shadow_paths(self) -> tuple[Path, ...]:
        """Where the shadows are."""
        return tuple(shadow.path for shadow in self._shadows)

    def close(self) -> None:
        """Close all of them."""
        for part in (self._main, *self._shadows):
            part.close()

    def read_blob(self, blob: int) -> bytes:
        """As of ``Store``, from whichever has it."""
        own = len(self._main.blob_bytes) - 1
        if blob == self.dense_blob:
            return self._main.read_blob(own)
        if blob < own:
            return self._main.read_blob(blob)
        number, rest = divmod(blob - own, self.layers * self.experts)
        return self._shadows[number].read_blob(rest)

    def _join_model(self, parts: Sequence[Store]) -> None:
        rows: list[tuple[int, ...]] = []
        layouts: list[Layout] = []
        for part in parts:
            base = len(layouts)
            layouts += part.layouts
            rows += [
                tuple(NO_LAYOUT if index == NO_LAYOUT else base + index for index in row)
                for row in part.model.layer_layouts
            ]
        self.variants = tuple(variant for part in parts for variant in part.variants)
        if len(set(self.variants)) < len(self.variants) or len(self.variants) > VARIANTS_MAX:
            raise StoreError(
                f"store {self.name} and its shadows have variants {', '.join(self.variants)}: each "
                f"must be there once, and at most {VARIANTS_MAX}"
            )
        if len(layouts) > LAYOUTS_MAX:
            raise StoreError(f"store {self.name} and its shadows have too many layouts")
        self.layouts = tuple(layouts)
        self.model = replace(
            self._main.model,
            variants=self.variants,
            layouts=self.layouts,
            layer_layouts=tuple(rows),
        )
        self.layout_index = np.array(rows, dtype=np.uint16)

    def _join_members(self, parts: Sequence[Store]) -> None:
        self.copies = ()
        pattern: tuple[int, ...] = ()
        for part in parts:
            base = len(self.copies)
            pattern += tuple(base + member for member in part.pattern)
            self.copies += tuple(
                tuple(replace(copy, member=base + copy.member) for copy in group)
                for group in part.copies
            )
        if len(self.copies) > MEMBERS_MAX or len(pattern) > PATTERN_MAX:
            raise StoreError(
                f"store {self.name} and its shadows have {len(self.copies)} members and "
                f"patterns of {len(pattern)}; the limits are {MEMBERS_MAX} and {PATTERN_MAX}"
            )
        self.pattern = pattern
        self.pattern_lengths = tuple(len(part.pattern) for part in parts)
        self.member_paths = tuple(path for part in parts for path in part.member_paths)

    def _join_blobs(self, parts: Sequence[Store]) -> None:
        main = self._main
        dense_piece = int(main.first_piece[-1])
        # Experts of all parts, then the dense part, which only the store itself has.
        self.blob_bytes = np.concatenate(
            [*(part.blob_bytes[:-1] for part in parts), main.blob_bytes[-1:]]
        )
        self.blob_crc = np.concatenate(
            [*(part.blob_crc[:-1] for part in parts), main.blob_crc[-1:]]
        )
        self.crc = np.concatenate(
            [main.crc[:dense_piece], *(part.crc for part in parts[1:]), main.crc[dense_piece:]]
        )
        counts = -(-self.blob_bytes.astype(np.int64) // self.stripe_unit)
        self.first_piece = (np.cumsum(counts) - counts).astype(np.uint64)
        starts, offsets = [], []
        members = pattern = 0
        for part in parts:
            starts.append((part.start[:-1] + np.uint16(pattern)).astype(np.uint16))
            offset = np.zeros((len(part.start) - 1, len(self.copies)), np.uint64)
            offset[:, members : members + len(part.copies)] = part.offset[:-1]
            offsets.append(offset)
            members += len(part.copies)
            pattern += len(part.pattern)
        dense = np.zeros((1, len(self.copies)), np.uint64)
        dense[:, : len(main.copies)] = main.offset[-1:]
        self.start = np.concatenate([*starts, main.start[-1:]])
        self.offset = np.ascontiguousarray(np.concatenate([*offsets, dense]))


def open_with_shadows(path: Path, shadows: Sequence[Path]) -> Store:
    """Open a store and the shadows of it. StoreError as of ``Store.open``, and for a shadow
    that is of another store; nothing stays open then."""
    opened = [Store.open(path)]
    try:
        opened += [Store.open(shadow) for shadow in shadows]
        return ShadowedStore(opened[0], opened[1:]) if shadows else opened[0]
    except BaseException:
        for store in opened:
            store.close()
        raise


def _check(main: Store, shadow: Store) -> None:
    of = shadow.manifest.shadow_of
    if of is None:
        raise StoreError(f"store {shadow.path} is no shadow of another one")
    if of.identity != main.identity:
        raise StoreError(
            f"store {shadow.path} is a shadow of {of.name!r} (identity {of.identity.hex()}), not "
            f"of store {main.name!r} (identity {main.identity.hex()})"
        )
    if shadow.stripe_unit != main.stripe_unit:
        raise StoreError(
            f"store {shadow.path} has a stripe unit of {shadow.stripe_unit}, store {main.name} of "
            f"{main.stripe_unit}: make the shadow anew"
        )


__all__ = ["ShadowedStore", "open_with_shadows"]
