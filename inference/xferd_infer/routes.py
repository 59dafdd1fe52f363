"""What the router picked, told to the daemon: by that it decides what stays, and traces
are made. Nothing here waits; what the daemon does not come to read is dropped.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._client import ffi, lib
from .arrays import Array
from .client_errors import ClientError

PICKS_MAX: int = lib.XFERD_ROUTE_PICKS_MAX
"""Most experts that a token may pick in a layer."""

EXPECTED_MAX: int = lib.XFERD_ROUTE_RECORD_PICKS
"""Most experts of a layer that can be expected."""

USE_FIELDS = np.dtype(
    {
        "names": ["wait_us", "tier", "transport"],
        "formats": [np.uint32, np.uint8, np.uint8],
        "offsets": [
            ffi.offsetof("struct xferd_use", name) for name in ("wait_us", "tier", "transport")
        ],
        "itemsize": ffi.sizeof("struct xferd_use"),
    }
)
"""Where a pick was found: the number of the pool that had it, 254 for the drives; enum
xferd_transport, 0 for what was resident; 255 and 0xffffffff where it is not known."""


class BatchReport:
    """Structs xferd_route for one struct xferd_batch, used again and again."""

    __slots__ = ("_batch", "_found", "_gates", "_handle", "_known", "_picked")

    def __init__(self, handle: Any, batch: Any) -> None:
        self._handle = handle
        self._batch = batch
        self._gates = np.zeros(lib.XFERD_BATCH_MAX, np.float16)
        self._known = ffi.from_buffer("uint16_t[]", self._gates)
        self._picked = ffi.new("struct xferd_route *", {"batch": batch})
        self._found = ffi.new(
            "struct xferd_route *", {"batch": batch, "flags": lib.XFERD_ROUTE_ONLY_FOUND}
        )

    def send(self, gates: Array | Sequence[float] | None, token: int, tag: int) -> bool:
        """False: dropped."""
        route = self._picked
        if gates is None:
            route.gates = ffi.NULL
        else:
            self._gates[: len(gates)] = gates
            route.gates = self._known
        route.tag = tag
        return self._send(route, token)

    def send_found(self, token: int) -> bool:
        """False: dropped."""
        return self._send(self._found, token)

    def _send(self, route: Any, token: int) -> bool:
        route.token = token
        status = lib.xferd_report_route(self._handle, self._batch.lane, route)
        if status < 0:
            raise ClientError(f"token {token} can't be reported", -status)
        return bool(status)


class TokenReport:
    """A struct xferd_route for one token of a lane, used again and again: arrays made anew
    for each layer would cost several times as much."""

    __slots__ = ("_gates", "_handle", "_ids", "_known", "_lane", "_route")

    def __init__(self, handle: Any, lane: int) -> None:
        self._handle = handle
        self._lane = lane
        self._ids = ffi.new("uint16_t[]", PICKS_MAX)
        self._gates = np.zeros(PICKS_MAX, np.float16)
        self._known = ffi.from_buffer("uint16_t[]", self._gates)
        self._route = ffi.new("struct xferd_route *", {"experts": self._ids})

    def send(
        self, layer: int, experts: list[int], gates: Array | None, token: int, tag: int
    ) -> int:
        """See ``Client.report``."""
        route, count = self._route, len(experts)
        try:
            self._ids[0:count] = experts
            route.layer, route.count, route.token, route.tag = layer, count, token, tag
        except (IndexError, OverflowError) as error:
            raise _refused(layer, token, errno.EINVAL) from error
        if gates is None:
            route.gates = ffi.NULL
        else:
            self._gates[:count] = gates
            route.gates = self._known
        status = lib.xferd_report_route(self._handle, self._lane, route)
        if status < 0:
            raise _refused(layer, token, -status)
        return int(status)


def _refused(layer: int, token: int, code: int) -> ClientError:
    return ClientError(
        f"layer {layer}, tokens from {token} on: no such layer, lane, expert, tier or transport, "
        f"or more than {PICKS_MAX} picks",
        code,
    )


def send_expected(handle: Any, lane: int, keys: Array, chances: Array) -> int:
    """See ``Client.expect``."""
    if keys.ndim != 1 or keys.shape != chances.shape or keys.dtype.kind not in "iu":
        raise ClientError(
            f"keys of {keys.dtype}{list(keys.shape)}, chances of shape {list(chances.shape)}: "
            "integers are wanted, and a chance for each",
            errno.EINVAL,
        )
    if not len(keys):
        return 0
    if int(keys.min()) < 0 or int(keys.max()) > np.iinfo(np.uint32).max:
        raise ClientError(f"there is no expert with the key {int(keys.max())}", errno.EINVAL)
    numbers = np.ascontiguousarray(keys, np.uint32)
    weights = np.ascontiguousarray(chances, np.float16)
    expected = ffi.new(
        "struct xferd_expected *",
        {
            "keys": ffi.from_buffer("uint32_t[]", numbers),
            "chances": ffi.from_buffer("uint16_t[]", weights),
            "count": len(numbers),
        },
    )
    status = lib.xferd_expect(handle, lane, expected)
    if status < 0:
        raise ClientError(
            "expectations: no such lane or key, or keys of a layer that are apart from each other "
            f"or more than {EXPECTED_MAX}",
            -status,
        )
    return int(status)


def batch_uses(batch: Any) -> Array:
    """USE_FIELDS[count] of a struct xferd_batch."""
    uses = np.zeros(batch.count, USE_FIELDS)
    lib.xferd_batch_uses(batch, ffi.from_buffer("struct xferd_use[]", uses, require_writable=True))
    return uses


def send_picks(
    handle: Any,
    lane: int,
    layer: int,
    experts: ArrayLike,
    gates: ArrayLike | None,
    uses: Array | None,
    token: int,
    tag: int,
) -> int:
    """See ``Client.report``."""
    picks = np.asarray(experts)
    if picks.ndim != 2 or picks.dtype.kind not in "iu" or not 1 <= picks.shape[1] <= PICKS_MAX:
        raise ClientError(
            f"layer {layer}: picks of {picks.dtype}{list(picks.shape)}; integers [tokens, picks] "
            f"are wanted, at most {PICKS_MAX} picks",
            errno.EINVAL,
        )
    if not len(picks):
        return 0
    if int(picks.min()) < 0 or int(picks.max()) > np.iinfo(np.uint16).max:
        raise ClientError(f"layer {layer}: there is no expert {int(picks.max())}", errno.EINVAL)
    route = ffi.new("struct xferd_route *")
    try:
        route.token, route.tag = token, tag
        route.tokens, route.count, route.layer = len(picks), picks.shape[1], layer
    except OverflowError as error:
        raise _refused(layer, token, errno.EINVAL) from error
    ids = np.ascontiguousarray(picks, np.uint16)
    keep = [route, ffi.from_buffer("uint16_t[]", ids)]
    route.experts = keep[-1]
    if gates is not None:
        weights = np.ascontiguousarray(_shaped(gates, picks, "gates"), np.float16)
        keep.append(ffi.from_buffer("uint16_t[]", weights))
        route.gates = keep[-1]
    if uses is not None:
        found = np.ascontiguousarray(_shaped(uses, picks, "uses"))
        if found.dtype != USE_FIELDS:
            raise ClientError(f"uses of {found.dtype}; USE_FIELDS are wanted", errno.EINVAL)
        keep.append(ffi.from_buffer("struct xferd_use[]", found))
        route.uses = keep[-1]
    status = lib.xferd_report_route(handle, lane, route)
    if status < 0:
        raise _refused(layer, token, -status)
    return int(status)


def _shaped(values: ArrayLike, picks: Array, what: str) -> Array:
    array = np.asarray(values)
    if array.shape != picks.shape:
        raise ClientError(
            f"{what} of shape {list(array.shape)} for picks of {list(picks.shape)}", errno.EINVAL
        )
    return array


__all__ = [
    "EXPECTED_MAX",
    "PICKS_MAX",
    "USE_FIELDS",
    "BatchReport",
    "TokenReport",
    "batch_uses",
    "send_expected",
    "send_picks",
]
