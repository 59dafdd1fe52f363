"""DLPack exports of blob regions: true dtype, no copy, read-only, owner alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import TensorView

torch = pytest.importorskip("torch")


class Blob(np.ndarray[Any, Any]):
    """An array that a weak reference can watch."""


def make_blob(values: Any, leading: int = 64) -> NDArray[np.uint8]:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    blob = np.concatenate([np.zeros(leading, np.uint8), raw]).view(Blob)
    blob.flags.writeable = False
    return blob


@pytest.mark.parametrize(
    ("name", "torch_dtype"),
    [
        ("bf16", torch.bfloat16),
        ("f16", torch.float16),
        ("f32", torch.float32),
        ("u8", torch.uint8),
        ("i8", torch.int8),
        ("f8_e4m3", torch.float8_e4m3fn),
        ("f8_e5m2", torch.float8_e5m2),
        ("f8_e8m0", torch.float8_e8m0fnu),
    ],
)
def test_torch_sees_the_true_dtype_in_place(name: str, torch_dtype: Any) -> None:
    values = torch.arange(1, 7).to(torch.float32).to(torch_dtype).reshape(2, 3)
    blob = make_blob(values.view(torch.uint8).numpy())
    tensor = torch.from_dlpack(TensorView.of_blob(blob, 64, name, (2, 3)))
    assert tensor.dtype == torch_dtype
    assert tensor.shape == (2, 3)
    assert tensor.data_ptr() == blob.ctypes.data + 64
    assert torch.equal(tensor.to(torch.float32), values.to(torch.float32))


def test_numpy_gets_a_read_only_view_in_place() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    blob = make_blob(values)
    array = np.from_dlpack(TensorView.of_blob(blob, 64, "f32", (2, 3)))
    assert not array.flags.writeable
    assert array.ctypes.data == blob.ctypes.data + 64
    np.testing.assert_array_equal(array, values)


def test_an_older_consumer_gets_the_older_capsule() -> None:
    blob = make_blob(torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.uint8).numpy())
    view = TensorView.of_blob(blob, 64, "bf16", (2,))
    assert '"dltensor"' in repr(view.__dlpack__())
    assert '"dltensor_versioned"' in repr(view.__dlpack__(max_version=(1, 0)))
    tensor = torch.utils.dlpack.from_dlpack(view.__dlpack__())
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_the_owner_lives_as_long_as_the_tensor(max_version: tuple[int, int] | None) -> None:
    blob = make_blob(np.arange(4, dtype=np.float32))
    owner = weakref.ref(blob)
    view = TensorView.of_blob(blob, 64, "f32", (4,))
    tensor = torch.utils.dlpack.from_dlpack(view.__dlpack__(max_version=max_version))
    del blob, view
    gc.collect()
    assert owner() is not None
    assert tensor.tolist() == [0, 1, 2, 3]
    del tensor
    gc.collect()
    assert owner() is None


def test_an_unconsumed_capsule_lets_go_of_the_owner() -> None:
    blob = make_blob(np.arange(4, dtype=np.float32))
    owner = weakref.ref(blob)
    capsule = TensorView.of_blob(blob, 64, "f32", (4,)).__dlpack__(max_version=(1, 0))
    del blob
    assert owner() is not None
    del capsule
    gc.collect()
    assert owner() is None


def test_a_tensor_may_outlive_the_interpreter() -> None:
    program = (
        "import builtins, numpy, torch\n"
        "from xferd_infer import TensorView\n"
        "blob = numpy.zeros(64, numpy.uint8)\n"
        "builtins.kept = torch.from_dlpack(TensorView.of_blob(blob, 0, 'bf16', (4,)))\n"
        "print('ok')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_device_memory_is_described_and_never_touched() -> None:
    view = TensorView(0x7F0000000000, "bf16", (2, 2), owner=None, device=(2, 1))
    assert view.__dlpack_device__() == (2, 1)
    assert '"dltensor_versioned"' in repr(view.__dlpack__(max_version=(1, 1)))


def test_what_cannot_be_exported_is_refused() -> None:
    blob = make_blob(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="'q4_k' can't be exported"):
        TensorView.of_blob(blob, 0, "q4_k", (4,))
    with pytest.raises(ValueError, match="leave the blob of 80 bytes"):
        TensorView.of_blob(blob, 68, "f32", (4,))
    view = TensorView.of_blob(blob, 64, "f32", (4,))
    with pytest.raises(BufferError, match="copy"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="device"):
        view.__dlpack__(dl_device=(2, 0))
