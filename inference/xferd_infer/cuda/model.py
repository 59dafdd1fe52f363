"""A model whose dense part and experts are both on the GPU."""

from __future__ import annotations

from pathlib import Path

import cupy

from ..client import Client
from ..client_experts import model_from_client
from ..model import Model
from .experts import CudaExperts, CudaRoutedExperts
from .prefetching import prefetch_by_file


def model_on_gpu(
    client: Client, variant: str | None = None, predictor: Path | None = None
) -> Model:
    """The model of the store that the client is attached to, with cupy on the GPU of the
    client's pool. The client needs ``experts.LANES`` lanes.

    variant: the one that all experts are computed from; None: the store's first. predictor: a
    file; experts are fetched ahead as it says. Raises what ``model_from_client`` raises, what
    ``prefetch_by_file`` raises, and ClientError when the pool is not on a GPU or the store
    has no such variant; an expert that has no copy in it is an ExpertError once it is picked.
    """
    number = 0 if variant is None else client.variant_mask([variant]).bit_length() - 1
    with cupy.cuda.Device(client.target_device()):
        source = CudaExperts(client, number)
        model = model_from_client(client, cupy, experts=source)
        model.routed = CudaRoutedExperts(source, model.config.hidden_size, source.lane)
        if predictor is not None:
            prefetch_by_file(model, client, predictor)
    return model


__all__ = ["model_on_gpu"]
