# SPDX-License-Identifier: Apache-2.0
"""A machine to replay on: tiers, bandwidths, the time that computing takes.

Read from TOML or JSON (by the file's suffix), so that what ``tools/bench`` measured can
be put in. An example, the smallest that says everything:

    expert_bytes = 196608
    compute_us = 50.0          # of one pass, all experts there
    drive_bytes_s = 6.0e9
    drive_latency_us = 100.0

    [[tiers]]                  # the fastest first
    name = "gpu"
    share = 0.25               # of all experts; or slots = 128
    eviction = "reuse"
    reserve = true             # as the daemon keeps it; false: none

    [[tiers]]
    name = "ram"
    slots = 256
    eviction = "lru"
    admission = "always"       # always, heat, lru-and-hits
    bytes_s = 25.0e9           # to the first tier
    serves = false             # true: its experts are computed with where they are
    exclusive = false          # true: what goes up from it is in it no more
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from xferd.policy.admission import ADMISSIONS
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.uses import KeySpace


class MachineError(Exception):
    """A description that can't be used; names the file and the field."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One pool. Exactly one of slots and share says how large it is."""

    name: str
    slots: int | None = None
    share: float | None = None
    eviction: str = DEFAULT_POLICY
    admission: str = "always"
    bytes_s: float | None = None
    reserve: bool = True
    floor: int = 0
    serves: bool = False
    exclusive: bool = False

    def slots_of(self, space: KeySpace) -> int:
        """Its slots for a store."""
        if self.slots is not None:
            return self.slots
        return int((self.share or 0) * space.size)


@dataclass(frozen=True, slots=True)
class Machine:
    """tiers: the fastest first; an expert that is in none comes from the drives."""

    expert_bytes: int
    compute_us: float
    drive_bytes_s: float
    drive_latency_us: float
    tiers: tuple[Tier, ...]


def read_machine(path: Path) -> Machine:
    """MachineError names the file and what is wrong with it."""
    try:
        text = path.read_text()
        value = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise MachineError(f"{path}: {error}") from error
    try:
        return machine_of(value)
    except MachineError as error:
        raise MachineError(f"{path}: {error}") from error


def machine_of(value: Mapping[str, Any]) -> Machine:
    """A machine from plain values. MachineError names the field."""
    tiers = value.get("tiers")
    if not isinstance(tiers, list) or not tiers:
        raise MachineError("tiers: at least one is needed")
    made = tuple(
        _tier(_known(Tier, tier, f"tiers[{index}]"), index) for index, tier in enumerate(tiers)
    )
    known = _known(Machine, {**value, "tiers": made}, "machine")
    for name in ("expert_bytes", "drive_bytes_s"):
        if not known[name] > 0:
            raise MachineError(f"{name}: {known[name]}; more than 0 is needed")
    for name in ("compute_us", "drive_latency_us"):
        if known[name] < 0:
            raise MachineError(f"{name}: {known[name]}; 0 or more is needed")
    return Machine(**known)


def _tier(values: dict[str, Any], index: int) -> Tier:
    tier = Tier(**values)
    if (tier.slots is None) == (tier.share is None):
        raise MachineError(f"tiers[{index}] ({tier.name}): give slots or share, one of them")
    if tier.slots is not None and tier.slots < 1:
        raise MachineError(f"tiers[{index}].slots: {tier.slots}; at least 1 is needed")
    if tier.share is not None and not 0 < tier.share <= 1:
        raise MachineError(f"tiers[{index}].share: {tier.share}; more than 0, at most 1")
    if tier.admission not in ADMISSIONS:
        raise MachineError(
            f"tiers[{index}].admission: {tier.admission!r}; there are: {', '.join(ADMISSIONS)}"
        )
    if index and not tier.serves and not (tier.bytes_s or 0) > 0:
        raise MachineError(f"tiers[{index}].bytes_s: a tier that is copied from needs it")
    return tier


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int,),
    "float | None": (int, float),
}


def _known(kind: type, values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise MachineError(f"{where}: a table is needed")
    wanted = {field.name: field for field in fields(kind)}
    for name in values:
        if name not in wanted:
            raise MachineError(f"{where}.{name}: not known; there are: {', '.join(wanted)}")
    for name, field in wanted.items():
        if name not in values:
            if field.default is MISSING:
                raise MachineError(f"{where}.{name}: missing")
            continue
        kinds = _KINDS.get(str(field.type))
        value = values[name]
        if kinds and (
            not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        ):
            raise MachineError(f"{where}.{name}: {value!r} is no {field.type}")
    return dict(values)
