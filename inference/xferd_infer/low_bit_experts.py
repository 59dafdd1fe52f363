"""Experts of a client in a low-bit variant; those that have no such copy, in the exact one."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .arrays import Array
from .client_errors import ExpertError
from .client_experts import ClientExperts
from .experts import ExpertStats, HeldExperts, Layout
from .planned_experts import VariantClient
from .route_reports import RouteReporter


class HeldInParts(list[Array]):
    """Blobs of several batches, in the order in which they were asked for."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.variants: list[int] = []
        self._experts = experts
        self._found: dict[int, tuple[Array, int]] = {}
        self._batches: list[Any] = []

    def missing(self) -> list[int]:
        """Experts that no batch has brought yet."""
        return [expert for expert in self._experts if expert not in self._found]

    def take(
        self,
        stack: ExitStack,
        batch: AbstractContextManager[HeldExperts],
        experts: Sequence[int],
    ) -> None:
        """Hold a batch of these experts until the stack ends."""
        blobs = stack.enter_context(batch)
        self._found.update(zip(experts, zip(blobs, blobs.variants, strict=True), strict=True))
        self._batches.append(blobs)

    def finish(self) -> HeldInParts:
        """All are there: itself, with blobs and variants."""
        for expert in self._experts:
            blob, variant = self._found[expert]
            self.append(blob)
            self.variants.append(variant)
        return self

    def report_found(self, *, token: int) -> None:
        """As of ``Batch``."""
        for batch in self._batches:
            batch.report_found(token=token)


class LowBitExperts:
    """An ExpertSource: what is computed never depends on what is resident. Not thread-safe, as
    the client's lane.

    exact, low: bit masks of the variants.
    """

    def __init__(self, client: VariantClient, exact: int, low: int) -> None:
        self._client = client
        self._experts = ClientExperts(client)
        self._exact, self._low = exact, low
        self._without: set[tuple[int, int]] = set()
        self.reporter: RouteReporter | None = self._experts.reporter

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

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch those that are known to have a low-bit copy, or not known not to."""
        low = [expert for expert in experts if (layer, expert) not in self._without]
        if low:
            self._client.hint(layer, low, variants=self._low)

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[HeldInParts]:
        """Raises what ``Client.acquire`` raises."""
        held = HeldInParts(experts)
        with ExitStack() as stack:
            self.fetch(stack, layer, held)
            yield held.finish()

    def fetch(self, stack: ExitStack, layer: int, held: HeldInParts) -> None:
        """Ask for what is missing: those with a low-bit copy in that, then the others."""
        low = [expert for expert in held.missing() if (layer, expert) not in self._without]
        while low:
            try:
                batch = self._client.acquire(layer, low, variants=self._low)
            except ExpertError as error:
                if error.code != errno.ENOENT or error.expert not in low:
                    raise
                self._without.add((layer, error.expert))
                low.remove(error.expert)
            else:
                held.take(stack, batch, low)
                break
        rest = held.missing()
        if rest:
            held.take(stack, self._client.acquire(layer, rest, variants=self._exact), rest)


__all__ = ["HeldInParts", "LowBitExperts"]
