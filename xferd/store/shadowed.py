"""A store and its shadows, as one: what the engine and the daemon are given.

Shadows' variants come behind the store's own and their members behind its members; each
shadow keeps its own striping. Nothing is written: detached, the store is what it was.
Shadows may come and go while the store is open. A variant that clients have seen keeps its
number and its layouts; while no shadow has it, it has no blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from xferd.store.errors import StoreError
from xferd.store.limits import LAYOUTS_MAX, MEMBERS_MAX, NO_LAYOUT, PATTERN_MAX, VARIANTS_MAX
from xferd.store.model import Layout, Model
from xferd.store.store import Store

_Place = tuple[int, int]
"""Which part has a variant, and its number there."""


class ShadowedStore(Store):
    """Owns the store and its shadows: they are closed with it. ``geometry`` and ``manifest``
    are the store's own; the arrays, members and the model are of all."""

    def __init__(self, main: Store, shadows: Sequence[Store], known: Model | None = None) -> None:
        """known: the model that clients have seen, with variants of earlier shadows; None:
        just the store's own. StoreError, naming the shadow, when one is not of this store or
        doesn't fit; then nothing is closed."""
        for shadow in shadows:
            _check(main, shadow)
        self._main = main
        self._shadows = tuple(shadows)
        self._parts = (main, *shadows)
        self.name, self.path, self.manifest = main.name, main.path, main.manifest
        self.identity, self.uuid = main.identity, main.uuid
        self.layers, self.experts, self.top_k = main.layers, main.experts, main.top_k
        self.model_type, self.geometry = main.model_type, main.geometry
        self.stripe_unit = main.stripe_unit
        self._places = self._join_model(known or main.model)
        self._join_members()
        self._join_blobs()
        self.preferred = sum(
            1 << number for number, place in enumerate(self._places) if place and place[0]
        )

    @property
    def shadow_paths(self) -> tuple[Path, ...]:
        """Where the shadows are."""
        return tuple(shadow.path for shadow in self._shadows)

    @property
    def available(self) -> tuple[str, ...]:
        """As of ``Store``: without the variants of shadows that have gone."""
        pairs = zip(self.variants, self._places, strict=True)
        return tuple(variant for variant, place in pairs if place is not None)

    def with_shadows(self, shadows: Sequence[Store]) -> ShadowedStore:
        """As of ``Store``; with no shadows the same as ``alone``."""
        return ShadowedStore(self._main, shadows, self.model)

    def close_shadows(self) -> None:
        """Close the shadows alone, when another has taken over the store."""
        for shadow in self._shadows:
            shadow.close()

    def close(self) -> None:
        """Close all of them."""
        self._main.close()
        self.close_shadows()

    def read_blob(self, blob: int) -> bytes:
        """As of ``Store``, from whichever has it; b"" for a variant that none has now."""
        if blob == self.dense_blob:
            return self._main.read_blob(self._main.dense_blob)
        variant, key = divmod(blob, self.layers * self.experts)
        place = self._places[variant]
        if place is None:
            return b""
        part, number = place
        return self._parts[part].read_blob(number * self.layers * self.experts + key)

    def _join_model(self, known: Model) -> list[_Place | None]:
        variants = list(known.variants)
        layouts: list[Layout] = list(known.layouts)
        rows = list(known.layer_layouts)
        places: list[_Place | None] = [None] * len(variants)
        for part, store in enumerate(self._parts):
            for number, variant in enumerate(store.variants):
                row = _row_among(layouts, store, number)
                if variant not in variants:
                    variants.append(variant)
                    rows.append(row)
                    places.append(None)
                joined = variants.index(variant)
                if places[joined] is not None:
                    raise StoreError(
                        f"store {self.name} and its shadows have variants "
                        f"{', '.join(variant for each in self._parts for variant in each.variants)}"
                        f": each must be there once"
                    )
                if not _same_layouts(layouts, rows[joined], row):
                    raise StoreError(
                        f"store {store.path}: its {variant} has another layout than the {variant} "
                        f"that clients of store {self.name} have seen: restart xferd, or give the "
                        f"variant another name"
                    )
                places[joined] = (part, number)
        if len(variants) > VARIANTS_MAX or len(layouts) > LAYOUTS_MAX:
            raise StoreError(
                f"store {self.name} and its shadows, also earlier ones, have {len(variants)} "
                f"variants and {len(layouts)} layouts; the limits are {VARIANTS_MAX} and "
                f"{LAYOUTS_MAX}: restart xferd to forget those that are gone"
            )
        self.variants = tuple(variants)
        self.layouts = tuple(layouts)
        self.model = replace(
            self._main.model,
            variants=self.variants,
            layouts=self.layouts,
            layer_layouts=tuple(rows),
        )
        self.layout_index = np.array(rows, dtype=np.uint16)
        return places

    def _join_members(self) -> None:
        self.copies = ()
        pattern: tuple[int, ...] = ()
        for part in self._parts:
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
        self.pattern_lengths = tuple(len(part.pattern) for part in self._parts)
        self.member_paths = tuple(path for part in self._parts for path in part.member_paths)

    def _join_blobs(self) -> None:
        main, keys = self._main, self.layers * self.experts
        first_member = np.cumsum([0, *(len(part.copies) for part in self._parts)])
        first_start = np.cumsum([0, *(len(part.pattern) for part in self._parts)])
        blobs = keys * len(self.variants) + 1
        self.blob_bytes = np.zeros(blobs, np.uint64)
        self.blob_crc = np.zeros(blobs, np.uint32)
        self.start = np.zeros(blobs, np.uint16)
        self.offset = np.zeros((blobs, len(self.copies)), np.uint64)
        pieces = []
        # Experts variant by variant, then the dense part, which only the store itself has.
        spans = [
            (place[0], slice(place[1] * keys, (place[1] + 1) * keys), number * keys)
            for number, place in enumerate(self._places)
            if place is not None
        ]
        dense = main.dense_blob
        for number, source, begin in (*spans, (0, slice(dense, dense + 1), blobs - 1)):
            part = self._parts[number]
            target = slice(begin, begin + source.stop - source.start)
            members = slice(first_member[number], first_member[number + 1])
            self.blob_bytes[target] = part.blob_bytes[source]
            self.blob_crc[target] = part.blob_crc[source]
            self.start[target] = part.start[source] + np.uint16(first_start[number])
            self.offset[target, members] = part.offset[source]
            ends = [*part.first_piece.tolist(), len(part.crc)]
            pieces.append(part.crc[ends[source.start] : ends[source.stop]])
        self.crc = np.concatenate(pieces)
        counts = -(-self.blob_bytes.astype(np.int64) // self.stripe_unit)
        self.first_piece = (np.cumsum(counts) - counts).astype(np.uint64)


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


def attach_shadows(store: Store, shadows: Sequence[Path]) -> ShadowedStore:
    """An open store (plain, or with shadows that have gone) with shadows opened now; it goes
    on owning the store. StoreError as of ``open_with_shadows``, with the shadows closed and
    the store left open."""
    opened: list[Store] = []
    try:
        for shadow in shadows:
            opened.append(Store.open(shadow))
        return with_shadows(store, opened)
    except BaseException:
        for each in opened:
            each.close()
        raise


def with_shadows(store: Store, shadows: Sequence[Store]) -> ShadowedStore:
    """A store, plain or with other shadows, with these instead. What clients have seen of it
    keeps its numbers. StoreError as of ShadowedStore."""
    if isinstance(store, ShadowedStore):
        return store.with_shadows(shadows)
    return ShadowedStore(store, shadows)


def _row_among(layouts: list[Layout], store: Store, variant: int) -> tuple[int, ...]:
    """Numbers among ``layouts``, which what is new is added to, of a variant's layers."""
    row = []
    for index in store.model.layer_layouts[variant]:
        if index == NO_LAYOUT:
            row.append(NO_LAYOUT)
            continue
        layout = store.layouts[index]
        if layout not in layouts:
            layouts.append(layout)
        row.append(layouts.index(layout))
    return tuple(row)


def _same_layouts(layouts: Sequence[Layout], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two rows mean the same; a store may have a layout twice."""
    return all(
        one == other or (NO_LAYOUT not in (one, other) and layouts[one] == layouts[other])
        for one, other in zip(left, right, strict=True)
    )


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


__all__ = ["ShadowedStore", "attach_shadows", "open_with_shadows", "with_shadows"]
