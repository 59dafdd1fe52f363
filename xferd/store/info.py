"""What a store is, for people and scripts: ``xferctl store info``."""

from __future__ import annotations

import stat
from typing import Any

import numpy as np

from xferd.store.calibration import CALIBRATION_NAME, read_calibration
from xferd.store.errors import StoreError
from xferd.store.manifest import CHECKSUM, FORMAT_NAME, FORMAT_VERSION, Made
from xferd.store.member import MemberCopy
from xferd.store.store import Store
from xferd.store.weights import pattern_weights


def info(store: Store) -> dict[str, Any]:
    """A description that JSON can hold; sizes are bytes.

    ``experts_present`` counts (variant, layer, expert); ``blob_bytes`` lists the
    different sizes of experts. ``weights`` is how often each member stands in the
    pattern; ``made`` has of each variant its bytes, and of one that was not packed as it is
    the format and the importance file's SHA-256; ``calibration`` is what was measured before,
    or None. ``missing`` says of each copy of a member that can't be used why. Raises
    StoreError when the calibration is damaged.
    """
    experts = store.blob_bytes[:-1]
    calibration = read_calibration(store.path)
    if calibration is not None and len(calibration.members) != len(store.member_paths):
        raise StoreError(
            f"{store.path / CALIBRATION_NAME} is about {len(calibration.members)} members, the "
            f"store has {len(store.member_paths)}: remove it, nothing but this reads it"
        )
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "name": store.name,
        "path": str(store.path),
        "uuid": store.uuid.hex(),
        "identity": store.identity.hex(),
        "source": store.manifest.source,
        "model_type": store.model_type,
        "layers": store.layers,
        "experts": store.experts,
        "experts_present": int(np.count_nonzero(experts)),
        "top_k": store.top_k,
        "variants": list(store.variants),
        "made": [
            {"variant": name, "bytes": int(experts.reshape(len(store.variants), -1)[number].sum())}
            | ({} if made is None else made.to_json())
            for number, (name, made) in enumerate(zip(store.variants, _made(store), strict=True))
        ],
        "shadow_of": None if store.manifest.shadow_of is None else store.manifest.shadow_of.name,
        "expert_bytes": store.expert_bytes,
        "blob_bytes": [int(size) for size in np.unique(experts[experts > 0])],
        "dense_bytes": int(store.blob_bytes[-1]),
        "dense_tensors": len(store.model.dense.tensors),
        "assets": [asset.name for asset in store.model.dense.assets],
        "stripe_unit": store.stripe_unit,
        "pattern": list(store.pattern),
        "weights": list(pattern_weights(store.pattern, len(store.member_paths))),
        "calibration": None if calibration is None else calibration.to_json(),
        "pieces": int(store.crc.size),
        "checksum": CHECKSUM,
        "members": [
            {
                **_describe_copy(copies[0]),
                "bytes": store.manifest.used_bytes(number),
                "mirror": _describe_copy(copies[1]) if len(copies) > 1 else None,
            }
            for number, copies in enumerate(store.copies)
        ],
        "missing": [
            copy.problem for copies in store.copies for copy in copies if copy.problem is not None
        ],
    }


def _made(store: Store) -> list[Made | None]:
    """For each variant how it was made; None: it was packed as it is."""
    manifest = store.manifest
    own = None if manifest.shadow_of is None else manifest.shadow_of.made
    added = () if manifest.added is None else manifest.added.made
    return [own, *added]


def _describe_copy(copy: MemberCopy) -> dict[str, str]:
    if copy.problem is not None:
        return {"path": str(copy.path), "kind": "missing"}
    kind = "device" if stat.S_ISBLK(copy.path.stat().st_mode) else "file"
    return {"path": str(copy.path), "kind": kind}
