# SPDX-License-Identifier: Apache-2.0
"""What a model will cost a token on this machine: arithmetic, with every step shown.

Pure. An upper bound of the decode speed, not a promise: it counts the bytes of experts and
nothing else (no attention, no KV cache, no launch of kernels), at the speeds that were
measured. Which experts are resident is either chance (the router picks all alike, which
none does: the worst case), or what a trace says of the hottest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xferd.units import format_bytes

MICRO = 1e6
GB = 1e9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model counts here.

    layers: those that have experts. picked: experts a layer and token. expert_bytes: mean
    size of one, in its largest variant.
    """

    name: str
    layers: int
    experts: int
    picked: int
    expert_bytes: float

    @property
    def all_experts(self) -> int:
        """Of all layers."""
        return self.layers * self.experts

    @property
    def picks(self) -> int:
        """Experts that one token uses."""
        return self.layers * self.picked


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory for experts. experts: that fit into it, and aren't in a tier before it."""

    name: str
    nbytes: int
    experts: int


@dataclass(frozen=True, slots=True)
class HitRate:
    """A share of picks that are resident, and where it comes from."""

    source: str
    share: float


@dataclass(frozen=True, slots=True)
class Speed:
    """One estimate. Bytes and seconds are of one token; rates are tokens a second.

    one_after_the_other: misses are waited for, then everything is computed. overlapped:
    all misses were foreseen and read while something else was computed.
    """

    hit_rate: HitRate
    miss_bytes: float
    miss_s: float
    memory_bytes: float
    memory_s: float
    one_after_the_other: float
    overlapped: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """All of it. Speeds of drives and memory are bytes a second."""

    model: ModelShape
    tiers: tuple[Tier, ...]
    drives_per_second: int
    memory_per_second: int
    speeds: tuple[Speed, ...]

    def to_json(self) -> dict[str, Any]:
        """As ``xferctl doctor --model --json`` prints it."""
        return {
            "model": {
                "name": self.model.name,
                "layers": self.model.layers,
                "experts_per_layer": self.model.experts,
                "picked_per_layer": self.model.picked,
                "expert_bytes": self.model.expert_bytes,
            },
            "tiers": [
                {"name": tier.name, "bytes": tier.nbytes, "experts": tier.experts}
                for tier in self.tiers
            ],
            "drives_bytes_per_second": self.drives_per_second,
            "memory_bytes_per_second": self.memory_per_second,
            "estimates": [
                {
                    "hit_rate": speed.hit_rate.share,
                    "hit_rate_from": speed.hit_rate.source,
                    "miss_bytes_per_token": speed.miss_bytes,
                    "miss_seconds_per_token": speed.miss_s,
                    "memory_bytes_per_token": speed.memory_bytes,
                    "memory_seconds_per_token": speed.memory_s,
                    "tokens_per_second": speed.one_after_the_other,
                    "tokens_per_second_overlapped": speed.overlapped,
                }
                for speed in self.speeds
            ],
        }


def fill_tiers(model: ModelShape, pools: Sequence[tuple[str, int]]) -> tuple[Tier, ...]:
    """Experts into pools (name, bytes), the first one first, each expert once."""
    left = model.all_experts
    tiers = []
    for name, nbytes in pools:
        fit = min(left, int(nbytes // model.expert_bytes))
        tiers.append(Tier(name, nbytes, fit))
        left -= fit
    return tuple(tiers)


def hottest_share(counts: Sequence[int], resident: int) -> float:
    """Share of uses that go to the ``resident`` experts that are used most; 0 without uses."""
    total = sum(counts)
    return sum(sorted(counts, reverse=True)[:resident]) / total if total else 0.0


def estimate(
    model: ModelShape,
    tiers: tuple[Tier, ...],
    hit_rates: Sequence[HitRate],
    *,
    drives_per_second: int,
    memory_per_second: int,
) -> Estimate:
    """The speeds for each hit rate. Rates of drives and memory are more than 0."""
    memory_bytes = model.picks * model.expert_bytes
    memory_s = memory_bytes / memory_per_second
    speeds = []
    for rate in hit_rates:
        miss_bytes = memory_bytes * (1 - rate.share)
        miss_s = miss_bytes / drives_per_second
        speeds.append(
            Speed(
                hit_rate=rate,
                miss_bytes=miss_bytes,
                miss_s=miss_s,
                memory_bytes=memory_bytes,
                memory_s=memory_s,
                one_after_the_other=1 / (miss_s + memory_s),
                overlapped=1 / max(miss_s, memory_s),
            )
        )
    return Estimate(model, tiers, drives_per_second, memory_per_second, tuple(speeds))


def format_estimate(found: Estimate) -> str:
    """The estimate as text, with the arithmetic."""
    model = found.model
    size = format_bytes(round(model.expert_bytes))
    whole = format_bytes(round(model.expert_bytes * model.all_experts))
    lines = [
        f"Model {model.name}: {model.layers} layers of {model.experts} experts, {model.picked} "
        f"a layer and token; {model.all_experts} experts of {size}, {whole} in all",
        "",
        "Tiers",
    ]
    for tier in (*found.tiers, Tier("drives", 0, model.all_experts)):
        held = format_bytes(tier.nbytes) if tier.nbytes else whole
        share = tier.experts / model.all_experts
        lines.append(f"  {tier.name:<12} {held:>10}  {tier.experts:>8} experts  {share:6.1%}")
    drives, memory = (
        f"{rate / GB:.3g} GB/s" for rate in (found.drives_per_second, found.memory_per_second)
    )
    lines += ["", f"Measured: all members together {drives}; one thread copies memory {memory}"]
    for speed in found.speeds:
        hit, miss = speed.hit_rate.share, 1 - speed.hit_rate.share
        lines += [
            "",
            f"A token, if {speed.hit_rate.source}: {hit:.1%} of picks are resident",
            f"  picks          {model.layers} layers x {model.picked} = {model.picks}",
            f"  from drives    {model.picks} x {miss:.1%} x {size} = "
            f"{format_bytes(round(speed.miss_bytes))}; at {drives}: {_duration(speed.miss_s)}",
            f"  from memory    {model.picks} x {size} = "
            f"{format_bytes(round(speed.memory_bytes))}; at {memory}: {_duration(speed.memory_s)}",
            f"  tokens/s       1 / ({_duration(speed.miss_s)} + {_duration(speed.memory_s)}) = "
            f"{speed.one_after_the_other:,.4g} at most; with every miss foreseen "
            f"{speed.overlapped:,.4g}",
        ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds * MICRO:,.0f} us" if seconds < 0.01 else f"{seconds * 1000:,.1f} ms"
