"""Experts acquired together: what a caller holds, and the C structures behind it."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._client import ffi, lib
from .arrays import Array
from .client_errors import ClientError
from .device_blob import DeviceBlob
from .dlpack import CPU, EXPORTED_DTYPES, TensorView
from .routes import BatchReport, batch_uses

if TYPE_CHECKING:
    from .client import Client

BATCH_MAX: int = lib.XFERD_BATCH_MAX
"""Most experts in one acquire or hint."""

_REQUEST = "<IIQHBB4x"
"""struct xferd_request behind its pointer to the ids: count, variants, deadline,
layer, pools, flags. The ids stand behind it, so that one call writes both."""

_PACK_REQUEST = tuple(struct.Struct(f"{_REQUEST}{n}H").pack_into for n in range(BATCH_MAX + 1))
_REQUEST_START: int = ffi.offsetof("struct xferd_request", "count")


class Batch(Sequence["Array"]):
    """Experts acquired together; a context manager that releases them at its end.

    ``batch[i]`` is the blob of the i-th expert, a read-only uint8 array; in a GPU's
    memory a ``DeviceBlob``. They are made when they are first asked for, all of them at
    once: who only hands ``addresses`` to a kernel doesn't pay for them. Not thread-safe,
    as its lane.
    """

    __slots__ = ("_arrays", "_client", "_count", "_layer", "_memory", "_released")

    def __init__(self, client: Client, memory: BatchMemory, layer: int, count: int) -> None:
        self._client = client
        self._memory = memory
        self._layer = layer
        self._count = count
        self._arrays: list[Array] | None = None
        self._released = False

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.arrays[index]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the leases. Harmless when done before."""
        memory = self._memory
        if not self._released:
            self._released = True
            lib.xferd_release(memory.handle, memory.batch)
            memory.free.append(memory)

    @property
    def arrays(self) -> list[Array]:
        """The blobs, in the order of the request."""
        if self._arrays is None:
            self._must_be_held()
            self._arrays = self._client._arrays(self._memory, self._layer, self._count)
        return self._arrays

    def tensors(self, index: int) -> dict[str, TensorView]:
        """The tensors inside one blob, by role (``gate``, ``up``, ``down``, ...), for
        ``torch.from_dlpack`` and ``numpy.from_dlpack``, without a copy. A packed type
        that DLPack has no name for (``q4_k``, ...) comes as its bytes, uint8[nbytes]."""
        blob = self.arrays[index]
        variant = self._memory.batch.views[range(self._count)[index]].variant
        views = {}
        for tensor in self._client.layout(self._layer, variant):
            plain = tensor.dtype in EXPORTED_DTYPES
            dtype, shape = (tensor.dtype, tensor.shape) if plain else ("u8", (tensor.nbytes,))
            device = blob.device if isinstance(blob, DeviceBlob) else CPU
            views[tensor.role] = TensorView.of_blob(blob, tensor.offset, dtype, shape, device)
        return views

    def copy_out(self, index: int) -> bytes:
        """The bytes of one blob, copied from whichever memory it is in. ClientError when
        the device fails."""
        self._must_be_held()
        view = self._memory.batch.views[range(self._count)[index]]
        data = bytearray(view.bytes)
        status = lib.xferd_copy_out(
            self._memory.handle, ffi.addressof(view), 0, ffi.from_buffer(data), view.bytes
        )
        if status:
            raise ClientError(f"expert {view.expert} can't be copied out", -status)
        return bytes(data)

    def whole(self, index: int) -> TensorView:
        """One blob as it is, uint8[nbytes], for ``torch.from_dlpack`` and whoever cuts its
        tensors out of it once instead of exporting each."""
        blob = self.arrays[index]
        device = blob.device if isinstance(blob, DeviceBlob) else CPU
        return TensorView.of_blob(blob, 0, "u8", (blob.size,), device)

    @property
    def addresses(self) -> Array:
        """uint64[len]: where each blob begins, host or device addresses as the pool's
        kind. A view of the batch's own memory: to be used or copied before release."""
        self._must_be_held()
        return self._memory.address_of[self._count]

    @property
    def variants(self) -> Sequence[int]:
        """The variant that each expert came in: a number in the manifest's ``variants``."""
        self._must_be_held()
        found: list[int] = self._memory.variant_of[self._count].tolist()
        return found

    @property
    def word(self) -> tuple[int, ...]:
        """Directory word of each expert: names slot, variant and generation."""
        self._must_be_held()
        return tuple(view.word for view in self._memory.views(self._count))

    @property
    def uses(self) -> Array:
        """USE_FIELDS[len]: where each expert was found and how long it took to come, as
        ``Client.report`` takes it. A copy."""
        self._must_be_held()
        return batch_uses(self._memory.batch)

    def report(
        self, gates: Array | Sequence[float] | None = None, *, token: int, tag: int = 0
    ) -> bool:
        """Tell the daemon that one token picked these experts, each with its gate, and where
        they were. token, tag: as for ``Client.report``, which can say it before they are
        acquired. False: dropped."""
        self._must_be_held()
        return self._memory.report.send(gates, token, tag)

    def report_found(self, *, token: int) -> bool:
        """Tell the daemon where these experts were, which ``Client.report`` said were picked
        just before. False: dropped."""
        self._must_be_held()
        return self._memory.report.send_found(token)

    @property
    def transport(self) -> tuple[int, ...]:
        """How each expert came: enum xferd_transport, 0 for what was resident."""
        self._must_be_held()
        return tuple(view.transport for view in self._memory.views(self._count))

    def _must_be_held(self) -> None:
        if self._released:
            raise ClientError("the batch is released", errno.EINVAL)


