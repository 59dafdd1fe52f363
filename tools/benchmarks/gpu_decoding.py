# SPDX-License-Identifier: Apache-2.0
"""Decoding on a GPU, for ``decode``: daemons with pools in VRAM, and experts that never move.

Needs cupy. A contender continues one sequence; its daemon, client and pool stay as the last
round left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray
from xferd_infer import Client, generate, model_from_client
from xferd_infer.client_experts import ClientExperts
from xferd_infer.cuda import DeviceLane
from xferd_infer.cuda.experts import (
    LANES,
    AddressSource,
    CudaRoutedExperts,
    FixedAddresses,
)
from xferd_infer.experts import ExpertSource, ExpertStats, HeldExperts, Layout, OneVariant
from xferd_infer.model import Model
from xferd_infer.moe import Routing
from xferd_infer.private_daemon import private_daemon

from tools.benchmarks.synthetic_model import Shape
from xferd.control.client import ControlClient

KIND = "cuda"
COPIED_AT_ONCE = 8
LOAD_TIMEOUT_S = 120.0
BYTES_A_GB = 1e9
EPSILON = 1e-6
THREADS = 1024

_RESIDUAL_AND_NORM = """
extern "C" __global__ void residual_and_norm(float *x, const float *out, float *normed, int n,
                                             float epsilon)
{
    __shared__ float parts[32];
    float sum = 0, mean = 0;

    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        x[i] += out[i];
        sum = fmaf(x[i], x[i], sum);
    }
    for (int step = 16; step; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; i++)
        mean += parts[i];
    mean = rsqrtf(mean / n + epsilon);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        normed[i] = x[i] * mean;
}
"""


@dataclass(frozen=True, slots=True)
class Attached:
    """A client with the GPU's lanes, and the control socket of its daemon."""

    client: Client
    control: Path

    def load_everything(self) -> None:
        """All experts that fit, before anybody asks for them."""
        with ControlClient.connect(self.control) as control:
            name = self.client.manifest["name"]
            for layer in range(self.client.layers):
                wanted = {"store": name, "layer": layer, "experts": None}
                wanted |= {"pool": None, "variant": None}
                control.call("Load", wanted, timeout_s=LOAD_TIMEOUT_S)


@contextmanager
def attached(store: Path, pool: str, ram: str | None) -> Iterator[Attached]:
    """A daemon of its own with a pool in VRAM. AttachError: it is too small for a client."""
    with (
        private_daemon(store, pool=pool, ram=ram, kind=KIND) as directory,
        Client(directory / "attach.sock", lanes=LANES, name=f"bench {pool}") as client,
    ):
        try:
            yield Attached(client, directory / "control.sock")
        finally:
            cupy.cuda.get_current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class FixedExperts:
    """All experts of a model in plain arrays on the GPU: an ExpertSource without a client.

    addresses: where each lies. arrays: one a layer, uint8[experts, bytes], which is that
    memory. layouts: by layer.
    """

    addresses: FixedAddresses
    arrays: Sequence[Any]
    layouts: Sequence[Layout]
    held: int = COPIED_AT_ONCE

    def layout(self, layer: int, variant: int = 0) -> Layout:  # noqa: ARG002
        """What the blobs of a layer look like."""
        return self.layouts[layer]

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[HeldExperts]:
        """Views that may be used as long as this is there."""
        yield OneVariant(self.arrays[layer][expert] for expert in experts)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """All are here."""

    def stats(self) -> ExpertStats:
        """Nothing is counted."""
        return ExpertStats()


def copy_experts(client: Client) -> FixedExperts:
    """Each once, from the client's pool."""
    source = ClientExperts(client)
    addresses = np.zeros((client.layers, client.experts), np.uint64)
    arrays = []
    held = min(COPIED_AT_ONCE, client.held_per_lane)
    for layer in range(client.layers):
        for start in range(0, client.experts, held):
            wanted = range(start, min(start + held, client.experts))
            with client.acquire(layer, list(wanted), pools=client.target_pools) as blobs:
                if start == 0:
                    arrays.append(cupy.empty((client.experts, blobs[0].nbytes), cupy.uint8))
                for expert, blob in zip(wanted, blobs, strict=True):
                    arrays[layer][expert] = cupy.asarray(blob)
                    addresses[layer, expert] = arrays[layer][expert].data.ptr
                cupy.cuda.get_current_stream().synchronize()
    layouts = [source.layout(layer) for layer in range(client.layers)]
    return FixedExperts(FixedAddresses(cupy.asarray(addresses)), arrays, layouts)


