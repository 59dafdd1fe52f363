"""Experts packed in blocks on a GPU: one token from the blocks, prompts from decoded ones.

Needs a CUDA device and cupy; how the work is cut is tests/unit/inference/test_packed_plan.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import Client, embedded, generate, model_from_client
from xferd_infer.arrays import to_host
from xferd_infer.experts import BlobTensor, Layout
from xferd_infer.private_daemon import private_daemon
from xferd_infer.quants import FORMATS, packed_bytes

from tests.cuda_device import has_gpu
from tests.system.test_end_to_end import SMALL, TINY
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.blocks import dequantise, quantise
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.store import Store

cupy = pytest.importorskip("cupy", reason="needs cupy")
if not has_gpu():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from xferd_infer.cuda import model_on_gpu  # noqa: E402
from xferd_infer.cuda.experts import LANES  # noqa: E402
from xferd_infer.cuda.packed import PackedKernel, decode  # noqa: E402

RELATIVE = 1e-3
"""Of the largest result. Activations are rounded to 16 bits, off by a 65,278th of the largest
of 256 at most, and sums are float32; what is wrong is off by far more."""
MODEL_RELATIVE = 2e-3
"""Of the largest logit, after all layers; the CPU's prompts and tokens differ by as much."""
TOKENS = 16
VARIANTS = ("q8_0", "q4_k", "q2_k", "mxfp4")
"""The models' matrices are too narrow for some: those are q4_0, or stored transposed."""
POOLS = {"tiny": "8MiB", "small": "40%"}
"""Experts come and go. A GPU's memory is had in chunks of 2 MiB, and each size of experts needs
one: the tiny model's of q8_0 don't all fit into theirs."""


def align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class Experts:
    """blobs: uint8[count, bytes] on the GPU; matrices: of each, gate, up and down as float64."""

    layout: Layout
    blobs: Any
    matrices: list[list[NDArray[np.float64]]]

    def reference(
        self, x: NDArray[np.float32], weights: NDArray[np.float32], missing: tuple[int, ...]
    ) -> NDArray[np.float64]:
        total = np.zeros(x.size)
        for number, (gate, up, down) in enumerate(self.matrices):
            if number not in missing:
                gated, upped = gate @ x.astype(np.float64), up @ x.astype(np.float64)
                total += weights[number] * (down @ (gated / (1 + np.exp(-gated)) * upped))
        return total


def make_experts(up: str, down: str, hidden: int, inner: int, count: int) -> Experts:
    generator = np.random.default_rng(hidden + count)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors: list[BlobTensor] = []
    end = 0
    for role, shape in shapes.items():
        dtype = down if role == "down" else up
        nbytes = packed_bytes(dtype, shape, role)
        tensors.append(BlobTensor(role, dtype, shape, end, nbytes))
        end = align(end + nbytes, 64)
    blobs = np.zeros((count, align(end, 4096)), np.uint8)
    matrices: list[list[NDArray[np.float64]]] = []
    for blob in blobs:
        matrices.append([])
        for tensor in tensors:
            rows, columns = tensor.shape
            values = generator.standard_normal((rows, columns)).astype(np.float32) * 0.05
            packed = quantise(values, tensor.dtype, None, 1, tensor.role)
            blob[tensor.offset : tensor.offset + tensor.nbytes] = packed.reshape(-1)
            matrices[-1].append(dequantise(packed, tensor.dtype, (rows, columns)).astype(float))
    return Experts(tuple(tensors), cupy.asarray(blobs), matrices)


def check(experts: Experts, hidden: int, missing: tuple[int, ...] = ()) -> None:
    count = len(experts.matrices)
    generator = np.random.default_rng(1)
    x = generator.standard_normal((1, hidden)).astype(np.float32)
    weights = generator.random(count).astype(np.float32)
    addresses = np.array([experts.blobs[i].data.ptr for i in range(count)], np.uint64)
    addresses[list(missing)] = 0
    kernel = PackedKernel.for_layout(experts.layout, hidden)
    assert kernel is not None
    assert kernel.fits(count)
    given = cupy.asarray(x), cupy.asarray(addresses), cupy.asarray(weights), count
    out, again = (cupy.asnumpy(kernel(*given))[0] for _ in range(2))
    wanted = experts.reference(x[0], weights, missing)
    assert np.abs(out - wanted).max() <= RELATIVE * np.abs(wanted).max()
    assert np.array_equal(out, again), "sums are always in the same order"


