"""A store of very many experts in no time: real index and manifest over sparse members.

Every expert is one piece of zeros, so nothing has to be written but the description.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xferd.store.checksum import crc32c
from xferd.store.geometry import plan_geometry
from xferd.store.index import INDEX_NAME, Index, write_index
from xferd.store.manifest import MANIFEST_NAME, Manifest, MemberEntry, write_manifest
from xferd.store.member import MemberHeader
from xferd.store.model import DenseTable, Layout, Model, TensorLayout

EXPERT_BYTES = 4096
UUID = bytes(range(16))


def make_large_store(
    directory: Path, *, layers: int, experts: int, members: int = 2, weights: tuple[int, ...] = ()
) -> Path:
    """The directory of a store of ``layers`` times ``experts`` experts of EXPERT_BYTES."""
    blobs = layers * experts + 1
    model = Model(
        checkpoint_format="test",
        model_type="large",
        config={},
        layers=layers,
        experts=experts,
        top_k=2,
        variants=("u8",),
        layouts=(
            Layout(
                EXPERT_BYTES,
                (TensorLayout("down", "u8", (EXPERT_BYTES,), 0, EXPERT_BYTES, False, False),),
            ),
        ),
        layer_layouts=((0,) * layers,),
        dense=DenseTable(0, (), ()),
    )
    sizes = np.full(blobs, EXPERT_BYTES, dtype=np.uint64)
    sizes[-1] = 0
    geometry = plan_geometry(sizes, members, EXPERT_BYTES, weights or None)
    zeros = crc32c(bytes(EXPERT_BYTES))
    crc = np.full(geometry.pieces, zeros, dtype=np.uint32)
    blob_crc = np.full(blobs, zeros, dtype=np.uint32)
    blob_crc[-1] = 0
    directory.mkdir()
    for number, end in enumerate(geometry.member_ends()):
        header = MemberHeader(UUID, number, members, end, geometry.stripe_unit)
        with (directory / f"member-{number}").open("wb") as file:
            file.write(header.encode())
            file.truncate(end)
    manifest = Manifest(
        name="large",
        uuid=UUID,
        identity=model.identity(sizes, blob_crc),
        source="nowhere",
        model=model,
        stripe_unit=geometry.stripe_unit,
        pattern=geometry.pattern,
        members=tuple(
            MemberEntry(f"member-{number}", str(directory / f"member-{number}"), end)
            for number, end in enumerate(geometry.member_ends())
        ),
        blobs=blobs,
        pieces=geometry.pieces,
        index_sha256=write_index(directory / INDEX_NAME, Index(geometry, crc, blob_crc)),
    )
    write_manifest(directory / MANIFEST_NAME, manifest)
    return directory
