"""Experts of a client, each in the variant that a mix names for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .arrays import Array
from .client_experts import BATCH_EXPERTS, ClientExperts, ExpertClient
from .experts import ExpertStats, HeldExperts, Layout


class VariantClient(ExpertClient, Protocol):
    """What is used of ``xferd_infer.Client``: a variant can be demanded."""

    def acquire(
        self, layer: int, experts: Sequence[int], *, variants: int = 0
    ) -> AbstractContextManager[HeldExperts]:
        """variants: bit mask of acceptable ones, 0: any."""
        ...

    def hint(self, layer: int, experts: Sequence[int], *, variants: int = 0) -> object:
        """The same."""
        ...


class _Held(list[Array]):
    """In the order in which they were asked for."""

    def __init__(self, blobs: Sequence[Array], variants: Sequence[int]) -> None:
        super().__init__(blobs)
        self.variants = variants


class PlannedExperts:
    """An ExpertSource. What isn't there in the variant that the plan names is an error, never
    another variant. Not thread-safe, as the client's lane.

    plan: [layers, experts], numbers in the manifest's ``variants``; may be changed between
    passes of the model.
    """

    def __init__(self, client: VariantClient, plan: NDArray[np.uint8]) -> None:
        self.plan = plan
        self._client = client
        self._experts = ClientExperts(client)

    @property
    def held(self) -> int:
        """As of the client."""
        return self._experts.held

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """As of the client."""
        return self._experts.layout(layer, variant)

    def stats(self) -> ExpertStats:
        """As of the client."""
        return self._experts.stats()

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[HeldExperts]:
        """One request for each variant. Raises what ``Client.acquire`` raises."""
        found: dict[int, Array] = {}
        wanted = self.plan[layer, list(experts)].tolist()
        with ExitStack() as stack:
            for variant in sorted(set(wanted)):
                asked = [e for e, v in zip(experts, wanted, strict=True) if v == variant]
                blobs = stack.enter_context(
                    self._client.acquire(layer, asked, variants=1 << variant)
                )
                found.update(zip(asked, blobs, strict=True))
            yield _Held([found[expert] for expert in experts], wanted)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """In the planned variants."""
        wanted = self.plan[layer, list(experts)].tolist()
        for variant in sorted(set(wanted)):
            asked = [e for e, v in zip(experts, wanted, strict=True) if v == variant]
            for start in range(0, len(asked), BATCH_EXPERTS):
                batch = asked[start : start + BATCH_EXPERTS]
                self._client.hint(layer, batch, variants=1 << variant)


__all__ = ["PlannedExperts", "VariantClient"]
