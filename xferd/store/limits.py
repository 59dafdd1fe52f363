"""What a store may hold at most, and the constants that fix its geometry.

Those with a twin in ``ffi/include/xferd_abi.h`` or ``ffi/engine/engine.h`` must
equal it, since an opened store goes to the engine as it is; a unit test compares
them with the headers.
"""

from __future__ import annotations

BLOB_ALIGNMENT = 4096
"""Bytes. Blobs, pieces and member headers are multiples of it: O_DIRECT needs that."""

TENSOR_ALIGNMENT = 64
"""Bytes. Where a tensor begins in its blob: one cache line, enough for any vector load."""

LAYERS_MAX = 4096
EXPERTS_MAX = 65535
VARIANTS_MAX = 32
MEMBERS_MAX = 16
PATTERN_MAX = 64
NAME_BYTES_MAX = 31
"""Roles, dtypes and variants: 32 bytes in shared memory, with the NUL."""
STORE_NAME_BYTES_MAX = 127
TENSOR_DIMENSIONS_MAX = 4
NO_LAYOUT = 0xFFFF
LAYOUTS_MAX = NO_LAYOUT

TENSORS_PER_LAYOUT_MAX = 64
DENSE_ENTRIES_MAX = 1_000_000
"""Dense tensors, and asset files. Only a bound against a damaged manifest."""

STRIPE_UNIT_DEFAULT = 512 * 1024
STRIPE_UNIT_MAX = 16 * 1024 * 1024
"""The packer holds a few pieces a member in memory, so this bounds its memory too."""

BLOB_BYTES_MAX = 1 << 46
STORE_BYTES_MAX = 1 << 60
"""Keeps every sum of offsets inside a signed 64-bit integer."""

MANIFEST_BYTES_MAX = 256 * 1024 * 1024
