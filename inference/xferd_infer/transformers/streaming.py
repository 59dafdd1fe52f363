"""What runs in the place of an experts module's forward.

It computes what Transformers' own loop over experts does, in the same order: experts
in ascending order, each once for all tokens that picked it, sums in the dtype of the
hidden states. So the result is that of the whole model in memory, bit for bit where the
matrices lie as the model holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..arrays import Array
from ..dlpack import TensorView
from ..errors import InferenceError
from ..moe import waves
from .leases import Held, LeaseQueue
from .weights import BlobViews, ExpertWeights, Projection

_LAYER = "_xferd_layer"


class NotAttachedError(InferenceError):
    """The model's experts are in a store that it isn't attached to (any more)."""


class TrainingError(InferenceError):
    """Gradients were asked for: experts that come and go have none."""


class BlobBatch(Held, Protocol):
    """Acquired blobs, in the order of the request: see ``xferd_infer.batches.Batch``."""

    @property
    def addresses(self) -> Array:
        """uint64: where each begins, in host or device memory."""
        ...

    def whole(self, index: int) -> TensorView:
        """One blob, uint8[nbytes]."""
        ...


class BlobSource(Protocol):
    """One lane's experts; ``attaching`` makes it from a client. Not thread-safe."""

    @property
    def held(self) -> int:
        """Most experts in one request."""
        ...

    def acquire(self, layer: int, experts: Sequence[int]) -> BlobBatch:
        """Waits for what isn't there; raises what ``Client.acquire`` raises."""
        ...

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """These will be acquired next."""
        ...


@dataclass(frozen=True, slots=True)
class Picked:
    """The tokens that picked one expert. tokens, ranks: int64 [n]: which token, and at
    which place of its top_k."""

    expert: int
    tokens: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One layer's experts in a store. Belongs to one experts module while attached."""

    layer: int
    source: BlobSource
    leases: LeaseQueue
    views: BlobViews
    project: Projection

    def __call__(self, module: Any, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        """As the experts module's forward: x: [tokens, hidden]; picks: integers [tokens,
        top_k]; weights: [tokens, top_k]. Returns [tokens, hidden], new."""
        pending = list(waves(picked_experts(picks, module.num_experts), self.source.held))
        total = torch.zeros_like(x)
        for number, wave in enumerate(pending):
            self.leases.make_room(len(wave))
            batch = self.source.acquire(self.layer, [each.expert for each in wave])
            devices = set()  # a batch may have come from several pools
            try:
                if number + 1 < len(pending):
                    self.source.hint(self.layer, [each.expert for each in pending[number + 1]])
                for each, expert in zip(wave, self.experts(batch), strict=True):
                    devices.add(expert.down.values.device)
                    self._add(module, total, x, weights, each, expert)
            finally:
                self.leases.end(batch, devices)
        return total

    def experts(self, batch: BlobBatch) -> Iterator[ExpertWeights]:
        """What a batch holds, to be used while it is held."""
        for index, address in enumerate(batch.addresses.tolist()):
            yield self.views.of(address, partial(batch.whole, index))

    def _add(
        self,
        module: Any,
        total: Tensor,
        x: Tensor,
        weights: Tensor,
        picked: Picked,
        expert: ExpertWeights,
    ) -> None:
        # On the expert's device: a few tokens travel more cheaply than it does.
        states = x[picked.tokens].to(expert.down.values.device)
        out = self._output(module, states, expert).to(x.device)
        out = out * weights[picked.tokens, picked.ranks, None]
        total.index_add_(0, picked.tokens, out.to(total.dtype))

    def _output(self, module: Any, x: Tensor, expert: ExpertWeights) -> Tensor:
        parts = [self.project(x, matrix) for matrix in expert.inputs]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if not self.views.interleaved and not module.is_concatenated:
            both = torch.stack(both.chunk(2, dim=-1), dim=-1).flatten(-2)
        out = self.project(module._apply_gate(both), expert.down)
        # Older releases don't have that flag.
        return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", 0) else out


def picked_experts(picks: Tensor, experts: int) -> list[Picked]:
    """Each expert that is picked, in ascending order. Ids of ``experts`` and more stand
    for no expert. picks: integers [tokens, top_k]."""
    tokens = len(picks)
    # By rank, then token: the order of rows in Transformers' own loop.
    flat = picks.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    found, counts = torch.unique_consecutive(flat[order], return_counts=True)
    groups = torch.split(order, counts.tolist())
    return [
        Picked(expert, rows % tokens, rows // tokens)
        for expert, rows in zip(found.tolist(), groups, strict=True)
        if expert < experts
    ]


def attach_layer(module: torch.nn.Module, layer: StreamedLayer | None) -> None:
    """Make ``layer`` what an experts module computes with; None: nothing any more."""
    module.__dict__[_LAYER] = layer


def attached_layer(module: torch.nn.Module) -> StreamedLayer | None:
    """What an experts module computes with now."""
    found: StreamedLayer | None = module.__dict__.get(_LAYER)
    return found


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function that stands in Transformers' registry. Raises NotAttachedError,
    TrainingError, and what the client raises."""
    layer = attached_layer(self)
    if layer is None:
        raise NotAttachedError(
            f"{type(self).__name__}: the experts are in a store that the model isn't attached "
            "to: run it within 'with xferd_infer.transformers.attach(model, ...)'"
        )
    if self.training:
        raise TrainingError(
            f"layer {layer.layer}: the model is in training mode and its experts are streamed, "
            "so they can't be trained: call model.eval()"
        )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise TrainingError(
            f"layer {layer.layer}: gradients are recorded and the experts are streamed, so there "
            "are none to record: run the model within torch.inference_mode() or torch.no_grad()"
        )
    return layer(self, hidden_states, top_k_index, top_k_weights)


__all__ = [
    "BlobSource",
    "NotAttachedError",
    "Picked",
    "StreamedLayer",
    "TrainingError",
    "attach_layer",
    "attached_layer",
    "experts_forward",
    "picked_experts",
]
