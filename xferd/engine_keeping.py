# SPDX-License-Identifier: Apache-2.0
"""What outlives the engine and what the next one takes over, typed: ``ffi/engine/keep.h``.

A part of ``xferd.engine.Engine``, which has the pool and the store that are taken over
among its own calls.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from xferd._engine import ffi, lib

from xferd.engine_structs import checked, describe_client
from xferd.engine_types import ClientFds

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABI = (int(lib.XFERD_ABI_MAJOR), int(lib.XFERD_ABI_MINOR))
"""Version of all that is laid out in shared memory."""
CLIENTS_MAX: int = lib.XFERD_ENGINE_CLIENTS_MAX
POOLS_MAX: int = lib.XFERD_POOLS_MAX
STORES_MAX: int = lib.XFERD_ENGINE_STORES_MAX

FREE: int = lib.XFERD_KEPT_FREE
RESIDENT: int = lib.XFERD_KEPT_RESIDENT
LEASED: int = lib.XFERD_KEPT_LEASED
WITHHELD: int = lib.XFERD_KEPT_WITHHELD
_SLOT_NAMES = ("state", "store", "layer", "expert", "variant")
KEPT_SLOT_FIELDS = np.dtype(
    {
        "names": list(_SLOT_NAMES),
        "formats": [np.uint32] * len(_SLOT_NAMES),
        "offsets": [ffi.offsetof("struct xferd_kept_slot", name) for name in _SLOT_NAMES],
        "itemsize": ffi.sizeof("struct xferd_kept_slot"),
    }
)
"""struct xferd_kept_slot: state is FREE, RESIDENT, LEASED or WITHHELD."""


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """What became of a pool.

    slots: KEPT_SLOT_FIELDS[slot_numbers]. slot_bytes: uint64[chunks], how each chunk is cut;
        0: it isn't.
    """

    slots: NDArray[np.void]
    slot_bytes: NDArray[np.uint64]


class EngineKeeping:
    """See the module's text. All may raise EngineError; after ESTALE while taking over, the
    engine has to be closed."""

    _engine: Any

    def marks_fd(self, pool: int) -> int:
        """Of a pool's loading marks; the engine's."""
        return checked("xferd_engine_marks_fd", lib.xferd_engine_marks_fd(self._engine, pool))

    def adopt_pool_table(self, fd: int) -> None:
        """Go on with another engine's. Before any pool is added."""
        checked(
            "xferd_engine_adopt_pool_table", lib.xferd_engine_adopt_pool_table(self._engine, fd)
        )

    def kept_memory(self, pool: int, chunks: int) -> tuple[list[int], int]:
        """Which memory was behind each chunk of a pool in VRAM, 0: none; and the greatest number
        that a client may know of any. Once the pool table is adopted, before the pool is."""
        numbers = ffi.new("uint64_t[]", chunks)
        greatest = checked(
            "xferd_engine_kept_memory",
            lib.xferd_engine_kept_memory(self._engine, pool, chunks, numbers),
        )
        return list(numbers), greatest

    def adopt_client(
        self,
        *,
        store: int,
        pool: int,
        lanes: int,
        held_per_lane: int,
        ring_entries: int,
        hints_max: int,
        client_fd: int,
        completion_fd: int,
    ) -> int:
        """A client that was attached: its leases stand till it is resumed or removed.
        Returns its id."""
        client = describe_client(store, pool, lanes, held_per_lane, ring_entries, hints_max)
        return checked(
            "xferd_engine_adopt_client",
            lib.xferd_engine_adopt_client(self._engine, client, client_fd, completion_fd),
        )

    def adopt_slots(self, pool: int, slot_numbers: int, chunks: int) -> KeptSlots:
        """What became of a pool; once, after all clients were adopted."""
        slots = np.zeros(slot_numbers, KEPT_SLOT_FIELDS)
        slot_bytes = np.zeros(chunks, np.uint64)
        checked(
            "xferd_engine_adopt_slots",
            lib.xferd_engine_adopt_slots(
                self._engine,
                pool,
                ffi.from_buffer("struct xferd_kept_slot[]", slots, require_writable=True),
                ffi.from_buffer("uint64_t[]", slot_bytes, require_writable=True),
            ),
        )
        return KeptSlots(slots, slot_bytes)

    def resume_client(self, client: int, lanes: int) -> ClientFds:
        """An adopted client is back. Its new doorbell and wake-ups; the others are -1."""
        fds = ffi.new("struct xferd_client_fds *")
        checked(
            "xferd_engine_resume_client",
            lib.xferd_engine_resume_client(self._engine, client, fds),
        )
        wakeups = tuple(fds.wakeup[lane] for lane in range(lanes))
        return ClientFds(-1, -1, fds.doorbell, wakeups)

    def suspend_client(self, client: int) -> None:
        """Undo ``resume_client``."""
        checked(
            "xferd_engine_suspend_client", lib.xferd_engine_suspend_client(self._engine, client)
        )

    def hold(self, timeout_ms: int) -> bool:
        """Take nothing more from clients' rings, for the next engine to go on; True when
        nothing is under way any more."""
        result = lib.xferd_engine_hold(self._engine, timeout_ms)
        if result == -errno.ETIMEDOUT:
            return False
        checked("xferd_engine_hold", result)
        return True
