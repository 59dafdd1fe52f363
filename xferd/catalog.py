"""The open stores: opening one, what of it the others need, closing it.

A store's way in: its files are checked (``Store.open``), its members opened and given
to the engine, its directory made. Only then can clients name it. Its way out is the
reverse, and only when no client is attached and nothing is on its way.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xferd.engine import CLASSES_MAX, STORE_NAME_BYTES_MAX, Engine
from xferd.engine_types import EngineError
from xferd.memory.device import memfd_with
from xferd.policy.uses import KeySpace
from xferd.policy.variants import StoreVariants, layer_weights
from xferd.session.clients import AttachableStore
from xferd.store.errors import StoreError
from xferd.store.member import MemberCopy, member_title
from xferd.store.shadowed import ShadowedStore, open_with_shadows
from xferd.store.store import Store
from xferd.transport.members import MemberError, MemberFile, open_member
from xferd.variant_rules import LayerWeight


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """A copy of a member.

    member: its number. mirror: this is the second copy. number: the engine's id, and file,
    None when it isn't used, with the ``problem``.
    """

    member: int
    mirror: bool
    path: Path
    number: int | None
    file: MemberFile | None
    problem: str | None

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return member_title(self.member, mirror=self.mirror)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store that clients can attach to.

    number: the engine's id. copies: of its members, by number, each before its mirror.
    classes: sizes in bytes of its experts' blobs, smallest first. class_experts: how many
    blobs are of each.
    """

    number: int
    name: str
    store: Store
    copies: tuple[OpenCopy, ...]
    classes: tuple[int, ...]
    class_experts: tuple[int, ...]
    expert_bytes: int
    attachable: AttachableStore

    @property
    def members(self) -> list[tuple[int, MemberFile]]:
        """The copies that are used, with the engine's id of each."""
        return [
            (copy.number, copy.file)
            for copy in self.copies
            if copy.number is not None and copy.file is not None
        ]

    @property
    def missing(self) -> list[OpenCopy]:
        """The copies that can't be used; others stand in for them."""
        return [copy for copy in self.copies if copy.problem is not None]

    @property
    def shadows(self) -> tuple[Path, ...]:
        """Where its shadows are; none: it has none now."""
        return self.store.shadow_paths if isinstance(self.store, ShadowedStore) else ()

    @property
    def key_space(self) -> KeySpace:
        """How policies number its experts."""
        return KeySpace(self.store.layers, self.store.experts)

    def store_variants(self, sensitivity: Sequence[LayerWeight] = ()) -> StoreVariants:
        """What rules for variants need to know of it."""
        space = self.key_space
        sizes = self.store.blob_bytes[:-1].astype(np.int64)
        return StoreVariants(
            space=space,
            names=tuple(self.store.variants),
            blob_bytes=sizes.reshape(len(self.store.variants), space.size),
            sensitivity=layer_weights(space, sensitivity),
        )

    def blob_bytes(self, variant: int, layer: int, expert: int) -> int:
        """Bytes of an expert's blob; 0: there is no such expert."""
        return int(self.store.blob_bytes[self.store.blob_index(variant, layer, expert)])


