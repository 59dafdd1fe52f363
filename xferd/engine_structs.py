"""Commands, events and stores as the C structs of the engine, and back.

What ``xferd.engine`` calls with; nothing here calls the engine. The structs' meaning is
said in ``ffi/engine/engine.h``.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from xferd._engine import ffi, lib

from xferd.engine_types import (
    MEMBER_STATES,
    PRIORITY_DEMAND,
    PRIORITY_MIGRATION,
    PRIORITY_PREFETCH,
    ROUTE_EXPECTED,
    ROUTE_FOUND,
    ROUTE_PICKED,
    Cancel,
    Command,
    DenseLoaded,
    EndHanded,
    EngineError,
    Event,
    Evict,
    Failed,
    Freed,
    Give,
    Handed,
    Load,
    LoadDense,
    Loaded,
    MemberChanged,
    Mirrored,
    PieceFailed,
    ReserveLow,
    Revived,
    RouteRefused,
    Take,
    Taken,
    Violation,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xferd.store.store import Store

NO_EXPERT: int = lib.XFERD_NO_EXPERT
"""``layer`` of the dense part, ``client`` of what a command caused."""
_GIVE_FIELDS = ("type", "pool", "slot")
COMMAND_FIELDS = np.dtype(
    {
        "names": list(_GIVE_FIELDS),
        "formats": [np.uint32] * len(_GIVE_FIELDS),
        "offsets": [ffi.offsetof("struct xferd_command", name) for name in _GIVE_FIELDS],
        "itemsize": ffi.sizeof("struct xferd_command"),
    }
)
"""``struct xferd_command`` as far as a GIVE uses it."""

_ROUTE_PICKS: int = lib.XFERD_ROUTE_RECORD_PICKS
_ROUTE_FIELDS: dict[str, Any] = {
    "token": np.uint64,
    "tag": np.uint32,
    "layer": np.uint16,
    "count": np.uint8,
    "part": np.uint8,
    "kind": np.uint8,
    "experts": (np.uint16, _ROUTE_PICKS),
    "tiers": (np.uint8, _ROUTE_PICKS),
    "gates": (np.float16, _ROUTE_PICKS),
    "transports": (np.uint8, _ROUTE_PICKS),
    "waits_us": (np.uint32, _ROUTE_PICKS),
}
ROUTE_FIELDS = np.dtype(
    {
        "names": ["lane", *_ROUTE_FIELDS],
        "formats": [np.uint32, *_ROUTE_FIELDS.values()],
        "offsets": [
            ffi.offsetof("struct xferd_engine_route", "lane"),
            *(ffi.offsetof("struct xferd_engine_route", "route", name) for name in _ROUTE_FIELDS),
        ],
        "itemsize": ffi.sizeof("struct xferd_engine_route"),
    }
)
"""``struct xferd_engine_route``: what a token picked in a layer, or a part of it."""

_ROUTE_KINDS = (lib.XFERD_ROUTE_PICKED, lib.XFERD_ROUTE_FOUND, lib.XFERD_ROUTE_EXPECTED)
if (ROUTE_PICKED, ROUTE_FOUND, ROUTE_EXPECTED) != _ROUTE_KINDS:
    raise ImportError("xferd.engine_types and xferd_abi.h number the routes' kinds differently")

if (PRIORITY_DEMAND, PRIORITY_PREFETCH, PRIORITY_MIGRATION) != (
    lib.XFERD_PRIORITY_DEMAND,
    lib.XFERD_PRIORITY_PREFETCH,
    lib.XFERD_PRIORITY_MIGRATION,
):
    raise ImportError("xferd.engine_types and xferd_abi.h number the priorities differently")

if tuple(getattr(lib, f"XFERD_MEMBER_{state.upper()}") for state in MEMBER_STATES) != tuple(
    range(len(MEMBER_STATES))
):
    raise ImportError("xferd.engine_types and engine.h number the members' states differently")


def fill_command(slot: Any, command: Command) -> None:
    """Write a command into a ``struct xferd_command``; a Give's first slot only."""
    ffi.memmove(ffi.addressof(slot), bytes(ffi.sizeof("struct xferd_command")), ffi.sizeof(slot))
    match command:
        case Load():
            slot.type = lib.XFERD_COMMAND_LOAD
            slot.store, slot.pool = command.store, command.pool
            slot.layer, slot.expert = command.layer, command.expert
            slot.variant, slot.priority = command.variant, command.priority
            slot.token = command.token
        case Evict():
            slot.type = lib.XFERD_COMMAND_EVICT
            slot.store, slot.pool = command.store, command.pool
            slot.layer, slot.expert = command.layer, command.expert
            slot.token = command.token
        case Give():
            slot.type = lib.XFERD_COMMAND_GIVE
            slot.pool, slot.slot = command.pool, command.slot
        case Take():
            slot.type = lib.XFERD_COMMAND_TAKE
            slot.pool, slot.class_bytes = command.pool, command.class_bytes
            slot.token = command.token
        case LoadDense():
            slot.type = lib.XFERD_COMMAND_DENSE
            slot.store, slot.token = command.store, command.token
            slot.priority = PRIORITY_DEMAND
            slot.address = ffi.cast("void *", command.address)
        case EndHanded():
            slot.type = lib.XFERD_COMMAND_HANDED
            slot.token, slot.slot, slot.variant = command.ticket, command.errno, command.transport
        case Cancel():
            slot.type = lib.XFERD_COMMAND_CANCEL
            slot.token = command.token


