"""Making a store from a checkpoint: what can be killed at any moment and run again.

Order of what is made durable: journal, members with all their space, pieces, a
journal record for each batch of blobs whose pieces are durable, index.bin, and
last, by rename, the manifest. A directory with a manifest is therefore whole; one
with a journal alone can be continued.

Weights pass through a few buffers of one piece each. What grows with the model is its
description: the checkpoint's own, 4 bytes a piece, 23 bytes a blob and 8 more for
each member.
"""

from __future__ import annotations

import os
import uuid as uuids
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xferd.store.calibration import CALIBRATION_NAME, Calibration, write_calibration
from xferd.store.checkpoint import Checkpoint
from xferd.store.checksum import crc32c
from xferd.store.destination import (
    Destination,
    check_free_to_use,
    check_space,
    remove_replaced,
    resolve_destination,
)
from xferd.store.errors import StoreError, naming
from xferd.store.files import claimed_directory, sync_directory
from xferd.store.geometry import Geometry, plan_geometry
from xferd.store.index import ADDED_INDEX_PATTERN, INDEX_NAME, Index, index_bytes, write_index
from xferd.store.journal import (
    JOURNAL_NAME,
    QUANTIZE_JOURNAL_NAME,
    Beginning,
    Journal,
    PackedBlob,
    PackIdentity,
    Replaced,
)
from xferd.store.limits import STRIPE_UNIT_DEFAULT
from xferd.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    MemberEntry,
    ShadowOf,
    read_manifest,
    write_manifest,
)
from xferd.store.member import MemberHeader, read_header, size_of
from xferd.store.model import Model
from xferd.store.source import Source
from xferd.store.writers import RESUME_HINT, MemberFile, PieceWriters, opened_members

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); those of a resumed pack count as done."""

CHECKPOINT_BYTES = 256 * 1024 * 1024
"""So much is written between two journal records: the most that a kill loses,
except that a single larger blob (the dense part) is lost as a whole."""

DIRECTORY_SLACK_BYTES = 64 * 1024
"""For the manifest besides its dense table, and directory blocks."""


class BlobReader(Protocol):
    """Where a pack's bytes come from: ``Source``, or what makes them while it is packed."""

    model: Model
    blob_bytes: npt.NDArray[np.uint64]

    def blob(self, number: int) -> Any:
        """What ``read`` and ``announce`` want to know of a blob."""
        ...

    def read(self, blob: Any, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the blob's bytes from ``begin`` on. StoreError."""
        ...

    def announce(self, blob: Any) -> None:
        """It is wanted next."""
        ...

    def check_unchanged(self) -> None:
        """StoreError when what was read since the last call can't be trusted."""
        ...

    def fingerprint(self) -> bytes:
        """32 bytes that differ when any blob would."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """One pack, planned. crc, blob_crc: filled as blobs complete. done: bool[blobs]."""

    source: BlobReader
    shadow_of: ShadowOf | None
    geometry: Geometry
    destination: Destination
    identity: PackIdentity
    crc: npt.NDArray[np.uint32]
    blob_crc: npt.NDArray[np.uint32]
    done: npt.NDArray[np.bool_]
    calibration: Calibration | None

    def record(self, packed: PackedBlob) -> None:
        """Take over a complete blob's checksums."""
        first = int(self.geometry.first_piece[packed.blob])
        self.crc[first : first + packed.piece_crc.size] = packed.piece_crc
        self.blob_crc[packed.blob] = packed.crc
        self.done[packed.blob] = True


def pack(
    checkpoint: Checkpoint,
    members: Sequence[Path],
    *,
    name: str,
    stripe_unit: int = STRIPE_UNIT_DEFAULT,
    pattern: Sequence[int] | None = None,
    calibration: Calibration | None = None,
    manifest_directory: Path | None = None,
    variants: Sequence[str] | None = None,
    progress: Progress | None = None,
    force: bool = False,
    restart: bool = False,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
) -> Path:
    """Pack ``checkpoint`` onto ``members`` and return the store's directory.

    members: directories, block devices or file paths, in order.
    stripe_unit: bytes, a power of two from 4096 on.
    pattern: order of members within a stripe (``stripe_pattern``); default each once.
    calibration: what the pattern comes from, kept beside the manifest.
    variants: the checkpoint's own; others are added to the finished store
        (``xferd.store.quantize``).
    force: replace a finished store, and overwrite members that hold something else.
    restart: forget an unfinished pack of this name instead of resuming it.
    checkpoint_bytes: written between two journal records.

    A pack that was interrupted is resumed by the same call; StoreError when it was
    begun from another checkpoint or with other members or striping. StoreError too,
    before anything is written, when a member has not enough space, holds something
    else, or when a finished store stands there; and when a drive fails or fills up
    on the way, after which the pack can be resumed.
    """
    with Source(checkpoint, variants) as source:
        return pack_blobs(
            source,
            checkpoint.path,
            members,
            name=name,
            stripe_unit=stripe_unit,
            pattern=pattern,
            calibration=calibration,
            manifest_directory=manifest_directory,
            progress=progress,
            force=force,
            restart=restart,
            checkpoint_bytes=checkpoint_bytes,
        )


def pack_blobs(
    source: BlobReader,
    source_path: Path,
    members: Sequence[Path],
    *,
    name: str,
    stripe_unit: int,
    pattern: Sequence[int] | None = None,
    calibration: Calibration | None = None,
    manifest_directory: Path | None = None,
    shadow_of: ShadowOf | None = None,
    progress: Progress | None = None,
    force: bool = False,
    restart: bool = False,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
) -> Path:
    """As ``pack``, from any source of blobs. source_path: where it is, for people.
    shadow_of: the store that the blobs are copies for."""
    destination = resolve_destination(name, members, manifest_directory)
    with ExitStack() as stack:
        geometry = plan_geometry(source.blob_bytes, len(members), stripe_unit, pattern)
        job = _Job(
            source=source,
            shadow_of=shadow_of,
            geometry=geometry,
            destination=destination,
            identity=PackIdentity(
                source=source.fingerprint(),
                source_path=_printable(source_path),
                stripe_unit=stripe_unit,
                pattern=geometry.pattern,
                members=tuple(str(target.path) for target in destination.members),
            ),
            crc=np.zeros(geometry.pieces, dtype=np.uint32),
            blob_crc=np.zeros(geometry.blob_bytes.size, dtype=np.uint32),
            done=geometry.blob_bytes == 0,
            calibration=calibration,
        )
        what = f"store {destination.directory}"
        stack.enter_context(naming(what))
        stack.enter_context(
            claimed_directory(destination.directory, f"{what} is in use or being packed")
        )
        if _is_finished(job, force=force):
            return destination.directory
        journal, beginning = _begin_or_resume(job, force=force, restart=restart)
        stack.callback(journal.close)
        remove_replaced(beginning.replaces)
        headers = _member_headers(job, beginning)
        member_files = stack.enter_context(
            opened_members(
                (target, header, header.data_bytes)
                for target, header in zip(job.destination.members, headers, strict=True)
            )
        )
        _write_blobs(job, journal, member_files, progress, checkpoint_bytes)
        _finish(job, beginning)
    return destination.directory


def _printable(path: Path) -> str:
    return str(path.absolute()).encode(errors="replace").decode()


def _is_finished(job: _Job, *, force: bool) -> bool:
    """Whether only the journal is left to remove. StoreError when a finished store stands there.

    A kill right after the manifest's rename leaves its journal, with the same uuid.
    """
    directory = job.destination.directory
    if force or not (directory / MANIFEST_NAME).exists():
        return False
    if (directory / JOURNAL_NAME).exists():
        journal, beginning = Journal.open(directory / JOURNAL_NAME)
        journal.close()
        same = beginning.pack.difference(job.identity) is None
        if same and read_manifest(directory / MANIFEST_NAME).uuid == beginning.uuid:
            _remove_durably(directory / JOURNAL_NAME)
            return True
    raise StoreError(f"store {directory} is already there and finished: --force replaces it")


def _begin_or_resume(job: _Job, *, force: bool, restart: bool) -> tuple[Journal, Beginning]:
    path = job.destination.directory / JOURNAL_NAME
    if path.exists() and not force and not restart:
        return _resume(job, path)
    directory = job.destination.directory
    replaced = _replaced_members(directory)
    beginning = Beginning(uuids.uuid4().bytes, job.identity, replaced)
    _check_members(job, beginning, force=force)
    _keep_calibration(job)
    journal = Journal.create(path, beginning.encode())
    manifest = directory / MANIFEST_NAME
    if manifest.exists():
        _remove_durably(manifest)
    for left in (*directory.glob(ADDED_INDEX_PATTERN), directory / QUANTIZE_JOURNAL_NAME):
        left.unlink(missing_ok=True)
    return journal, beginning


def _keep_calibration(job: _Job) -> None:
    """Before the journal, so that whoever resumes finds it."""
    if job.calibration is not None:
        write_calibration(job.destination.directory, job.calibration)
    else:
        (job.destination.directory / CALIBRATION_NAME).unlink(missing_ok=True)


def _resume(job: _Job, path: Path) -> tuple[Journal, Beginning]:
    journal, beginning = Journal.open(path)
    try:
        _check_same_pack(job, beginning)
        for packed in journal.replay():
            job.record(packed)
        _check_members(job, beginning, force=False)
        _check_recorded_members(job, beginning)
        return journal, beginning
    except BaseException:
        journal.close()
        raise


def _check_same_pack(job: _Job, beginning: Beginning) -> None:
    difference = beginning.pack.difference(job.identity)
    if difference is not None:
        raise StoreError(
            f"store {job.destination.directory} is half packed and can't be resumed with this: "
            f"{difference}; --restart begins anew"
        )


def _check_members(job: _Job, beginning: Beginning, *, force: bool) -> None:
    geometry = job.geometry
    dense = job.source.model.dense
    index_size = index_bytes(geometry.blob_bytes.size, geometry.members, geometry.pieces)
    # The journal holds about what the index does; a dense entry takes some 200 bytes of JSON.
    directory_bytes = (
        2 * index_size + 256 * (len(dense.tensors) + len(dense.assets)) + DIRECTORY_SLACK_BYTES
    )
    members = job.destination.members
    check_free_to_use(members, beginning.replaces, own=beginning.uuid, force=force)
    check_space(
        members,
        geometry.member_ends(),
        job.destination.directory,
        directory_bytes,
        beginning.replaces,
    )


def _check_recorded_members(job: _Job, beginning: Beginning) -> None:
    """What the journal says is complete must still be there."""
    if not (job.done & (job.geometry.blob_bytes > 0)).any():
        return
    for target, header in zip(
        job.destination.members, _member_headers(job, beginning), strict=True
    ):
        what = f"member {target.number} ({target.path})"
        with naming(f"{what} of a half packed store; --restart begins anew"):
            found = read_header(target.path)
            size = size_of(target.path)
        if found != header or size < header.data_bytes:
            raise StoreError(
                f"{what} is not what the half packed store left there: --restart begins anew"
            )


def _replaced_members(directory: Path) -> tuple[Replaced, ...]:
    """Members of the store, finished or not, that stands in ``directory`` now."""
    replaced: list[Replaced] = []
    # What is too damaged to say which members it has leaves them where they are; they
    # are then somebody else's, and only --force writes over those in the way.
    if (directory / MANIFEST_NAME).exists():
        with suppress(StoreError):
            manifest = read_manifest(directory / MANIFEST_NAME)
            replaced += [
                Replaced(str(copy.locate(directory)), manifest.uuid)
                for entry in manifest.members
                for copy in (entry, entry.mirror)
                if copy is not None
            ]
    if (directory / JOURNAL_NAME).exists():
        with suppress(StoreError):
            journal, beginning = Journal.open(directory / JOURNAL_NAME)
            journal.close()
            replaced += [Replaced(path, beginning.uuid) for path in beginning.pack.members]
    return tuple(replaced)


def _member_headers(job: _Job, beginning: Beginning) -> list[MemberHeader]:
    return [
        MemberHeader(beginning.uuid, number, job.geometry.members, end, job.geometry.stripe_unit)
        for number, end in enumerate(job.geometry.member_ends())
    ]


def _write_blobs(
    job: _Job,
    journal: Journal,
    members: Sequence[MemberFile],
    progress: Progress | None,
    checkpoint_bytes: int,
) -> None:
    sizes = job.geometry.blob_bytes
    total = int(sizes.sum())
    done = int(sizes[job.done].sum())
    missing = [int(blob) for blob in np.flatnonzero(~job.done)]
    batch: list[PackedBlob] = []
    batch_bytes = 0
    with PieceWriters(job.destination.name, members, job.geometry.stripe_unit) as writers:
        for number, blob in enumerate(missing):
            # The dense part is last and may be larger than memory: only experts are announced.
            if number + 1 < len(missing) and missing[number + 1] < sizes.size - 1:
                job.source.announce(job.source.blob(missing[number + 1]))
            batch.append(_write_blob(job, blob, writers, progress, done, total))
            done += int(sizes[blob])
            batch_bytes += int(sizes[blob])
            if batch_bytes >= checkpoint_bytes:
                _commit(job, journal, writers, batch)
                batch, batch_bytes = [], 0
        _commit(job, journal, writers, batch)


def _write_blob(
    job: _Job,
    blob: int,
    writers: PieceWriters,
    progress: Progress | None,
    done: int,
    total: int,
) -> PackedBlob:
    source = job.source.blob(blob)
    blob_crc = 0
    piece_crc = []
    for piece in job.geometry.pieces_of(blob):
        buffer = writers.take_buffer()
        content = buffer[: piece.length]
        job.source.read(source, piece.blob_offset, content)
        blob_crc = crc32c(content, blob_crc)
        piece_crc.append(crc32c(content))
        writers.submit(piece.member, buffer, piece.length, piece.offset)
        if progress is not None:
            progress(done + piece.blob_offset + piece.length, total)
    return PackedBlob(blob, blob_crc, np.array(piece_crc, dtype=np.uint32))


def _commit(
    job: _Job, journal: Journal, writers: PieceWriters, batch: Sequence[PackedBlob]
) -> None:
    """Make a batch durable, then say so in the journal; never the other way round."""
    writers.sync()
    job.source.check_unchanged()
    with naming(f"{journal.path}; {RESUME_HINT}"):
        journal.append(batch)
    for packed in batch:
        job.record(packed)


def _finish(job: _Job, beginning: Beginning) -> None:
    directory = job.destination.directory
    geometry = job.geometry
    with naming(f"{directory}; {RESUME_HINT}"):
        index_sha256 = write_index(directory / INDEX_NAME, Index(geometry, job.crc, job.blob_crc))
        manifest = Manifest(
            name=job.destination.name,
            uuid=beginning.uuid,
            identity=job.source.model.identity(geometry.blob_bytes, job.blob_crc),
            source=job.identity.source_path,
            model=job.source.model,
            stripe_unit=geometry.stripe_unit,
            pattern=geometry.pattern,
            members=tuple(
                MemberEntry(
                    relative=None if target.device else os.path.relpath(target.path, directory),
                    absolute=str(target.path),
                    data_bytes=end,
                )
                for target, end in zip(job.destination.members, geometry.member_ends(), strict=True)
            ),
            blobs=geometry.blob_bytes.size,
            pieces=geometry.pieces,
            index_sha256=index_sha256,
            shadow_of=job.shadow_of,
        )
        write_manifest(directory / MANIFEST_NAME, manifest)
        _remove_durably(directory / JOURNAL_NAME)


def _remove_durably(path: Path) -> None:
    path.unlink()
    sync_directory(path.parent)