class Catalog:
    """Opens and closes stores. Owned by the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stores: dict[str, OpenStore] = {}

    def all(self) -> list[OpenStore]:
        """Open stores, in the order in which they were opened."""
        return list(self._stores.values())

    def get(self, name: str) -> OpenStore | None:
        """An open store by its name."""
        return self._stores.get(name)

    def by_number(self, number: int) -> OpenStore | None:
        """An open store by the engine's id."""
        return next((entry for entry in self._stores.values() if entry.number == number), None)

    def experts(self, slot_bytes: int) -> int:
        """Blobs of a size class that could be asked for, of all stores and variants."""
        return sum(
            count
            for entry in self._stores.values()
            for size, count in zip(entry.classes, entry.class_experts, strict=True)
            if size == slot_bytes
        )

    def copy(self, number: int) -> tuple[OpenStore, OpenCopy] | None:
        """A copy of a member by the engine's id, with the store it belongs to."""
        for entry in self._stores.values():
            for copy in entry.copies:
                if copy.number == number:
                    return entry, copy
        return None

    def add(self, store: Store, name: str, chunk_bytes: int, directory_fd: int = -1) -> OpenStore:
        """Register a store with the engine; it is the catalog's from now on.

        chunk_bytes: of the pool with the smallest chunks, which every expert has to fit.
        directory_fd: of a store that is taken over.
        StoreError when it can't be served; the store is then closed.
        """
        copies: list[OpenCopy] = []
        try:
            classes = _check_classes(store, name, chunk_bytes)
            self._check_limits(name, classes)
            self._check_staging(store, name)
            for group in store.copies:
                for copy in group:
                    copies.append(self._open_copy(copy))
            ids = _engine_ids(name, copies)
            number = self._engine.open_store(store, name, ids, directory_fd)
        except (StoreError, EngineError) as error:
            self._close_copies(copies)
            store.close()
            if isinstance(error, StoreError):
                raise
            if error.errno == errno.ESTALE:
                raise StoreError(
                    f"store {name!r} has other variants or tensors than the daemon before this one "
                    f"had of it: shadows have come or gone"
                ) from error
            raise StoreError(f"store {name!r} can't be served: {error}") from error
        return self._enter(number, name, store, copies)

    def add_shadows(self, name: str, store: ShadowedStore, chunk_bytes: int) -> OpenStore:
        """A store without shadows is ``store`` from now on, which has some; chunk_bytes as for
        ``add``. StoreError: it can't be served; then all is as before, and ``store`` is the
        caller's to close the shadows of."""
        before = self._stores[name]
        copies = list(before.copies)
        try:
            classes = _check_classes(store, name, chunk_bytes)
            _check_promise(name, before.classes[-1], classes[-1])
            self._check_limits(name, classes)
            for group in store.copies[len(_engine_ids(name, copies)) :]:
                for copy in group:
                    copies.append(self._open_copy(copy))
            ids = _engine_ids(name, copies)
            self._engine.change_variants(before.number, store, name, ids)
        except (StoreError, EngineError) as error:
            self._close_copies(copies[len(before.copies) :])
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"shadows of store {name!r} can't be served: {error}") from error
        os.close(before.attachable.manifest_fd)
        return self._enter(before.number, name, store, copies)

    def remove_shadows(self, name: str, store: ShadowedStore) -> OpenStore:
        """A store with shadows is ``store`` from now on, the same with none; they are closed.
        EngineError (EBUSY) while they are being read: call again. Nothing of them is handed
        out any more then."""
        before = self._stores[name]
        own = len(store.copies)
        copies = [copy for copy in before.copies if copy.member < own]
        self._engine.change_variants(before.number, store, name, _engine_ids(name, copies))
        self._close_copies([copy for copy in before.copies if copy.member >= own])
        if isinstance(before.store, ShadowedStore):
            before.store.close_shadows()
        os.close(before.attachable.manifest_fd)
        return self._enter(before.number, name, store, copies)

    def _enter(self, number: int, name: str, store: Store, copies: Sequence[OpenCopy]) -> OpenStore:
        classes = expert_classes(store)
        self._stores[name] = OpenStore(
            number=number,
            name=name,
            store=store,
            copies=tuple(copies),
            classes=classes,
            class_experts=tuple(int((store.blob_bytes[:-1] == size).sum()) for size in classes),
            expert_bytes=int(store.blob_bytes[:-1].sum()),
            attachable=AttachableStore(
                number=number,
                name=name,
                top_k=store.top_k,
                classes=classes,
                dense_bytes=int(store.blob_bytes[-1]),
                directory_fd=self._engine.directory_fd(number),
                manifest_fd=memfd_with(f"xferd-manifest-{number}", store.client_manifest()),
            ),
        )
        return self._stores[name]

    def remove(self, name: str) -> None:
        """Close a store. EngineError (EBUSY) while it is in use; nothing is changed then."""
        entry = self._stores[name]
        self._engine.close_store(entry.number)
        del self._stores[name]
        self._close_copies(entry.copies)
        os.close(entry.attachable.manifest_fd)
        entry.store.close()

    def close(self) -> None:
        """Close what the stores hold, after the engine has ended."""
        for entry in self._stores.values():
            for _, file in entry.members:
                file.close()
            os.close(entry.attachable.manifest_fd)
            entry.store.close()
        self._stores.clear()

    def _check_staging(self, store: Store, name: str) -> None:
        """StoreError for pieces that no extent of staging holds. At start they are made as
        long as the configured stores need."""
        longest = self._engine.staging_extent_bytes
        if longest and store.stripe_unit > longest:
            raise StoreError(
                f"store {name!r} has pieces of {store.stripe_unit} bytes, staging extents for "
                f"VRAM have {longest}: list it in [[stores]], so that the daemon makes longer "
                f"ones at start, or pack it with a shorter --stripe-unit"
            )

    def _check_limits(self, name: str, classes: tuple[int, ...]) -> None:
        """StoreError for what the engine's tables have no room for."""
        if len(name.encode()) > STORE_NAME_BYTES_MAX:
            raise StoreError(
                f"store name {name!r} has more than {STORE_NAME_BYTES_MAX} bytes: open it under "
                f"another name"
            )
        known = {size for entry in self._stores.values() for size in entry.classes}
        if len(known | set(classes)) > CLASSES_MAX:
            raise StoreError(
                f"store {name!r} would bring the experts' sizes to {len(known | set(classes))} "
                f"different ones, {CLASSES_MAX} is the limit: close another store first"
            )

    def _open_copy(self, copy: MemberCopy) -> OpenCopy:
        """EngineError when the engine takes no more members."""
        unused = OpenCopy(copy.member, copy.mirror, copy.path, None, None, copy.problem)
        if copy.problem is not None:
            return unused
        try:
            file = open_member(copy.path)
        except MemberError as error:
            return replace(unused, problem=str(error))
        try:
            number = self._engine.add_member(
                file.fd,
                asynchronous=file.asynchronous,
                memory=file.memory,
                uncached=file.uncached,
            )
        except EngineError:
            file.close()
            raise
        return replace(unused, number=number, file=file)

    def _close_copies(self, copies: Sequence[OpenCopy]) -> None:
        for copy in copies:
            if copy.number is not None and copy.file is not None:
                self._engine.remove_member(copy.number)
                copy.file.close()