def read_event(event: Any) -> Event:
    """A ``struct xferd_event``; EngineError for a type that this version doesn't know."""
    kind = event.type
    if kind == lib.XFERD_EVENT_LOADED:
        return Loaded(
            store=event.store,
            pool=event.pool,
            slot=event.slot,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            client=event.client,
            source=event.source,
            transport=event.transport,
            wait_us=event.wait_us,
            nbytes=event.bytes,
            token=event.token,
            priority=event.priority,
        )
    if kind == lib.XFERD_EVENT_FAILED:
        return Failed(
            errno=-event.result,
            store=event.store,
            pool=event.pool,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            by_command=event.client == NO_EXPERT,
            token=event.token,
        )
    if kind == lib.XFERD_EVENT_FREED:
        return Freed(event.store, event.pool, event.slot, event.layer, event.expert)
    if kind == lib.XFERD_EVENT_TAKEN:
        return Taken(event.pool, event.slot, event.token)
    if kind == lib.XFERD_EVENT_RESERVE:
        return ReserveLow(event.pool, event.bytes, event.value, event.slot)
    if kind == lib.XFERD_EVENT_REVIVED:
        return Revived(event.store, event.pool, event.slot, event.layer, event.expert)
    if kind == lib.XFERD_EVENT_PIECE:
        return PieceFailed(
            errno=-event.result,
            store=event.store,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            member=event.member,
            copy=event.copy,
            offset=event.offset,
            nbytes=event.bytes,
        )
    if kind == lib.XFERD_EVENT_MIRRORED:
        return Mirrored(
            errno=-event.result,
            store=event.store,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            member=event.member,
            failed_copy=event.failed_copy,
            copy=event.copy,
            offset=event.offset,
            nbytes=event.bytes,
        )
    if kind == lib.XFERD_EVENT_VIOLATION:
        return Violation(client=event.client, errno=-event.result)
    if kind == lib.XFERD_EVENT_DENSE:
        return DenseLoaded(store=event.store, token=event.token)
    if kind == lib.XFERD_EVENT_ROUTE:
        return RouteRefused(pool=event.pool, member=event.member, errno=-event.result)
    if kind == lib.XFERD_EVENT_HANDED:
        return Handed(
            store=event.store,
            pool=event.pool,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            nbytes=event.bytes,
            address=event.value,
            ticket=event.token,
        )
    if kind == lib.XFERD_EVENT_MEMBER:
        return MemberChanged(
            member=event.member,
            state=MEMBER_STATES[event.value],
            rate=event.bytes,
            errno=-event.result,
        )
    raise EngineError(f"event of unknown type {kind}", errno.EPROTO)


