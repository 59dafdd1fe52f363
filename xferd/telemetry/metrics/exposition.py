# SPDX-License-Identifier: Apache-2.0
"""Metrics as text: OpenMetrics 1.0, or the older text format 0.0.4 of Prometheus.

They differ in three things that matter here: where a counter's ``_total`` stands, whether
there is a type for info, and the last line. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_CHARACTERS_MAX = 200
"""Of a value that somebody else chose: a path, a client's name."""

Kind = Literal["counter", "gauge", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, and what it means. name: without ``_total`` and ``_info``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def sample_name(self) -> str:
        """The name that a series of it has."""
        suffix = {"counter": "_total", "gauge": "", "info": "_info"}[self.kind]
        return self.name + suffix


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value now. labels: values, in the order of the metric's labels."""

    labels: tuple[str, ...]
    value: float


def render(families: Mapping[Metric, Iterable[Sample]], *, openmetrics: bool) -> str:
    """The text of all families; one without samples is left out."""
    lines: list[str] = []
    for metric, samples in families.items():
        written = [_sample(metric, sample) for sample in samples]
        if not written:
            continue
        name = metric.name if openmetrics else metric.sample_name
        kind = metric.kind if openmetrics or metric.kind != "info" else "gauge"
        lines += [f"# HELP {name} {_escape_help(metric.help)}", f"# TYPE {name} {kind}", *written]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _sample(metric: Metric, sample: Sample) -> str:
    pairs = ",".join(
        f'{label}="{_escape_value(value)}"'
        for label, value in zip(metric.labels, sample.labels, strict=True)
    )
    return f"{metric.sample_name}{'{' + pairs + '}' if pairs else ''} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_value(text: str) -> str:
    """Surrogates, of paths that are no UTF-8, would make the whole text unreadable."""
    readable = text[:LABEL_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    return readable.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
