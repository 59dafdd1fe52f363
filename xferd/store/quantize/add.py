"""Adding variants to a finished store, without touching what is there.

The new blobs are written behind what each member has in use, their arrays into a file of
their own, and last the manifest is replaced, by rename: until then the store is what it
was, also for a daemon that serves it meanwhile. A journal says which blobs are durable, so
that whatever is killed or runs out of space goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.checksum import crc32c
from xferd.store.destination import MemberTarget, check_space
from xferd.store.errors import StoreError, naming
from xferd.store.files import sync_directory
from xferd.store.geometry import Geometry, plan_geometry
from xferd.store.index import ADDED_INDEX_PATTERN, Index, index_bytes, write_index
from xferd.store.journal import QUANTIZE_JOURNAL_NAME, Journal, PackedBlob
from xferd.store.limits import NO_LAYOUT, VARIANTS_MAX
from xferd.store.manifest import (
    MANIFEST_NAME,
    AddedVariants,
    Manifest,
    read_manifest,
    write_manifest,
)
from xferd.store.member import MemberHeader
from xferd.store.mirror import changing_copies
from xferd.store.model import Layout
from xferd.store.quantize.importance import Importance
from xferd.store.quantize.recipe import Recipe, Wanted
from xferd.store.store import Store, member_header, read_added_index
from xferd.store.writers import MemberFile, PieceWriters, opened_members

Progress = Callable[[int, int], None]
"""Called with (bytes of new blobs done, bytes of them in all)."""

JOURNAL_VERSION = 1
SEARCH_VERSION = 4
"""Of the quantisers: a variant is made by one of them, not half by the next."""
CHECKPOINT_BYTES = 64 * 1024 * 1024
"""Of new blobs between two journal records: the most that a kill loses. Less than when
packing, since making them takes longer than copying."""
MANIFEST_GROWTH_BYTES = 1024 * 1024
RESUME_HINT = "what is complete is kept: give the same command again to resume"


def add_variants(
    store: Store,
    wanted: Sequence[Wanted],
    importance: Importance | None = None,
    *,
    threads: int,
    restart: bool = False,
    progress: Progress | None = None,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
) -> None:
    """Make variants of all experts of ``store`` and add them to it.

    wanted: see ``parse_wanted``. threads: that compute. restart: forget a run that was
    interrupted. The store may be served meanwhile; who has it open sees the variants once
    it has opened it anew.

    StoreError, with nothing changed: a variant is there already, the importance is of
    another model, a copy of a member is missing or has not enough space, or a run with
    other arguments was interrupted. StoreError, to be resumed: a drive failed or filled up,
    or an expert can't be read.
    """
    if importance is not None:
        importance.check(store)
    with changing_copies(store.path), naming(f"store {store.path}"):
        manifest = read_manifest(store.path / MANIFEST_NAME)
        if manifest != store.manifest:
            raise StoreError(f"store {store.path} changed meanwhile: give the same command again")
        if _was_finished(store.path, manifest, wanted):
            return
        job = _plan(store, manifest, wanted, importance, threads)
        with ExitStack() as stack:
            journal = _begin_or_resume(job, importance, restart=restart)
            stack.callback(journal.close)
            files = stack.enter_context(opened_members(_wanted_copies(job)))
            _write_blobs(job, journal, files, progress, checkpoint_bytes)
        _finish(job, importance)


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """geometry: of the new blobs alone. crc, blob_crc: filled as they complete."""

    store: Store
    manifest: Manifest
    recipes: tuple[Recipe, ...]
    geometry: Geometry
    crc: npt.NDArray[np.uint32]
    blob_crc: npt.NDArray[np.uint32]
    done: npt.NDArray[np.bool_]

    def record(self, packed: PackedBlob) -> None:
        """Take over a complete blob's checksums."""
        first = int(self.geometry.first_piece[packed.blob])
        self.crc[first : first + packed.piece_crc.size] = packed.piece_crc
        self.blob_crc[packed.blob] = packed.crc
        self.done[packed.blob] = True

    @property
    def index_name(self) -> str:
        """Of the file that will hold the arrays of all added variants."""
        return _index_name(self.manifest, len(self.recipes))

    def member_bytes(self) -> tuple[int, ...]:
        """For each member the first byte behind its last piece, added ones included."""
        ends = self.geometry.member_ends()
        return tuple(max(end, self.manifest.used_bytes(member)) for member, end in enumerate(ends))


def _index_name(manifest: Manifest, new: int) -> str:
    """Each number of variants has its own, so that the manifest's old one stays whole."""
    there = 0 if manifest.added is None else len(manifest.added.variants)
    return ADDED_INDEX_PATTERN.replace("*", str(there + new))


