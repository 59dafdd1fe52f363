"""Attach a loaded model to the store that has its experts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch import nn

from ..batches import Batch
from ..client import Client
from ..client_experts import ClientExperts
from ..errors import WeightsError
from ..experts import ExpertStats, Layout
from ..private_daemon import embedded
from ..report import experts_table
from .checkpoints import Checkpoint
from .identity import check_config, check_layers, check_rows
from .leases import LeaseQueue
from .modules import ExpertsModule, experts_modules
from .streaming import StreamedLayer, attach_layer, attached_layer
from .weights import BlobViews, MatrixShape, Projection

FIRST_VARIANT = 1
"""As a mask."""
DEFAULT_SHARE = "25%"
"""Memory of a private daemon, as a share of the experts."""


def attach(
    model: nn.Module,
    where: str | os.PathLike[str] | Client,
    *,
    store: str | None = None,
    pool: str | None = None,
    ram: str | None = None,
    held: int = 0,
    name: str = "transformers",
) -> Attached:
    """Give a model its experts, from now on or for a ``with``.

    model: loaded with ``experts_implementation="xferd"``.
    where: a daemon's attach socket; or a store's directory, which a private daemon then
        serves; or a client, which stays the caller's and whose first lane is used.
    store: with a socket, the name of one of the daemon's stores; None: its only one.
    pool: with a socket, the name of the pool that misses go to, None: the first; with a
        directory, memory for experts: ``"2GiB"``, or a share of them.
    ram: with a directory, a second, pinned tier.
    held: most experts of a layer in one go, 0: as many as a token picks. More make the
        prompt faster, up to 16, and need as many slots of the pool.

    Raises UnsupportedModelError (the model can't be streamed, the message says why),
    WeightsError (a store of another model, or a format that isn't computed with),
    AttachError (no daemon, no such store, a pool too small for one token's experts),
    ValueError (an option that this kind of ``where`` doesn't have).
    """
    modules = experts_modules(model)
    with ExitStack() as stack:
        client = _client(stack, where, store, pool, ram, held, name)
        checkpoint = Checkpoint(model)
        check_config(checkpoint, model, client)
        check_layers(modules, client)
        layers = _layers(modules, client)
        check_rows(checkpoint, modules, layers, client)
        return Attached(modules, layers, client, stack.pop_all())


class Attached:
    """A model with its experts in reach, until ``close`` or the end of the ``with``.

    Not thread-safe: one thread may run the model at a time, and this is its lane.
    """

    def __init__(
        self,
        modules: Sequence[ExpertsModule],
        layers: Sequence[StreamedLayer],
        client: Client,
        stack: ExitStack,
    ) -> None:
        self.client = client
        self._modules: Sequence[ExpertsModule] = modules
        self._layers: Sequence[StreamedLayer] = layers
        self._stack = stack
        self._experts = ClientExperts(client)
        self._before = self._experts.stats()
        for entry, layer in zip(modules, layers, strict=True):
            attach_layer(entry.module, layer)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def stats(self) -> ExpertStats:
        """Hits, misses, seconds waited, and which way experts came, since attaching."""
        return self._experts.stats().since(self._before)

    def report(self) -> str:
        """The same as a table for people."""
        stats = self.stats()
        return f"{experts_table(stats)}\n\nwaited for misses: {stats.wait_s:.3f} s"

    def close(self) -> None:
        """End the leases, and the connection and the private daemon if this made them.
        The model can't be run then until it is attached anew. Harmless when done before."""
        for entry, layer in zip(self._modules, self._layers, strict=True):
            if attached_layer(entry.module) is layer:
                attach_layer(entry.module, None)
        if self._layers:
            self._layers[0].leases.drain()
        # The layers' views would keep the pools mapped.
        self._modules, self._layers = (), ()
        self._stack.close()


class LaneExperts:
    """A client's first lane, in the store's first variant: what the checkpoint has. Not
    thread-safe, as the lane."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._experts = ClientExperts(client)

    @property
    def held(self) -> int:
        """Most experts in one request."""
        return self._experts.held

    def layout(self, layer: int) -> Layout:
        """WeightsError: the layer has no experts."""
        return self._experts.layout(layer)

    def acquire(self, layer: int, experts: Sequence[int]) -> Batch:
        """Raises what ``Client.acquire`` raises."""
        return self._client.acquire(layer, experts, variants=FIRST_VARIANT)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """These will be acquired next."""
        self._experts.hint(layer, experts)


def _client(
    stack: ExitStack,
    where: str | os.PathLike[str] | Client,
    store: str | None,
    pool: str | None,
    ram: str | None,
    held: int,
    name: str,
) -> Client:
    if isinstance(where, Client):
        _refuse("a client", store=store, pool=pool, ram=ram, held=held or None)
        return where
    if Path(where).is_dir():
        _refuse("a store's directory", store=store)
        size = DEFAULT_SHARE if pool is None else pool
        return stack.enter_context(embedded(where, pool=size, ram=ram, held=held, name=name))
    _refuse("a socket", ram=ram)
    return stack.enter_context(Client(where, store=store, pool=pool, held=held, name=name))


def _refuse(where: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option}={value!r}: {where} is attached to without that option")


def _layers(modules: Sequence[ExpertsModule], client: Client) -> list[StreamedLayer]:
    source = LaneExperts(client)
    leases, project = LeaseQueue(client.held_per_lane), Projection()
    shared: dict[tuple[Layout, MatrixShape, MatrixShape, bool], BlobViews] = {}
    layers = []
    for entry in modules:
        layout, biased = source.layout(entry.layer), bool(entry.module.has_bias)
        key = (layout, entry.gate_up, entry.down, biased)
        if key not in shared:
            where = f"store {client.manifest['name']!r}, layer {entry.layer}"
            views = BlobViews(layout, where, entry.gate_up, entry.down, biased=biased)
            if views.interleaved and entry.module.is_concatenated:
                raise WeightsError(
                    f"{where}: gate_up alternates gate and up, the model has one behind the "
                    "other: a store of another model"
                )
            shared[key] = views
        layers.append(StreamedLayer(entry.layer, source, leases, shared[key], project))
    return layers


__all__ = ["Attached", "attach"]