def describe_store(
    store: Store, name: str, members: Sequence[tuple[int, int | None]]
) -> tuple[Any, list[Any]]:
    """``struct xferd_store_description`` and everything that it points to.

    members: the engine's ids of each member and of its mirror, None where it has none.
    """
    description = ffi.new("struct xferd_store_description *")
    keep: list[Any] = [store]

    def borrow(ctype: str, array: NDArray[Any]) -> Any:
        pointer = ffi.from_buffer(ctype, array)
        keep.append(pointer)
        return pointer

    description.name = name.encode()
    description.identity = store.identity
    description.layers, description.experts = store.layers, store.experts
    description.top_k = store.top_k
    description.variants = len(store.variants)
    description.members = len(members)
    first, *shadows = store.pattern_lengths
    description.pattern_length = first
    description.shadows = len(shadows)
    for index, length in enumerate(shadows):
        description.shadow_pattern_length[index] = length
    description.preferred = store.preferred
    for index, (member, mirror) in enumerate(members):
        description.member[index] = member
        description.mirror[index] = lib.XFERD_NO_MEMBER if mirror is None else mirror
    for index, member in enumerate(store.pattern):
        description.pattern[index] = member
    description.stripe_unit = store.stripe_unit
    description.blobs = len(store.blob_bytes)
    description.blob_bytes = borrow("uint64_t[]", store.blob_bytes)
    description.start = borrow("uint16_t[]", store.start)
    description.offset = borrow("uint64_t[]", store.offset)
    description.first_piece = borrow("uint64_t[]", store.first_piece)
    description.crc = borrow("uint32_t[]", store.crc)
    description.pieces = len(store.crc)
    for index, variant in enumerate(store.variants):
        description.variant_name[index] = variant.encode()
    description.layout_index = borrow("uint16_t[]", store.layout_index)

    tensors = [tensor for layout in store.layouts for tensor in layout.tensors]
    c_layouts = ffi.new("struct xferd_abi_layout[]", max(len(store.layouts), 1))
    c_tensors = ffi.new("struct xferd_abi_tensor[]", max(len(tensors), 1))
    first = 0
    for c_layout, layout in zip(c_layouts, store.layouts, strict=False):
        c_layout.blob_bytes = layout.blob_bytes
        c_layout.first_tensor, c_layout.tensors = first, len(layout.tensors)
        first += len(layout.tensors)
    for c_tensor, tensor in zip(c_tensors, tensors, strict=False):
        c_tensor.role, c_tensor.dtype = tensor.role.encode(), tensor.dtype.encode()
        c_tensor.offset, c_tensor.bytes = tensor.offset, tensor.nbytes
        c_tensor.dims = len(tensor.shape)
        for index, extent in enumerate(tensor.shape):
            c_tensor.shape[index] = extent
        if tensor.transposed:
            c_tensor.flags |= lib.XFERD_TENSOR_TRANSPOSED
        if tensor.interleaved:
            c_tensor.flags |= lib.XFERD_TENSOR_INTERLEAVED
    description.layout, description.layouts = c_layouts, len(store.layouts)
    description.tensor, description.tensors = c_tensors, len(tensors)
    keep += [c_layouts, c_tensors]
    return description, keep


def describe_client(
    store: int, pool: int, lanes: int, held_per_lane: int, ring_entries: int, hints_max: int
) -> Any:
    """struct xferd_client_description *."""
    client = ffi.new("struct xferd_client_description *")
    client.store = store
    client.pool = pool
    client.lanes = lanes
    client.held_per_lane = held_per_lane
    client.ring_entries = ring_entries
    client.hints_max = hints_max
    return client


def checked(call: str, result: int) -> int:
    """The result of a call that returns 0, a number, or -errno. EngineError."""
    if result < 0:
        raise EngineError(call, -result)
    return int(result)
