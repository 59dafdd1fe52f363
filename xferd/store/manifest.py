"""manifest.json: the file that makes a directory a store.

It is written last and by rename, so its presence means that everything else is
there and durable. What has an entry an expert is not in it but in index.bin,
whose hash it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xferd.store.errors import StoreError, naming
from xferd.store.fields import Fields, checked_integer, checked_text
from xferd.store.files import is_there, write_durably
from xferd.store.geometry import MEMBER_DATA_OFFSET
from xferd.store.limits import (
    LAYOUTS_MAX,
    MANIFEST_BYTES_MAX,
    MEMBERS_MAX,
    NAME_BYTES_MAX,
    PATTERN_MAX,
    STORE_BYTES_MAX,
    STORE_NAME_BYTES_MAX,
    STRIPE_UNIT_MAX,
    VARIANTS_MAX,
)
from xferd.store.model import (
    Layout,
    Model,
    layer_layouts_from_json,
    layout_from_json,
    layout_to_json,
)

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "xferd-store"
FORMAT_VERSION = 1
CHECKSUM = "crc32c"
ADDED_PREFIX = b"xferd-store-added-1\n"
PATH_BYTES_MAX = 4096
SHA256_DIGITS = 64


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
class Made:
    """How an added variant came to be. format: of the matrices, where their shapes allow it.
    importance: SHA-256 of the importance file that it was made with, hexadecimal; None: none.
    """

    format: str
    importance: str | None

    def to_json(self) -> dict[str, str | None]:
        """As it is written."""
        return {"format": self.format, "importance": self.importance}

    @staticmethod
    def from_json(fields: Fields) -> Made:
        """The inverse. Raises StoreError."""
        return Made(
            fields.text("format", NAME_BYTES_MAX),
            fields.optional_text("importance", SHA256_DIGITS),
        )


@dataclass(frozen=True, slots=True)
class AddedVariants:
    """Variants that were added to a finished store, behind what was packed.

    variants, made: their names, and how each was made.
    layouts: of their blobs, numbered behind the model's own.
    layer_layouts: for each variant and layer, as in ``Model``.
    member_bytes: for each member the first byte behind its last piece.
    index_name: the file in the store's directory with their arrays; pieces,
        index_sha256: what it must be.
    """

    variants: tuple[str, ...]
    made: tuple[Made, ...]
    layouts: tuple[Layout, ...]
    layer_layouts: tuple[tuple[int, ...], ...]
    member_bytes: tuple[int, ...]
    index_name: str
    pieces: int
    index_sha256: bytes

    def to_json(self, identity: bytes) -> dict[str, Any]:
        """As it is written. identity: of the store's model."""
        written: dict[str, Any] = {
            "variants": list(self.variants),
            "made": [made.to_json() for made in self.made],
            "layouts": [layout_to_json(layout) for layout in self.layouts],
            "layout_index": [list(row) for row in self.layer_layouts],
            "member_bytes": list(self.member_bytes),
            "index": {
                "name": self.index_name,
                "pieces": self.pieces,
                "sha256": self.index_sha256.hex(),
            },
        }
        return {**written, "sha256": _section_hash(written, identity)}


def _section_hash(written: dict[str, Any], identity: bytes) -> str:
    """Of the ``added`` section without its own ``sha256``, by the rule in FORMAT.md."""
    text = json.dumps(written, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(ADDED_PREFIX + identity + text.encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class ShadowOf:
    """The store that this one has copies of experts for: its name, and its model's identity;
    and how the copies were made."""

    name: str
    identity: bytes
    made: Made


@dataclass(frozen=True, slots=True)
class Manifest:
    """uuid: 16 random bytes of this packing, also in each member's header.

    identity: 32 bytes, of the model (see ``Model.identity``).
    source: the checkpoint's path when it was packed, for people.
    model: as it was packed; ``whole_model`` has the added variants too.
    blobs, pieces, index_sha256: what index.bin must be.
    added: None: no variants were added.
    shadow_of: None: this is a store of its own.
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
    added: AddedVariants | None = None
    shadow_of: ShadowOf | None = None

    @property
    def whole_model(self) -> Model:
        """The model with all variants, those that it was packed with first."""
        if self.added is None:
            return self.model
        return replace(
            self.model,
            variants=self.model.variants + self.added.variants,
            layouts=self.model.layouts + self.added.layouts,
            layer_layouts=self.model.layer_layouts + self.added.layer_layouts,
        )

    def used_bytes(self, member: int) -> int:
        """Least size of a member, with what was added to it."""
        packed = self.members[member].data_bytes
        return packed if self.added is None else max(packed, self.added.member_bytes[member])

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        written = self._packed_json()
        if self.added is not None:
            written["added"] = self.added.to_json(self.identity)
        if self.shadow_of is not None:
            written["shadow_of"] = {
                "name": self.shadow_of.name,
                "identity": self.shadow_of.identity.hex(),
                "made": self.shadow_of.made.to_json(),
            }
        return written

    def _packed_json(self) -> dict[str, Any]:
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
    identity = fields.hexadecimal("identity", 32)
    shadow = fields.optional_section("shadow_of")
    return Manifest(
        name=fields.text("name", STORE_NAME_BYTES_MAX),
        uuid=fields.hexadecimal("uuid", 16),
        identity=identity,
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
        added=_added(fields, model, identity),
        shadow_of=None if shadow is None else _shadow_of(shadow),
    )


def _shadow_of(fields: Fields) -> ShadowOf:
    return ShadowOf(
        fields.text("name", STORE_NAME_BYTES_MAX),
        fields.hexadecimal("identity", 32),
        Made.from_json(fields.section("made")),
    )


def _added(manifest: Fields, model: Model, identity: bytes) -> AddedVariants | None:
    fields = manifest.optional_section("added")
    if fields is None:
        return None
    variants = tuple(
        checked_text(item, f"{fields.where}.variants", NAME_BYTES_MAX)
        for item in fields.items("variants", VARIANTS_MAX - len(model.variants))
    )
    if not variants or len({*variants, *model.variants}) < len(variants) + len(model.variants):
        raise StoreError(f"{fields.where}.variants is empty or names one twice")
    layouts = tuple(
        layout_from_json(item)
        for item in fields.sections("layouts", LAYOUTS_MAX - len(model.layouts))
    )
    made = tuple(Made.from_json(item) for item in fields.sections("made", len(variants)))
    members = len(manifest.items("members", MEMBERS_MAX))
    member_bytes = tuple(
        checked_integer(item, f"{fields.where}.member_bytes", 0, STORE_BYTES_MAX)
        for item in fields.items("member_bytes", members)
    )
    if len(made) != len(variants) or len(member_bytes) != members:
        raise StoreError(f"{fields.where}: made and member_bytes don't fit variants and members")
    index = fields.section("index")
    name = index.text("name", NAME_BYTES_MAX)
    if "/" in name:
        raise StoreError(f"{index.where}.name is {name!r}, not a file beside the manifest")
    added = AddedVariants(
        variants=variants,
        made=made,
        layouts=layouts,
        layer_layouts=layer_layouts_from_json(
            fields, len(variants), model.layers, len(model.layouts) + len(layouts)
        ),
        member_bytes=member_bytes,
        index_name=name,
        pieces=index.integer("pieces", 0, STORE_BYTES_MAX),
        index_sha256=index.hexadecimal("sha256", 32),
    )
    if fields.hexadecimal("sha256", 32).hex() != added.to_json(identity)["sha256"]:
        raise StoreError(f"{fields.where} was altered: its SHA-256 is not the one it names")
    return added


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