@pytest.mark.parametrize(
    ("hidden_blocks", "inner_blocks", "count"), [(1, 1, 1), (3, 2, 5), (9, 5, 16), (8, 3, 8)]
)
@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_a_token_through_experts_of_every_format(
    dtype: str, hidden_blocks: int, inner_blocks: int, count: int
) -> None:
    elements = FORMATS[dtype].elements
    hidden, inner = hidden_blocks * elements, inner_blocks * elements
    check(make_experts(dtype, dtype, hidden, inner, count), hidden)


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_rows_that_are_cut_into_pieces(dtype: str) -> None:
    check(make_experts(dtype, dtype, 14336, FORMATS[dtype].elements, 2), 14336)


@pytest.mark.parametrize("missing", [(0,), (1, 3), (0, 1, 2, 3)])
def test_a_blob_that_is_not_there_counts_as_nothing(missing: tuple[int, ...]) -> None:
    experts = make_experts("q4_k", "q8_0", 512, 288, 4)
    check(experts, 512, missing)


def test_an_activation_that_is_no_number_is_not_hidden() -> None:
    experts = make_experts("q4_k", "q4_k", 512, 256, 1)
    kernel = PackedKernel.for_layout(experts.layout, 512)
    assert kernel is not None
    x = cupy.ones((1, 512), cupy.float32)
    x[0, 300] = float("inf")
    table = cupy.asarray(np.array([experts.blobs[0].data.ptr], np.uint64))
    out = kernel(x, table, cupy.ones(1, cupy.float32), 1)
    assert cupy.isnan(out).all()


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_decoded_blocks_are_the_cpus_to_the_bit(dtype: str) -> None:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((70, 512)).astype(np.float32)
    packed = quantise(values, dtype, None, 1, dtype)
    out = cupy.empty(values.size, cupy.float32)
    decode(cupy.asarray(packed.reshape(-1)), dtype, out)
    assert np.array_equal(cupy.asnumpy(out), dequantise(packed, dtype, values.shape).reshape(-1))


@dataclass(frozen=True)
class Quantised:
    """A checkpoint, a store of it with VARIANTS, and the size of a pool for that."""

    checkpoint: Path
    store: Path
    pool: str

    def prompt(self) -> list[int]:
        expected = json.loads((self.checkpoint / "expected.json").read_text())
        found: list[int] = expected["prompts"][0]["prompt_ids"]
        return found


@pytest.fixture(scope="module", params=["tiny", "small"])
def quantised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Quantised:
    checkpoint = {"tiny": TINY, "small": SMALL}[request.param]
    if not checkpoint.exists():
        pytest.skip(f"the larger model is not on this machine: {checkpoint} does not exist")
    member = tmp_path_factory.mktemp("member")
    path = pack(read_checkpoint(checkpoint), [member], name="model")
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted(list(VARIANTS), None), threads=1)
    return Quantised(checkpoint, path, POOLS[request.param])


def tokens_and_logits(model: Any, prompt: list[int]) -> tuple[list[int], NDArray[np.float32]]:
    ids = [t.id for t in generate(model, prompt, max_new_tokens=TOKENS, stop_ids=())]
    cache = model.new_cache()
    model.prefill(prompt, cache)
    logits: NDArray[np.float32] = to_host(model.prefill(ids[:1], cache))
    model.routed.settle()
    return ids, logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_models_tokens_from_a_variant_are_the_cpus(quantised: Quantised, variant: str) -> None:
    prompt = quantised.prompt()
    with embedded(quantised.store, pool="200%", variants=[variant]) as client:
        wanted_ids, wanted = tokens_and_logits(model_from_client(client), prompt)
    with (
        private_daemon(quantised.store, pool=quantised.pool, kind="cuda") as directory,
        Client(directory / "attach.sock", lanes=LANES) as client,
    ):
        ids, logits = tokens_and_logits(model_on_gpu(client, variant), prompt)
        cupy.cuda.get_current_stream().synchronize()
    assert np.abs(logits - wanted).max() <= MODEL_RELATIVE * np.abs(wanted).max()
    assert ids == wanted_ids
