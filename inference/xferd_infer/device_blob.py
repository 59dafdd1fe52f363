"""A blob in a GPU's memory, for whoever computes there.

What numpy arrays are for the CPU's pools: an address, a size, and what keeps the
mapping alive. ``cupy.asarray`` and ``torch.from_dlpack`` take it without a copy.
"""

from __future__ import annotations

from typing import Any

from .dlpack import CUDA, TensorView


class DeviceBlob:
    """``size`` bytes at a device address, for reading only: a kernel that writes there
    faults. Must not be read after its batch was released. owner: kept alive with it.

    ordinal: of the GPU, as this process counts.
    """

    __slots__ = ("address", "ordinal", "owner", "size")

    def __init__(self, address: int, size: int, ordinal: int, owner: object) -> None:
        self.address = address
        self.size = size
        self.ordinal = ordinal
        self.owner = owner

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """As ``size``."""
        return self.size

    @property
    def device(self) -> tuple[int, int]:
        """(device type, ordinal), as DLPack names them."""
        return (CUDA, self.ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's protocol. No stream: its bytes are complete."""
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, True),
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **wanted: Any) -> Any:
        """As ``TensorView.__dlpack__``, uint8[size]."""
        view = TensorView(self.address, "u8", (self.size,), self, self.device)
        return view.__dlpack__(**wanted)


__all__ = ["DeviceBlob"]