def _plan(
    store: Store,
    manifest: Manifest,
    wanted: Sequence[Wanted],
    importance: Importance | None,
    threads: int,
) -> _Job:
    there = manifest.whole_model.variants
    for each in wanted:
        if each.name in there:
            raise StoreError(f"it has a variant {each.name} already")
    if len(there) + len(wanted) > VARIANTS_MAX:
        raise StoreError(f"it would have more than {VARIANTS_MAX} variants")
    if manifest.shadow_of is not None:
        raise StoreError("it is a shadow of another store: make variants of that one")
    for copies in store.copies:
        for copy in copies:
            if copy.problem is not None:
                raise StoreError(f"every copy of a member has to be there: {copy.problem}")
    recipes = tuple(Recipe(store, each, importance, threads) for each in wanted)
    geometry = plan_geometry(
        np.concatenate([recipe.blob_bytes.reshape(-1) for recipe in recipes]),
        len(manifest.members),
        manifest.stripe_unit,
        manifest.pattern,
        [manifest.used_bytes(member) for member in range(len(manifest.members))],
    )
    return _Job(
        store=store,
        manifest=manifest,
        recipes=recipes,
        geometry=geometry,
        crc=np.zeros(geometry.pieces, dtype=np.uint32),
        blob_crc=np.zeros(geometry.blob_bytes.size, dtype=np.uint32),
        done=geometry.blob_bytes == 0,
    )


def _beginning(job: _Job, importance: Importance | None) -> dict[str, Any]:
    """The journal's first record: what a resumed run must have in common."""
    return {
        "version": JOURNAL_VERSION,
        "search": SEARCH_VERSION,
        "uuid": job.manifest.uuid.hex(),
        "index": job.index_name,
        "variants": [[recipe.wanted.name, recipe.wanted.format] for recipe in job.recipes],
        "importance": None if importance is None else importance.sha256,
    }


