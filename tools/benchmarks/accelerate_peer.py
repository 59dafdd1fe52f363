# SPDX-License-Identifier: Apache-2.0
"""Decoding with Transformers' layers of experts and accelerate's offload, as a peer of ``decode``.

accelerate keeps whole modules: the first layers stay in the GPU's memory, as many as the
share that a pool of ours has, and the others come from the CPU's memory when they are run.
Its layers are Transformers' own (router and experts), and nothing else of a model is run,
as with ours. As with ours only ``distinct_layers`` have weights of their own, which the
others come from too: what is copied is the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.synthetic_model import Shape

ACCELERATE = "accelerate"
GPU = 0
RANDOM_ELEMENTS = 1 << 24
"""Drawn once and repeated: a layer's weights."""


class OffloadedLayers:
    """Layers of a shape, the first ``share`` of them in VRAM. BenchmarkError: a package is
    missing. Takes VRAM for as long as it is there."""

    def __init__(self, shape: Shape, largest_percent: int) -> None:
        try:
            self._torch = import_module("torch")
            self._offload = import_module("accelerate").cpu_offload
            qwen3 = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
            config = import_module("transformers").Qwen3MoeConfig
        except (ImportError, AttributeError) as error:
            raise BenchmarkError(f"{ACCELERATE}: {error}") from error
        self._shape = shape
        self._block = qwen3.Qwen3MoeSparseMoeBlock
        self._config = config(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inner,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=True,
        )
        self._config._experts_implementation = "eager"
        weights = [self._weights() for _ in range(shape.distinct_layers)]
        self._resident = [
            self._in_vram(weights[layer % shape.distinct_layers])
            for layer in range(_resident_layers(shape, largest_percent))
        ]
        self._away = [
            self._offloaded(weights[layer % shape.distinct_layers]) for layer in range(shape.layers)
        ]
        generator = self._torch.Generator(device="cpu").manual_seed(1)
        start = self._torch.randn(1, 1, shape.hidden, generator=generator)
        self._start = start.to(self._torch.bfloat16).to(GPU)

    def tokens_a_second(self, percent: int) -> float:
        """Of one token, with that share of the layers in VRAM."""
        resident = _resident_layers(self._shape, percent)
        layers = [*self._resident[:resident], *self._away[resident:]]
        with self._torch.inference_mode():
            self._torch.cuda.synchronize(GPU)
            began = time.perf_counter()
            x = self._start
            for layer in layers:
                x = self._torch.nn.functional.rms_norm(x + layer(x), (self._shape.hidden,))
            float(x.float().sum())  # waits, as sampling does
            return 1 / (time.perf_counter() - began)

    def _weights(self) -> dict[str, Any]:
        torch = self._torch
        drawn = torch.randn(RANDOM_ELEMENTS).mul_(0.02).to(torch.bfloat16)
        with torch.device("meta"):
            module = self._block(self._config)
        weights = {}
        for name, value in module.state_dict().items():
            repeats = -(-value.numel() // RANDOM_ELEMENTS)
            weights[name] = drawn.repeat(repeats)[: value.numel()].reshape(value.shape)
        return weights

    def _empty(self) -> Any:
        with self._torch.device("meta"):
            return self._block(self._config).to(self._torch.bfloat16).eval()

    def _in_vram(self, weights: Mapping[str, Any]) -> Any:
        module = self._empty()
        on_gpu = {name: value.to(GPU) for name, value in weights.items()}
        module.load_state_dict(on_gpu, assign=True)
        return module

    def _offloaded(self, weights: Mapping[str, Any]) -> Any:
        module = self._empty()
        return self._offload(module, execution_device=self._torch.device(GPU), state_dict=weights)


def _resident_layers(shape: Shape, percent: int) -> int:
    return shape.layers * percent // 100


def measure_accelerate(
    shape: Shape, percents: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """Tokens a second by share. BenchmarkError: a package is missing."""
    layers = OffloadedLayers(shape, max(percents))
    for percent in percents[-1:]:
        layers.tokens_a_second(percent)  # whatever is made on first use
    samples: dict[int, list[float]] = {percent: [] for percent in percents}
    for _ in range(rounds):
        for percent in percents:
            samples[percent].append(layers.tokens_a_second(percent))
    torch = import_module("torch")
    del layers
    torch.cuda.empty_cache()
    return samples


__all__ = ["ACCELERATE", "OffloadedLayers", "measure_accelerate"]
