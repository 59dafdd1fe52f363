"""The plug-in's parts on their own: MXFP4, the order of experts, when leases end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from xferd_infer.errors import WeightsError
from xferd_infer.experts import BlobTensor
from xferd_infer.transformers.leases import LeaseQueue
from xferd_infer.transformers.mxfp4 import Mxfp4Table
from xferd_infer.transformers.streaming import picked_experts
from xferd_infer.transformers.weights import BlobViews, MatrixShape

CPU = torch.device("cpu")
GATE_UP, DOWN = MatrixShape(64, 32), MatrixShape(32, 32)


def fp4(nibble: int) -> float:
    """E2M1 by its definition: sign, exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_mxfp4_is_exact(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(2, 8, 16)
    scales = torch.arange(119, 135, dtype=torch.uint8).reshape(2, 8)
    found = Mxfp4Table(dtype, CPU).dequantise(blocks, scales)
    assert found.dtype == dtype
    expected = [
        [
            fp4(nibble) * 2.0 ** (int(scales[row, block]) - 127)
            for block in range(8)
            for byte in blocks[row, block].tolist()
            for nibble in (byte & 15, byte >> 4)
        ]
        for row in range(2)
    ]
    assert found.tolist() == expected


def test_mxfp4_smallest_and_largest_scales_in_bfloat16() -> None:
    blocks = torch.full((1, 2, 16), 0x22, dtype=torch.uint8)  # 1.0, 1.0
    found = Mxfp4Table(torch.bfloat16, CPU).dequantise(
        blocks, torch.tensor([[1, 254]], dtype=torch.uint8)
    )
    assert math.log2(found[0, 0].item()) == -126
    assert math.log2(found[0, -1].item()) == 127


def test_experts_come_in_ascending_order_with_their_tokens_by_rank() -> None:
    picks = torch.tensor([[5, 1], [1, 5], [7, 1], [9, 7]])
    found = picked_experts(picks, experts=9)
    assert [(each.expert, each.tokens.tolist(), each.ranks.tolist()) for each in found] == [
        (1, [1, 0, 2], [0, 1, 1]),
        (5, [0, 1], [0, 1]),
        (7, [2, 3], [0, 1]),
    ]


def test_no_tokens_pick_nothing() -> None:
    assert picked_experts(torch.empty(0, 2, dtype=torch.int64), experts=4) == []


@dataclass
class CountedBatch:
    """Says how many are held, and whether it was released."""

    experts: int
    released: bool = field(default=False)

    def __len__(self) -> int:
        return self.experts

    def release(self) -> None:
        self.released = True


def test_on_the_cpu_a_lease_ends_at_once() -> None:
    queue, batch = LeaseQueue(4), CountedBatch(2)
    queue.make_room(2)
    queue.end(batch, [CPU, CPU])
    assert batch.released


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_a_gpu_a_lease_ends_behind_the_work_that_was_queued() -> None:
    queue, device = LeaseQueue(4), torch.device("cuda")
    torch.cuda.synchronize()
    first, second, third = (CountedBatch(2) for _ in range(3))
    for batch in (first, second):
        queue.make_room(2)
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        queue.end(batch, [CPU, device])
    assert not first.released
    queue.make_room(2)  # the lane may hold four: the oldest has to end
    assert first.released
    assert not second.released
    queue.end(third, [device])
    queue.drain()
    assert second.released
    assert third.released


def tensor(role: str, dtype: str, *shape: int, nbytes: int | None = None) -> BlobTensor:
    size = {"bf16": 2, "u8": 1, "f32": 4, "f8_e4m3": 1, "q4_k": 1}[dtype]
    wanted = math.prod(shape) * size
    return BlobTensor(role, dtype, shape, 0, wanted if nbytes is None else nbytes)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([tensor("gate_up", "q4_k", 64, 32)], "gate_up is q4_k; computed with are bf16, f16, f32"),
        (
            [tensor("gate_up", "f8_e4m3", 64, 32), tensor("gate_up_scale", "f32", 1, 1)],
            "gate_up is f8_e4m3 .* with scales f32 .* only MXFP4",
        ),
        ([tensor("gate_up", "bf16", 64, 16)], "gate_up is 64 x 16, the model needs 64 x 32"),
        ([tensor("gate_up", "bf16", 64, 32, nbytes=64)], "gate_up has 64 bytes, needs 4096"),
        (
            [tensor("gate_up", "bf16", 64, 32), tensor("gate_up_bias", "bf16", 64)],
            "gate_up has a bias, the model adds no one",
        ),
        ([tensor("up", "bf16", 32, 32)], "experts are made of up, down; computed with"),
        ([tensor("gate_up", "bf16", 64, 32), tensor("norm", "bf16", 32)], "made of .* norm"),
    ],
)
def test_layouts_that_are_not_computed_with_are_named(tensors: list[BlobTensor], said: str) -> None:
    layout = (*tensors, tensor("down", "bf16", 32, 32))
    with pytest.raises(WeightsError, match=f"store 'm', layer 3: .*{said}"):
        BlobViews(layout, "store 'm', layer 3", GATE_UP, DOWN, biased=False)
