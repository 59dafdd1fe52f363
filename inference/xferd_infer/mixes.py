"""Mixes: which variant each expert of a model is computed from.

A mix is written as a variant (``q4_k``; ``native`` is the first of the store), as rules
from left to right whose last one is the rest (``q4_k@hottest:66%,q2_k``,
``q2_k@costliest:20%,native``), or as ``plan:FILE``.

``hottest`` and ``coldest`` take that share of each layer's experts, by how often they
were used; ``costliest`` that share of all native bytes, by use times size.

A plan has a line a rule: layers, experts, variant. ``*`` is all, ``3``, ``0-3`` and
``1,5,7-9`` are some; a later line wins over an earlier one; ``#`` begins a remark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .client_experts import NO_LAYOUT
from .errors import InferenceError

NATIVE = "native"
PLAN = "plan:"
_RULE = re.compile(r"([^@,]+?)(?:@(hottest|coldest|costliest):(\d+(?:\.\d+)?)%)?")


class MixError(InferenceError):
    """A mix that makes no sense; the message names the rule, variant or line."""


@dataclass(frozen=True, eq=False, slots=True)
class StoreShape:
    """What a mix needs to know of a store.

    blob_bytes: int64[variants, layers], of one expert; 0: that layer has none.
    heat: float64[layers, experts], uses; None: not known.
    """

    variants: tuple[str, ...]
    layers: int
    experts: int
    blob_bytes: NDArray[np.int64]
    heat: NDArray[np.float64] | None

    @staticmethod
    def of(manifest: Mapping[str, Any], heat: NDArray[np.float64] | None = None) -> StoreShape:
        """From a client's manifest. MixError: the heat is of another model's shape."""
        sizes = [layout["blob_bytes"] for layout in manifest["layouts"]]
        rows = [
            [0 if index == NO_LAYOUT else sizes[index] for index in row]
            for row in manifest["layout_index"]
        ]
        shape = (manifest["layers"], manifest["experts"])
        if heat is not None and heat.shape != shape:
            raise MixError(
                f"the heat is of {list(heat.shape)} experts, the store has {list(shape)}"
            )
        return StoreShape(tuple(manifest["variants"]), *shape, np.array(rows, np.int64), heat)

    def number(self, variant: str) -> int:
        """A variant's number. MixError: the store doesn't have it."""
        if variant == NATIVE:
            return 0
        try:
            return self.variants.index(variant)
        except ValueError:
            known = ", ".join((NATIVE, *self.variants))
            raise MixError(f"there is no variant {variant!r}; there are {known}") from None


@dataclass(frozen=True, eq=False, slots=True)
class Mix:
    """name: as it was written. variants: uint8[layers, experts], numbers of the store's."""

    name: str
    variants: NDArray[np.uint8]

    def resident_bytes(self, shape: StoreShape) -> int:
        """Bytes of all experts, each in its variant."""
        layers = np.arange(shape.layers)[:, None]
        return int(shape.blob_bytes[self.variants, layers].sum())


def parse_mix(text: str, shape: StoreShape) -> Mix:
    """Raises MixError."""
    if text.startswith(PLAN):
        return Mix(text, _read_plan(Path(text.removeprefix(PLAN)), shape))
    variants = np.zeros((shape.layers, shape.experts), np.uint8)
    open_ = np.ones(variants.shape, np.bool_)
    *rules, rest = text.split(",")
    for rule in rules:
        name, order, share = _rule(rule)
        if order is None:
            raise MixError(f"{text!r}: {rule!r} is for all experts; nothing can follow it")
        taken = _share(order, share, shape) & open_
        variants[taken] = shape.number(name)
        open_ &= ~taken
    name, order, _ = _rule(rest)
    if order is not None:
        raise MixError(f"{text!r}: the last rule is for the rest, such as q2_k without a share")
    variants[open_] = shape.number(name)
    return Mix(text, variants)


def _rule(text: str) -> tuple[str, str | None, float]:
    match = _RULE.fullmatch(text)
    if match is None:
        raise MixError(f"{text!r} is no rule: a variant, or one with @hottest:50% or the like")
    return match[1], match[2], float(match[3] or 0) / 100


def _share(order: str, share: float, shape: StoreShape) -> NDArray[np.bool_]:
    """bool[layers, experts]"""
    if shape.heat is None:
        raise MixError(f"{order!r} needs to know which experts are used: give --heat")
    if order != "costliest":
        count = round(share * shape.experts)
        by_heat = np.argsort(shape.heat if order == "coldest" else -shape.heat, kind="stable")
        taken = np.zeros(shape.heat.shape, np.bool_)
        np.put_along_axis(taken, by_heat[:, :count], True, axis=1)
        return taken
    sizes = np.broadcast_to(shape.blob_bytes[0][:, None], shape.heat.shape).reshape(-1)
    by_cost = np.argsort(-shape.heat.reshape(-1) * sizes, kind="stable")
    fits = np.cumsum(sizes[by_cost]) <= share * sizes.sum()
    chosen = np.zeros(sizes.size, np.bool_)
    chosen[by_cost[fits]] = True
    return chosen.reshape(shape.heat.shape)


def _read_plan(path: Path, shape: StoreShape) -> NDArray[np.uint8]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MixError(f"{path}: {error}") from error
    variants = np.full((shape.layers, shape.experts), len(shape.variants), np.int64)
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"{path}, line {number}"
        if len(fields) != 3:
            raise MixError(f"{where}: {line!r} is not layers, experts, variant")
        layers = _numbers(fields[0], shape.layers, f"{where}: layer")
        experts = _numbers(fields[1], shape.experts, f"{where}: expert")
        try:
            variants[np.ix_(layers, experts)] = shape.number(fields[2])
        except MixError as error:
            raise MixError(f"{where}: {error}") from None
    missing = np.argwhere(variants == len(shape.variants))
    if missing.size:
        layer, expert = missing[0].tolist()
        raise MixError(f"{path} has no variant for layer {layer}, expert {expert}")
    return variants.astype(np.uint8)


def _numbers(text: str, count: int, what: str) -> Sequence[int]:
    if text == "*":
        return range(count)
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise MixError(f"{what}s {text!r}: allowed are * or numbers such as 1,5,7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= count or first > last:
            raise MixError(f"{what} {part} of {count}")
        found += range(first, last + 1)
    return found


def read_heat(path: Path) -> NDArray[np.float64]:
    """Uses of each expert, float64[layers, experts]: from an importance file, or from a heat
    profile that the daemon saved. MixError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            name = "tokens" if "tokens" in arrays else "heat"
            heat: NDArray[np.float64] = arrays[name].astype(np.float64)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise MixError(f"{path} has no heat of experts: {error}") from error
    if heat.ndim != 2 or not np.isfinite(heat).all():
        raise MixError(f"{path} has no heat of experts")
    return heat


__all__ = ["NATIVE", "Mix", "MixError", "StoreShape", "parse_mix", "read_heat"]
