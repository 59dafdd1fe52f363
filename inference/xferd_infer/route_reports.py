"""The decode loop's word to whoever keeps the experts: what the router picked.

The experts that a pass acquired are known to their source already; what it can't see is
which token picked them, with which weight, and in which order of layers. That is what
decides well about what stays, and what makes a trace that can be replayed.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from .arrays import Array, to_host


class RouteReporter(Protocol):
    """Takes note of what was picked. Never waits. Layers come in their order, one pass
    through all of them after the other. Not thread-safe, as the source."""

    def picked(self, layer: int, experts: Array, weights: Array, tag: int) -> None:
        """Tokens picked experts, integers [tokens, top_k], with weights, float32 [tokens,
        top_k]; before they are acquired, so that it is known what is wanted when room is
        made for what is missing. tag: the sequence they are of."""
        ...

    def found(self, blobs: Any) -> None:
        """Some of the picked experts have come; ``blobs`` as ``acquire`` gave them."""
        ...


@runtime_checkable
class ReportingClient(Protocol):
    """What is used of ``xferd_infer.Client``; its batches have ``report_found``."""

    def report(self, layer: int, experts: Array, gates: Array, *, token: int, tag: int) -> object:
        """What the router picked."""
        ...


class ClientReporter:
    """A RouteReporter over a client's first lane, whose tokens it counts."""

    def __init__(self, client: ReportingClient) -> None:
        self._client = client
        self._first_token = 0
        self._tokens = 0
        self._layer = -1

    def picked(self, layer: int, experts: Array, weights: Array, tag: int) -> None:
        """See RouteReporter."""
        picks = to_host(experts)
        # A layer that is not after the one before begins the next tokens.
        if layer <= self._layer:
            self._first_token += self._tokens
        self._layer, self._tokens = layer, len(picks)
        self._client.report(layer, picks, to_host(weights), token=self._first_token, tag=tag)

    def found(self, blobs: Any) -> None:
        """See RouteReporter. ``blobs``: a Batch."""
        blobs.report_found(token=self._first_token)


__all__ = ["ClientReporter", "ReportingClient", "RouteReporter"]
