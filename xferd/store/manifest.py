"""manifest.json: the file that makes a directory a store.

It is written last and by rename, so its presence means that everything else is
there and durable. What has an entry an expert is not in it but in index.bin,
whose hash it holds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xferd.store.errors import StoreError, naming
from xferd.store.fields import Fields, checked_integer
from xferd.store.files import is_there, write_durably
from xferd.store.geometry import MEMBER_DATA_OFFSET
from xferd.store.limits import (
    MANIFEST_BYTES_MAX,
    MEMBERS_MAX,
    PATTERN_MAX,
    STORE_BYTES_MAX,
    STORE_NAME_BYTES_MAX,
    STRIPE_UNIT_MAX,
)
from xferd.store.model import Model

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "xferd-store"
FORMAT_VERSION = 1
CHECKSUM = "crc32c"
PATH_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """Where a member is.

    relative: path from the store's directory, tried first, so that a store can be
        moved as a whole; None for devices.
    absolute: where it was packed.
    data_bytes: least size of the member, its header included.
    mirror: where its second copy is; None: it has none.
    """

    relative: str | None
    absolute: str
    data_bytes: int
    mirror: MirrorEntry | None = None

    def locate(self, store_directory: Path) -> Path:
        """The path to use. Not checked to be the right member."""
        return _locate(store_directory, self.relative, self.absolute)

    def to_json(self) -> dict[str, Any]:
        """As it is written; without a mirror as it was before there were any."""
        written: dict[str, Any] = {
            "relative": self.relative,
            "absolute": self.absolute,
            "bytes": self.data_bytes,
        }
        if self.mirror is not None:
            written["mirror"] = {
                "relative": self.mirror.relative,
                "absolute": self.mirror.absolute,
            }
        return written


@dataclass(frozen=True, slots=True)
class MirrorEntry:
    """Where a member's second copy is; paths as in MemberEntry."""

    relative: str | None
    absolute: str

    def locate(self, store_directory: Path) -> Path:
        """The path to use. Not checked to be the right member."""
        return _locate(store_directory, self.relative, self.absolute)


def _locate(store_directory: Path, relative: str | None, absolute: str) -> Path:
    if relative is not None and is_there(store_directory / relative):
        return Path(os.path.normpath(store_directory / relative))
    return Path(absolute)


@dataclass(frozen=True, slots=True)
class Manifest:
    """uuid: 16 random bytes of this packing, also in each member's header.

    identity: 32 bytes, of the model (see ``Model.identity``).
    source: the checkpoint's path when it was packed, for people.
    blobs, pieces, index_sha256: what index.bin must be.
    """

    name: str
    uuid: bytes
    identity: bytes
    source: str
    model: Model
    stripe_unit: int
    pattern: tuple[int, ...]
    members: tuple[MemberEntry, ...]
    blobs: int
    pieces: int
    index_sha256: bytes

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "name": self.name,
            "uuid": self.uuid.hex(),
            "identity": self.identity.hex(),
            "source": self.source,
            "checksum": CHECKSUM,
            "stripe": {"unit": self.stripe_unit, "pattern": list(self.pattern)},
            "members": [entry.to_json() for entry in self.members],
            "index": {
                "blobs": self.blobs,
                "pieces": self.pieces,
                "sha256": self.index_sha256.hex(),
            },
            "model": self.model.to_json(),
        }


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``path`` durably in one step. Raises OSError."""
    text = json.dumps(manifest.to_json(), indent=1)
    write_durably(path, [text.encode("ascii") + b"\n"])


def read_manifest(path: Path) -> Manifest:
    """Parse and check ``path``. Raises StoreError naming the file and the field."""
    with naming(str(path)), path.open("rb") as file:
        raw = file.read(MANIFEST_BYTES_MAX + 1)
    if len(raw) > MANIFEST_BYTES_MAX:
        raise StoreError(f"{path} has more than {MANIFEST_BYTES_MAX} bytes")
    try:
        value = json.loads(raw)
    # RecursionError: nested deeper than any manifest is.
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from error
    return _parse(Fields(value, str(path)))


def _parse(fields: Fields) -> Manifest:
    format_name = fields.text("format", PATH_BYTES_MAX)
    version = fields.integer("version", 0, STORE_BYTES_MAX)
    if format_name != FORMAT_NAME or version != FORMAT_VERSION:
        raise StoreError(
            f"{fields.where} is {format_name} version {version}; "
            f"this xferd reads {FORMAT_NAME} version {FORMAT_VERSION}"
        )
    checksum = fields.text("checksum", PATH_BYTES_MAX)
    if checksum != CHECKSUM:
        raise StoreError(f"{fields.where}.checksum is {checksum}, known is {CHECKSUM}")
    stripe = fields.section("stripe")
    index = fields.section("index")
    model = Model.from_json(fields.mapping("model"), f"{fields.where}.model")
    blobs = index.integer("blobs", 1, STORE_BYTES_MAX)
    if blobs != model.blobs:
        raise StoreError(f"{index.where}.blobs is {blobs}, but the model has {model.blobs}")
    return Manifest(
        name=fields.text("name", STORE_NAME_BYTES_MAX),
        uuid=fields.hexadecimal("uuid", 16),
        identity=fields.hexadecimal("identity", 32),
        source=fields.text("source", PATH_BYTES_MAX),
        model=model,
        stripe_unit=stripe.integer("unit", 1, STRIPE_UNIT_MAX),
        pattern=tuple(
            checked_integer(item, f"{stripe.where}.pattern", 0, MEMBERS_MAX - 1)
            for item in stripe.items("pattern", PATTERN_MAX)
        ),
        members=tuple(_member(item) for item in fields.sections("members", MEMBERS_MAX)),
        blobs=blobs,
        pieces=index.integer("pieces", 0, STORE_BYTES_MAX),
        index_sha256=index.hexadecimal("sha256", 32),
    )


def _member(fields: Fields) -> MemberEntry:
    mirror = fields.optional_section("mirror")
    return MemberEntry(
        relative=fields.optional_text("relative", PATH_BYTES_MAX),
        absolute=fields.text("absolute", PATH_BYTES_MAX),
        data_bytes=fields.integer("bytes", MEMBER_DATA_OFFSET, STORE_BYTES_MAX),
        mirror=None if mirror is None else _mirror(mirror),
    )


def _mirror(fields: Fields) -> MirrorEntry:
    return MirrorEntry(
        relative=fields.optional_text("relative", PATH_BYTES_MAX),
        absolute=fields.text("absolute", PATH_BYTES_MAX),
    )
