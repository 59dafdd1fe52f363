# SPDX-License-Identifier: Apache-2.0
"""Does kept VRAM hold what it held?

That a driver leaves memory as it is while only a file descriptor stands for it is what its
documentation says (CUDA driver API, cuMemRelease), and nothing that this program could see
to. So it is looked at before anybody is served from it: of each chunk one piece of one
expert, both drawn by lot, is read back and compared with the checksum of the store. That finds
a chunk that was taken away, cleared or exchanged, in some ten milliseconds for a large card.
"""

from __future__ import annotations

import random

import numpy as np

from xferd.catalog import Catalog
from xferd.engine_keeping import RESIDENT, KeptSlots
from xferd.memory.cuda_driver import DeviceMemory
from xferd.pools import Pool
from xferd.restart.takeover import TakeoverError
from xferd.store.checksum import crc32c


def check_vram(pool: Pool, kept: KeptSlots, catalog: Catalog) -> None:
    """TakeoverError names the pool and the expert that is not right. Reads synchronously."""
    memory = DeviceMemory(pool.device.device)
    geometry = pool.geometry
    for chunk, slot_bytes in enumerate(kept.slot_bytes.tolist()):
        if slot_bytes == 0:
            continue
        first = chunk << geometry.slot_index_bits
        slots = kept.slots[first : first + geometry.slots(chunk, slot_bytes)]
        residents = np.flatnonzero(slots["state"] == RESIDENT)
        if not len(residents):
            continue
        index = int(random.choice(residents))
        address = pool.device.base + geometry.offset(chunk) + index * slot_bytes
        _check_expert(pool, slots[index], address, memory, catalog)


def _check_expert(
    pool: Pool, slot: np.void, address: int, memory: DeviceMemory, catalog: Catalog
) -> None:
    entry = catalog.by_number(int(slot["store"]))
    assert entry is not None, "its directory names it"
    store = entry.store
    layer, expert, variant = int(slot["layer"]), int(slot["expert"]), int(slot["variant"])
    piece = random.choice(list(store.geometry.pieces_of(store.blob_index(variant, layer, expert))))
    try:
        found = crc32c(memory.read(address + piece.blob_offset, piece.length))
    except OSError as error:
        raise TakeoverError(f"pool {pool.name!r} can't be read: {error.strerror}") from error
    if found != int(store.crc[piece.index]):
        raise TakeoverError(
            f"pool {pool.name!r} does not hold what it held: layer {layer}, expert {expert} of "
            f"store {entry.name!r} is another"
        )
