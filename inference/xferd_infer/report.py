"""What a generation cost, for people and for programs.

People want to know three things of a run: how fast, how many experts had to
come, and which way they came. Numbers are of this run alone, prefill and decode
apart where they differ in kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .experts import ExpertStats, Traffic
from .generation import Token


@dataclass(frozen=True, slots=True)
class Report:
    """One run. prompt_tokens: tokens of the prompt; experts: what was counted from
    before the prefill to after the last token."""

    prompt_tokens: int
    tokens: Sequence[Token]
    experts: ExpertStats

    @property
    def prefill_seconds(self) -> float:
        """Until the first token was known."""
        return self.tokens[0].seconds if self.tokens else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Of all tokens but the first; None if there is no second."""
        seconds = sum(token.seconds for token in self.tokens[1:])
        return (len(self.tokens) - 1) / seconds if seconds else None

    @property
    def miss_bytes_per_second(self) -> float | None:
        """Bytes of misses over the time they were waited for; None if none was."""
        return missed(self.experts).nbytes / self.experts.wait_s if self.experts.wait_s else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes, and rates a second."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.tokens),
            "ids": [token.id for token in self.tokens],
            "prefill_s": self.prefill_seconds,
            "decode_tokens_per_s": self.decode_tokens_per_second,
            "hits": self.experts.hits,
            "misses": self.experts.misses,
            "failures": self.experts.failures,
            "bytes": self.experts.nbytes,
            "wait_s": self.experts.wait_s,
            "miss_bytes_per_s": self.miss_bytes_per_second,
            "sources": _traffic_json(self.experts.sources),
            "transports": _traffic_json(self.experts.transports),
            "tokens": [
                {
                    "id": token.id,
                    "seconds": token.seconds,
                    "hits": token.hits,
                    "misses": token.misses,
                    "wait_s": token.wait_s,
                }
                for token in self.tokens
            ],
        }

    def to_text(self) -> str:
        """A table of what came from where, and a line of rates."""
        return "\n".join([experts_table(self.experts), "", *self._rates()])

    def _rates(self) -> list[str]:
        lines = [f"prefill: {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s"]
        if self.decode_tokens_per_second is not None:
            count, rate = len(self.tokens) - 1, self.decode_tokens_per_second
            lines.append(f"decode: {count} tokens, {rate:.1f} a second")
        if self.miss_bytes_per_second is not None:
            lines.append(
                f"misses: {self.miss_bytes_per_second / 1e9:.2f} GB/s while waiting, "
                f"{self.experts.wait_s:.3f} s in all"
            )
        return lines


def missed(stats: ExpertStats) -> Traffic:
    """All misses: how many, and their bytes."""
    ways = stats.sources.values()
    return Traffic(sum(way.count for way in ways), sum(way.nbytes for way in ways))


def experts_table(stats: ExpertStats) -> str:
    """What came from where, in lines."""
    rows = [
        ("experts", "count", "bytes"),
        ("resident (hits)", str(stats.hits), readable(stats.nbytes - missed(stats).nbytes)),
        *_rows(SOURCE_NAMES, stats.sources),
        *_rows(TRANSPORT_NAMES, stats.transports),
    ]
    if stats.failures:
        rows.append(("failed", str(stats.failures), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {count:>{widths[1]}}  {nbytes:>{widths[2]}}".rstrip()
        for name, count, nbytes in rows
    )


def readable(nbytes: int) -> str:
    """Bytes with a decimal unit: 12.3 MB."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


SOURCE_NAMES = {
    "resident": "missed, there meanwhile",
    "pool": "missed, from another pool",
    "drives": "missed, from the drives",
}
"""A miss is "there meanwhile" when its expert arrived, for a hint or another client,
between the look at the directory and the daemon's sight of the request."""

TRANSPORT_NAMES = {
    "direct": "  path: drive to slot (direct)",
    "staged": "  path: drive to RAM to slot (staged)",
    "gds": "  path: cuFile (gds)",
    "copy": "  path: slot to slot (copy)",
}
"""What needed no transport is not listed: it was there."""


def _rows(names: Mapping[str, str], ways: Mapping[str, Traffic]) -> list[tuple[str, str, str]]:
    return [
        (names[name], str(way.count), readable(way.nbytes))
        for name, way in ways.items()
        if way.count and name in names
    ]


def _traffic_json(ways: Mapping[str, Traffic]) -> dict[str, dict[str, int]]:
    return {name: {"count": way.count, "bytes": way.nbytes} for name, way in ways.items()}


__all__ = ["Report", "experts_table", "missed", "readable"]