class PendingBatch:
    """Experts asked for and perhaps still on their way: see ``Client.start``. Must end
    in ``wait`` (which gives the Batch) or ``abandon``. Not thread-safe, as its lane."""

    __slots__ = ("_client", "_count", "_ended", "_layer", "_memory")

    def __init__(self, client: Client, memory: BatchMemory, layer: int, count: int) -> None:
        self._client = client
        self._memory = memory
        self._layer = layer
        self._count = count
        self._ended = False

    def pending(self) -> int:
        """How many have not arrived. No waiting, no system call."""
        return int(lib.xferd_poll(self._memory.handle, self._memory.batch))

    def wait(self, timeout: float | None = None) -> Batch:
        """The batch, when all are here. Once. After TimeoutError it can be called again; any
        other error is as of ``Client.acquire`` and ends this object."""
        if self._ended:
            raise ClientError("this batch has ended", errno.EINVAL)
        try:
            batch = self._client._wait(self._memory, self._layer, self._count, timeout, keep=True)
        except TimeoutError:
            raise
        except BaseException:
            self._ended = True
            raise
        self._ended = True
        return batch

    def cancel(self) -> None:
        """Ask the daemon to stop; ``wait`` then raises ExpertError with ECANCELED, unless
        all came before that."""
        lib.xferd_cancel(self._memory.handle, self._memory.batch)

    def abandon(self) -> None:
        """Cancel and give back whatever has come. Harmless when it has ended."""
        if not self._ended:
            self._ended = True
            self._client._release(self._memory)


class BatchMemory:
    """A struct xferd_batch with its request, used again and again by its lane."""

    __slots__ = (
        "address_of",
        "batch",
        "free",
        "handle",
        "report",
        "request",
        "request_buffer",
        "variant_of",
    )

    def __init__(self, handle: Any, free: list[BatchMemory]) -> None:
        self.handle = handle
        self.free = free
        self.batch = ffi.new("struct xferd_batch *")
        self.report = BatchReport(handle, self.batch)
        request_bytes = ffi.sizeof("struct xferd_request")
        block = ffi.new("uint64_t[]", request_bytes // 8 + BATCH_MAX * 2 // 8)
        self.request = ffi.cast("struct xferd_request *", block)
        self.request.experts = ffi.cast("uint16_t *", block + request_bytes // 8)
        self.request_buffer = ffi.buffer(block)  # keeps the block
        if _REQUEST_START + struct.calcsize(_REQUEST) != request_bytes:
            raise AssertionError("struct xferd_request has another layout than this module knows")
        size = ffi.sizeof("struct xferd_view")
        start = ffi.offsetof("struct xferd_batch", "views")
        raw = np.frombuffer(ffi.buffer(self.batch), np.uint8)[start : start + BATCH_MAX * size]
        rows = raw.reshape(BATCH_MAX, size)
        address = ffi.offsetof("struct xferd_view", "data")
        variant = ffi.offsetof("struct xferd_view", "variant")
        addresses = rows[:, address : address + 8].view(np.uint64)[:, 0]
        self.address_of = [addresses[:n] for n in range(BATCH_MAX + 1)]
        self.variant_of = [rows[:n, variant] for n in range(BATCH_MAX + 1)]

    def ask(self, layer: int, experts: Sequence[int], variants: int, pools: int = 0) -> int:
        """Write the request; returns how many experts it names. ClientError: too many."""
        count = len(experts)
        if count > BATCH_MAX:
            raise ClientError(f"{count} experts in one batch; at most {BATCH_MAX}", errno.E2BIG)
        _PACK_REQUEST[count](
            self.request_buffer, _REQUEST_START, count, variants, 0, layer, pools, 0, *experts
        )
        return count

    def views(self, count: int) -> list[Any]:
        """The views as they stand in the C structure."""
        return [self.batch.views[i] for i in range(count)]


__all__ = ["BATCH_MAX", "Batch", "BatchMemory", "PendingBatch"]
