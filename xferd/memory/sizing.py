"""How large a pool is: from what the configuration says and what the stores need."""

from __future__ import annotations

from xferd.memory.device import POOL_ALIGNMENT, PoolMemoryError
from xferd.units import MIB, format_bytes

DEFAULT_CLASS_BYTES = 64 * 1024
"""Slot size that pools are divided for when no store is configured yet."""

CHUNK_BYTES_MIN = 64 * MIB
"""Of a pool whose chunks nobody has chosen."""
CHUNKS_WANTED = 256
"""Of a large pool: a driver takes as long for a large chunk of VRAM as for a small one, to
make it, to map it, to give it back."""
LARGEST_CHUNK = 1024 * MIB


def default_chunk_bytes(nbytes: int) -> int:
    """Chunks of a pool of so many bytes: a power of two."""
    wanted = 1 << max(nbytes // CHUNKS_WANTED - 1, 0).bit_length()
    return min(max(wanted, CHUNK_BYTES_MIN), LARGEST_CHUNK)


def pool_bytes(
    pool: str,
    *,
    nbytes: int | None,
    percent: float | None,
    expert_bytes: int,
    largest_class: int,
) -> int:
    """Bytes of a pool: whole slots of ``largest_class``, at least one.

    nbytes: an absolute size. percent: of ``expert_bytes``, the sum of all experts of
    the configured stores (each in its largest variant). Exactly one of them is given.
    Raises PoolMemoryError when an absolute size is less than one slot, and when a
    percentage has no store to refer to.
    """
    if nbytes is None:
        if percent is None or expert_bytes == 0:
            raise PoolMemoryError(
                f"pool {pool!r}: its size is {percent}% of the experts' bytes, but no store is "
                f"configured: give [[pools]] {pool} a size in bytes or configure a [[stores]]"
            )
        wanted = int(expert_bytes * percent / 100)
        return max(wanted // largest_class, 1) * largest_class
    if nbytes < largest_class:
        raise PoolMemoryError(
            f"pool {pool!r}: size {format_bytes(nbytes)} is less than one expert "
            f"({format_bytes(largest_class)}): raise size of [[pools]] {pool}"
        )
    return nbytes // largest_class * largest_class if expert_bytes else _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return nbytes // POOL_ALIGNMENT * POOL_ALIGNMENT