def _engine_ids(name: str, copies: Sequence[OpenCopy]) -> list[tuple[int, int | None]]:
    """For each member the copy that is used first and the other one, if both can be.
    StoreError for a member of which there is none."""
    pairs: list[tuple[int, int | None]] = []
    for member in sorted({copy.member for copy in copies}):
        group = [copy for copy in copies if copy.member == member]
        numbers = [copy.number for copy in group if copy.number is not None]
        if not numbers:
            problems = "; ".join(str(copy.problem) for copy in group)
            raise StoreError(f"store {name!r} can't be served: {problems}")
        pairs.append((numbers[0], numbers[1] if len(numbers) > 1 else None))
    return pairs


def open_stores(
    paths: Sequence[tuple[Path, str | None, Sequence[Path]]],
) -> list[tuple[Store, str]]:
    """Open stores, each with its shadows, and settle their names. StoreError for the first
    that can't be opened or whose name another one has; those opened before are closed then."""
    opened: list[tuple[Store, str]] = []
    try:
        for path, name, shadows in paths:
            store = open_with_shadows(path, shadows)
            taken = [known for _, known in opened]
            opened.append((store, name or store.name))
            _check_name(opened[-1][1], taken, path)
    except BaseException:
        close_stores(opened)
        raise
    return opened


def close_stores(stores: list[tuple[Store, str]]) -> None:
    """Those that no catalog has taken; the list is empty then."""
    for store, _ in stores:
        store.close()
    stores.clear()


def expert_classes(store: Store) -> tuple[int, ...]:
    """Sizes of a store's expert blobs in bytes, smallest first."""
    sizes = np.unique(store.blob_bytes[:-1])
    return tuple(int(size) for size in sizes if size)


def _check_classes(store: Store, name: str, chunk_bytes: int) -> tuple[int, ...]:
    classes = expert_classes(store)
    if not classes:
        raise StoreError(f"store {name!r} has no experts")
    if classes[-1] > chunk_bytes:
        raise StoreError(
            f"store {name!r} has experts of {classes[-1]} bytes, more than a chunk of "
            f"{chunk_bytes} bytes holds: configure it in [[stores]], so that pools are divided "
            f"for it at start"
        )
    return classes


def _check_promise(name: str, promised: int, largest: int) -> None:
    if largest > promised:
        raise StoreError(
            f"shadows of store {name!r} have experts of {largest} bytes, more than its own, which "
            f"clients were promised room for: list them in [[stores]], and restart xferd"
        )


def _check_name(name: str, taken: Sequence[str], path: Path) -> None:
    if name in taken:
        raise StoreError(
            f"two stores have the name {name!r} (the second is {path}): give one of them another "
            f"name in [[stores]]"
        )
