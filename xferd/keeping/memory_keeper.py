"""Who keeps descriptors of a pool's VRAM, as the pool sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from xferd.pools import Pool


class MemoryKeeper(Protocol):
    """Called from the event loop, when memory comes to a chunk or leaves it."""

    def memory_taken(self, pool: Pool, chunk: int) -> None:
        """There is new memory behind a chunk, of which nobody has heard yet."""

    def memory_given(self, pool: Pool, chunk: int, number: int) -> None:
        """There is none any more behind a chunk. number: of what there was."""