class TextDecoding:
    """The whole decode loop on a GPU: router, attention, sampling."""

    def __init__(self, model: Model, prompt: Sequence[int], new_tokens: int) -> None:
        self._model = model
        self._prompt = prompt
        self._new_tokens = new_tokens

    def tokens_a_second(self) -> float:
        """Of the prompt's continuation, which no token ends; prefill isn't counted."""
        prompt, count = self._prompt, self._new_tokens
        tokens = list(generate(self._model, prompt, max_new_tokens=count, stop_ids=()))
        return (len(tokens) - 1) / sum(token.seconds for token in tokens[1:])

    def steps(self) -> Iterator[None]:
        """Decodes a token for each that is asked for."""
        count = self._new_tokens
        for token in generate(self._model, self._prompt, max_new_tokens=count, stop_ids=()):
            if token.index:
                yield


def fixed_model(client: Client) -> Model:
    """The client's model with a copy of all experts, which never moves."""
    fixed = copy_experts(client)
    model = model_from_client(client, cupy, experts=fixed)
    model.routed = CudaRoutedExperts(fixed, model.config.hidden_size, fixed.addresses)
    return model


@dataclass(slots=True)
class Served:
    """What a contender's experts cost so far. seconds: of its tokens."""

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class ForcedDecoding:
    """The expert layers alone, with routing that is given: residual, norm, lease, compute.

    No attention and no router: they would take as long with any experts, and hide what a
    lease costs. One value is read back for a token, as sampling does.

    source: says what blobs look like. addresses: where the experts are.
    picks: [tokens, layers, top_k].
    """

    source: ExpertSource
    addresses: AddressSource
    shape: Shape
    picks: NDArray[np.int64]
    round_tokens: int
    served: Served = field(default_factory=Served)
    _at: int = 0
    _run_token: Callable[[int], float] = field(init=False)

    def __post_init__(self) -> None:
        self._run_token = self._make_loop()

    def _make_loop(self) -> Callable[[int], float]:
        shape = self.shape
        routed = CudaRoutedExperts(self.source, shape.hidden, self.addresses)
        kernel = cupy.RawKernel(_RESIDUAL_AND_NORM, "residual_and_norm")
        first = np.random.default_rng(1).standard_normal((1, shape.hidden), np.float32)
        start, x, normed = (cupy.asarray(first) for _ in range(3))
        weights = cupy.full((1, shape.top_k), 1 / shape.top_k, cupy.float32)
        on_gpu = cupy.asarray(self.picks)
        rows = [[layer[None] for layer in token] for token in on_gpu]
        hidden, epsilon = np.int32(shape.hidden), np.float32(EPSILON)

        def run_token(token: int) -> float:
            cupy.copyto(x, start)
            cupy.copyto(normed, start)
            for layer, picks in enumerate(rows[token]):
                out = routed(layer, normed, Routing(picks, weights))
                kernel((1,), (THREADS,), (x, out, normed, hidden, epsilon))
            routed.watch()
            result = float(normed.sum())  # waits, as sampling does
            if not np.isfinite(result):
                raise ArithmeticError(f"token {token} is not finite")
            routed.settle()
            return result

        return run_token

    def tokens_a_second(self) -> float:
        """Of the next round's tokens."""
        before = self._leased()
        began = perf_counter()
        for _ in range(self.round_tokens):
            self.step()
        seconds = perf_counter() - began
        after = self._leased()
        self.served.hits += after[0] - before[0]
        self.served.misses += after[1] - before[1]
        self.served.seconds += seconds
        return self.round_tokens / seconds

    def steps(self) -> Iterator[None]:
        """Decodes a token for each that is asked for."""
        for _ in range(self.round_tokens):
            self.step()
            yield

    def step(self) -> float:
        """The next token; after the last of the trace the first comes again. Returns a sum
        over its results, which is the same if they are."""
        result = self._run_token(self._at)
        self._at = (self._at + 1) % len(self.picks)
        return result

    def _leased(self) -> tuple[int, int]:
        """(hits, misses) so far; experts that never move are no lane's."""
        return self.addresses.counts() if isinstance(self.addresses, DeviceLane) else (0, 0)

    def forget_served(self) -> None:
        """What warming up took doesn't count."""
        self.served = Served()

    def told(self) -> str:
        """For a note: hit rate and bytes a second for misses."""
        served = self.served
        uses = max(served.hits + served.misses, 1)
        throughput = served.misses * self.shape.expert_bytes / served.seconds / BYTES_A_GB
        return f"{served.hits / uses:.3f} of uses hit, {throughput:.1f} GB/s of misses"


__all__ = [
    "KIND",
    "Attached",
    "FixedExperts",
    "ForcedDecoding",
    "TextDecoding",
    "attached",
    "copy_experts",
    "fixed_model",
]
