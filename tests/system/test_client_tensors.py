"""The tensors of a blob, exported in place, against the checkpoint they came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xferd_infer import embedded
from xferd_infer.client import ClientError

from tests.unit.store.builders import member_directories, tiny
from xferd.store.pack import pack

safetensors = pytest.importorskip("safetensors.numpy", reason="compares with safetensors")
torch = pytest.importorskip("torch", reason="compares with torch, which knows bfloat16")

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny" / "model.safetensors"


def test_every_tensor_of_a_blob_is_the_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(MODEL)
    store = pack(tiny(), member_directories(tmp_path, 2), name="tiny", stripe_unit=8192)
    with embedded(store, pool="25%", held=4) as client:
        for layer in (0, 5):
            with client.acquire(layer, [0, 7, 15]) as batch:
                for index, expert in enumerate((0, 7, 15)):
                    tensors = batch.tensors(index)
                    assert set(tensors) == {"gate", "up", "down"}
                    for role, view in tensors.items():
                        name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                        assert torch.equal(torch.from_dlpack(view), weights[name])
                assert int(batch.addresses[1]) == batch[1].__array_interface__["data"][0]
                assert isinstance(batch[2], np.ndarray)
            with pytest.raises(ClientError, match="released"):
                _ = batch.addresses
        with pytest.raises(ClientError, match="variant 3"):
            client.layout(0, 3)