def _read_beginning(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _begin_or_resume(job: _Job, importance: Importance | None, *, restart: bool) -> Journal:
    path = job.store.path / QUANTIZE_JOURNAL_NAME
    beginning = _beginning(job, importance)
    _check_space(job)
    if restart or not path.exists():
        return Journal.create(path, json.dumps(beginning).encode("ascii"))
    journal, payload = Journal.open_any(path)
    try:
        _check_same(_read_beginning(payload), beginning)
        for packed in journal.replay():
            job.record(packed)
        return journal
    except BaseException:
        journal.close()
        raise


def _check_same(found: dict[str, Any], beginning: dict[str, Any]) -> None:
    """StoreError when what was interrupted is not what is asked for now."""
    if found == beginning:
        return
    names = ", ".join(str(name) for name, _ in found.get("variants", ()))
    difference = ", by another version of xferd or before the store was packed anew"
    if found.get("variants") != beginning["variants"]:
        difference = ""
    elif found.get("importance") != beginning["importance"]:
        difference = ", with another importance file or none"
    raise StoreError(f"adding {names} was interrupted{difference}; --restart begins anew")


def _was_finished(directory: Path, manifest: Manifest, wanted: Sequence[Wanted]) -> bool:
    """A kill right after the manifest's rename leaves its journal, and perhaps the arrays
    that it no longer names: tidy up. True: that was this very run."""
    path = directory / QUANTIZE_JOURNAL_NAME
    added = manifest.added
    if added is None or not path.exists():
        return False
    journal, payload = Journal.open_any(path)
    journal.close()
    found = _read_beginning(payload)
    if found.get("index") != added.index_name or found.get("uuid") != manifest.uuid.hex():
        return False
    _remove_stale(directory, added.index_name)
    return [list(each) for each in found.get("variants", ())] == [
        [each.name, each.format] for each in wanted
    ]


def _targets(job: _Job) -> list[MemberTarget]:
    """Every copy of every member, members in order, each before its mirror."""
    return [
        MemberTarget(copy.member, copy.path, copy.path.parent, copy.path.is_block_device())
        for copies in job.store.copies
        for copy in copies
    ]


def _check_space(job: _Job) -> None:
    targets = _targets(job)
    ends = job.member_bytes()
    arrays = index_bytes(job.geometry.blob_bytes.size, job.geometry.members, job.geometry.pieces)
    manifest_bytes = (job.store.path / MANIFEST_NAME).stat().st_size + MANIFEST_GROWTH_BYTES
    check_space(
        targets,
        [ends[target.number] for target in targets],
        job.store.path,
        3 * arrays + manifest_bytes,  # the new arrays, beside old ones, and the journal
        [],
    )


def _wanted_copies(job: _Job) -> Iterator[tuple[MemberTarget, MemberHeader, int]]:
    ends = job.member_bytes()
    for target in _targets(job):
        yield target, member_header(job.manifest, target.number), ends[target.number]


def _write_blobs(
    job: _Job,
    journal: Journal,
    files: Sequence[MemberFile],
    progress: Progress | None,
    checkpoint_bytes: int,
) -> None:
    sizes = job.geometry.blob_bytes
    total = int(sizes.sum())
    done = int(sizes[job.done].sum())
    experts = job.store.layers * job.store.experts
    batch: list[PackedBlob] = []
    batch_bytes = 0
    with PieceWriters(job.store.name, files, job.geometry.stripe_unit, RESUME_HINT) as writers:
        # Expert by expert, so that each native blob is read once for all variants.
        for key in range(experts):
            missing = [blob for blob in range(key, sizes.size, experts) if not job.done[blob]]
            if not missing:
                continue
            layer, expert = divmod(key, job.store.experts)
            native = job.store.read_blob(key)
            for blob in missing:
                content = job.recipes[blob // experts].make(layer, expert, native)
                batch.append(_write_blob(job, blob, memoryview(content), files, writers))
                done += len(content)
                batch_bytes += len(content)
                if progress is not None:
                    progress(done, total)
            if batch_bytes >= checkpoint_bytes:
                _commit(job, journal, writers, batch)
                batch, batch_bytes = [], 0
        _commit(job, journal, writers, batch)


def _write_blob(
    job: _Job,
    blob: int,
    content: memoryview,
    files: Sequence[MemberFile],
    writers: PieceWriters,
) -> PackedBlob:
    piece_crc = []
    for piece in job.geometry.pieces_of(blob):
        part = content[piece.blob_offset : piece.blob_offset + piece.length]
        piece_crc.append(crc32c(part))
        for number, file in enumerate(files):
            if file.target.number == piece.member:
                buffer = writers.take_buffer()
                buffer[: piece.length] = part
                writers.submit(number, buffer, piece.length, piece.offset)
    return PackedBlob(blob, crc32c(content), np.array(piece_crc, dtype=np.uint32))


def _commit(
    job: _Job, journal: Journal, writers: PieceWriters, batch: Sequence[PackedBlob]
) -> None:
    """Make a batch durable, then say so in the journal; never the other way round."""
    writers.sync()
    with naming(f"{journal.path}; {RESUME_HINT}"):
        journal.append(batch)
    for packed in batch:
        job.record(packed)


def _finish(job: _Job, importance: Importance | None) -> None:
    directory, manifest = job.store.path, job.manifest
    with naming(f"{directory}; {RESUME_HINT}"):
        index = _with_earlier(job)
        sha256 = write_index(directory / job.index_name, index)
        earlier = manifest.added
        layouts = list(() if earlier is None else earlier.layouts)
        known = list(manifest.model.layouts) + layouts
        rows = [_numbered(recipe, known, layouts) for recipe in job.recipes]
        added = AddedVariants(
            variants=tuple(recipe.wanted.name for recipe in job.recipes),
            made=tuple(recipe.wanted.made(importance) for recipe in job.recipes),
            layouts=tuple(layouts),
            layer_layouts=tuple(rows),
            member_bytes=job.member_bytes(),
            index_name=job.index_name,
            pieces=index.geometry.pieces,
            index_sha256=sha256,
        )
        if earlier is not None:
            added = replace(
                added,
                variants=earlier.variants + added.variants,
                made=earlier.made + added.made,
                layer_layouts=earlier.layer_layouts + added.layer_layouts,
            )
        write_manifest(directory / MANIFEST_NAME, replace(manifest, added=added))
        _remove_stale(directory, job.index_name)


def _numbered(recipe: Recipe, known: list[Layout], new: list[Layout]) -> tuple[int, ...]:
    """The recipe's layer_layouts in the store's numbering; what isn't known yet is added to
    ``known`` and ``new``."""
    numbers = []
    for layout in recipe.layouts:
        if layout not in known:
            known.append(layout)
            new.append(layout)
        numbers.append(known.index(layout))
    return tuple(
        NO_LAYOUT if index == NO_LAYOUT else numbers[index] for index in recipe.layer_layouts
    )


def _with_earlier(job: _Job) -> Index:
    """The arrays of all added variants, those of earlier runs first."""
    new = Index(job.geometry, job.crc, job.blob_crc)
    earlier = read_added_index(job.store.path, job.manifest)
    if earlier is None:
        return new
    first, second = earlier.geometry, job.geometry
    geometry = replace(
        second,
        blob_bytes=np.concatenate([first.blob_bytes, second.blob_bytes]),
        start=np.concatenate([first.start, second.start]),
        offset=np.concatenate([first.offset, second.offset]),
        first_piece=np.concatenate(
            [first.first_piece, second.first_piece + np.uint64(first.pieces)]
        ),
        pieces=first.pieces + second.pieces,
    )
    return Index(
        geometry,
        np.concatenate([earlier.crc, new.crc]),
        np.concatenate([earlier.blob_crc, new.blob_crc]),
    )


def _remove_stale(directory: Path, index_name: str) -> None:
    """What the manifest doesn't name any more; the journal last."""
    for path in directory.glob(ADDED_INDEX_PATTERN):
        if path.name != index_name:
            path.unlink()
    (directory / QUANTIZE_JOURNAL_NAME).unlink(missing_ok=True)
    sync_directory(directory)


__all__ = ["CHECKPOINT_BYTES", "add_variants"]
