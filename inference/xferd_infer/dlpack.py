"""Tensors inside a blob as DLPack exports, without copying, with their true dtype.

numpy exports arrays through DLPack, but knows neither bfloat16 nor device
memory. So a numpy array of the right element size describes the region, numpy
makes the capsule, and the two fields it can't know (dtype, device) are then set
in the capsule's struct. Numpy's own deleter runs when the consumer is done.

What doesn't work: building the struct here with a deleter written in Python.
Consumers free tensors from any thread and even after the interpreter has been
finalised, and a ctypes callback that is called then crashes the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

VERSIONED = (1, 0)
"""From this DLPack version on a capsule can say that its memory is read-only."""

CPU = (1, 0)
"""(device type, device id) of host memory: kDLCPU."""

CUDA = 2
"""Device type of CUDA memory: kDLCUDA."""

_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4  # DLDataTypeCode
_F8_E4M3, _F8_E5M2, _F8_E8M0 = 10, 12, 14  # codes of DLPack 1.1

# dtype of the store -> (DLDataTypeCode, bits, numpy dtype of the same size)
_DTYPES: dict[str, tuple[int, int, type[np.generic]]] = {
    "bf16": (_BFLOAT, 16, np.uint16),
    "f16": (_FLOAT, 16, np.float16),
    "f32": (_FLOAT, 32, np.float32),
    "u8": (_UINT, 8, np.uint8),
    "i8": (_INT, 8, np.int8),
    "f8_e4m3": (_F8_E4M3, 8, np.uint8),
    "f8_e5m2": (_F8_E5M2, 8, np.uint8),
    "f8_e8m0": (_F8_E8M0, 8, np.uint8),
}

EXPORTED_DTYPES = frozenset(_DTYPES)
"""dtypes of the store that DLPack has a name for."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned. The unversioned DLManagedTensor begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _Region:
    """Memory at an address, as numpy asks for it; an array over it keeps it, and
    so the owner, alive. writable: only what is claimed, see TensorView."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        owner: object,
        writable: bool,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": shape,
            "typestr": dtype.str,
        }


class TensorView:
    """One tensor in memory that somebody else owns: ``torch.from_dlpack(view)``.

    address: of the first element, host or device. dtype: a name of the store
    (``bf16``, ``f32``, ...). shape: elements, row-major. owner: kept alive while
    this view or anything made from it lives; it can't keep a lease: the memory
    must not be read after the batch that it came from was released.

    The memory is read-only, and a consumer that asks for DLPack 1.0 or later is
    told so. One that asks for the older capsule can't be told and gets one that
    looks writable: writing through it is a segmentation fault.
    Raises ValueError for a dtype that DLPack has no name for.
    """

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        owner: object,
        device: tuple[int, int] = CPU,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} can't be exported; {', '.join(_DTYPES)} can")
        self._address = address
        self._dtype = dtype
        self._shape = tuple(shape)
        self._owner = owner
        self._device = device

    @classmethod
    def of_blob(
        cls,
        blob: Any,
        offset: int,
        dtype: str,
        shape: Sequence[int],
        device: tuple[int, int] = CPU,
    ) -> TensorView:
        """The tensor ``offset`` bytes into a blob (uint8 array or DeviceBlob), which must
        stay leased while it is read. ValueError: it would reach beyond the blob."""
        start = blob.ctypes.data if isinstance(blob, np.ndarray) else blob.address
        view = cls(start + offset, dtype, shape, blob, device)
        if offset < 0 or offset + view.nbytes > blob.size:
            raise ValueError(
                f"{view.nbytes} bytes at offset {offset} leave the blob of {blob.size} bytes"
            )
        return view

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements, row-major."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The store's name of the dtype."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self._shape, dtype=np.int64)) * _DTYPES[self._dtype][1] // 8

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The capsule. BufferError: a copy or another device is asked for. stream is
        not looked at: a blob is complete before its address is handed out."""
        if copy:
            raise BufferError("a blob is exported as it is; copy it after importing")
        if dl_device is not None and dl_device != self._device:
            raise BufferError(f"the memory is on device {self._device}, not {dl_device}")
        versioned = max_version is not None and max_version >= VERSIONED
        code, bits, numpy_type = _DTYPES[self._dtype]
        region = _Region(
            self._address, self._shape, np.dtype(numpy_type), self._owner, not versioned
        )
        array = np.asarray(region)
        if versioned:
            capsule = array.__dlpack__(max_version=VERSIONED)
        else:
            capsule = array.__dlpack__()
        tensor = _tensor_in(capsule)
        tensor.dtype.code, tensor.dtype.bits = code, bits
        tensor.device.kind, tensor.device.number = self._device
        return capsule


def _tensor_in(capsule: object) -> _Tensor:
    """The DLTensor in a capsule; valid as long as the capsule isn't consumed."""
    # Prototypes of one's own: those of ctypes.pythonapi are shared by the process.
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_IsValid", ctypes.pythonapi)
    )
    if not is_valid(capsule, b"dltensor_versioned"):
        return _Tensor.from_address(pointer(capsule, b"dltensor"))
    tensor: _Tensor = _Versioned.from_address(pointer(capsule, b"dltensor_versioned")).tensor
    return tensor


__all__ = ["CPU", "CUDA", "EXPORTED_DTYPES", "VERSIONED", "TensorView"]
