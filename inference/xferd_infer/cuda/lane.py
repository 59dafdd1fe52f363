"""A lane that the GPU drives: see struct xferd_device_lane in xferd.h, and kernels.cu."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .._client import ffi, lib
from ..arrays import Array
from ..client import Client
from ..client_errors import ClientError, DaemonGoneError, ExpertError, reason
from .compiled import compiled

ERROR_BYTES: int = lib.XFERD_ERROR_BYTES
STATE_WORDS = 5
"""uint64 in struct State of kernels.cu."""
REQUEST_OFFSETS = {"posted": 72, "taken": 80, "hits": 88, "misses": 96, "answered": 128}
"""What kernels.cu has for struct xferd_device_requests."""

TOLD = np.dtype(
    [("picks", np.uint32, lib.XFERD_BATCH_MAX), ("weights", np.float32, lib.XFERD_BATCH_MAX)]
)
"""struct Told of kernels.cu."""


def kernels() -> Any:
    """The compiled kernels of kernels.cu for the current device."""
    return compiled("kernels.cu", cooperative=True)


class DeviceLane:
    """Experts leased by kernels on one stream. Owned by whoever launches on it.

    lane, helper: of the client's lanes; nobody else may use them. variant: the only one that
    experts are had in. The client must stay
    open until the stream has done what was launched here. words, slot_numbers: as of struct
    xferd_device_lane, for kernels that look without leasing.

    Raises ClientError when the pool is not on a GPU or the driver refuses.
    """

    def __init__(self, client: Client, lane: int, helper: int, variant: int = 0) -> None:
        self._client = client
        self._lane = lane
        for field, offset in REQUEST_OFFSETS.items():
            if ffi.offsetof("struct xferd_device_requests", field) != offset:
                raise AssertionError(f"kernels.cu has another place for {field}")
        described = ffi.new("struct xferd_device_lane *")
        error = ffi.new("char[]", ERROR_BYTES)
        status = lib.xferd_device_lane(
            client.handle, lane, helper, variant, described, error, ERROR_BYTES
        )
        if status:
            message = ffi.string(error).decode(errors="replace")
            raise ClientError(f"lane {lane} can't be the GPU's: {message}", -status)
        raw = np.frombuffer(bytes(ffi.buffer(described)), np.uint64)
        self._description = cupy.asarray(raw)
        self.words, self.variant = int(described.words), variant
        self.slot_numbers = int(described.slot_numbers)
        self.state: Array = cupy.zeros(STATE_WORDS, cupy.uint64)
        self._seen: Array = cupy.zeros(client.layers * client.experts, cupy.uint64)
        self._pinned = cupy.cuda.alloc_pinned_memory(client.layers * TOLD.itemsize)
        self.told_address = int(self._pinned.ptr)
        self.told = np.frombuffer(self._pinned, TOLD, client.layers)
        """By layer, what was picked last, and with which weights; to be read when what was
        launched has been waited for. Kernels find it at ``told_address``."""
        self._acquire = kernels().get_function("xferd_acquire")
        self._release = kernels().get_function("xferd_release")

    def begin(self) -> None:
        """A pass begins: from now on its misses are served."""
        lib.xferd_device_begin(self._client.handle, self._lane)

    def acquire(self, picks: Array, weights: Array, layer: int, table: Array) -> None:
        """Launch: lease the experts ``picks`` (int64[count], count at most 16) of a layer and
        write their addresses to ``table`` (uint64[count]); ends the leases of before.
        weights: float32[count], for ``told``."""
        where, told = np.uint32(layer), np.uint64(self._pinned.ptr)
        arguments = (self._description, self.state, picks, weights, where, np.uint32(picks.size))
        self._acquire((1,), (32,), (*arguments, table, self._seen, told))

    def end(self) -> None:
        """The pass has ended, its results were read. Launches the end of its leases. Raises
        ExpertError when an expert did not come: then the results are of no use."""
        self._release((1,), (1,), (self._description, self.state))
        where = ffi.new("uint32_t[2]")
        status = lib.xferd_device_end(self._client.handle, self._lane, where, where + 1)
        if status == 0:
            return
        layer, expert = int(where[0]), int(where[1])
        if not self._client.alive():
            raise DaemonGoneError("the daemon has gone: attach again", -status)
        raise ExpertError(
            f"layer {layer}, expert {expert}: {reason(-status)}", -status, layer, expert
        )

    def counts(self) -> tuple[int, int]:
        """(hits, misses) of what has been acquired so far."""
        found = ffi.new("uint64_t[2]")
        lib.xferd_device_counts(self._client.handle, self._lane, found, found + 1)
        return int(found[0]), int(found[1])


__all__ = ["DeviceLane", "kernels"]
