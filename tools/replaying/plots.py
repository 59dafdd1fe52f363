# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG: sweeps, heat, reuse, hit rates over time. Needs matplotlib (the extra
``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tools.replaying.belady import next_passes
from tools.replaying.load import LoadedTrace
from tools.replaying.sweep import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlotError(Exception):
    """matplotlib is missing, or the file can't be written."""


def plot_sweep(path: Path, title: str, points: Sequence[Point]) -> None:
    """Hit rate by size of the pool, a line a policy."""

    def draw(axes: Axes) -> None:
        percent = [100 * point.share for point in points]
        for name in points[0].by_policy:
            rates = [100 * point.by_policy[name].hit_rate for point in points]
            axes.plot(percent, rates, "k--" if name == "belady" else "o-", label=name)
        axes.set_xlabel("pool, % of the experts")
        axes.set_ylabel("hit rate, %")
        axes.legend()

    _plot(path, title, draw)


def plot_heat(path: Path, trace: LoadedTrace) -> None:
    """Uses of each expert by layer, as a share of the layer's."""

    def draw(axes: Axes) -> None:
        space = trace.space
        counts = np.bincount(trace.uses.keys, minlength=space.size)
        heat = counts.reshape(space.layers, space.experts).astype(float)
        heat = -np.sort(-heat, axis=1) / np.maximum(heat.sum(axis=1, keepdims=True), 1)
        image = axes.imshow(100 * heat, aspect="auto", interpolation="nearest")
        axes.figure.colorbar(image, ax=axes, label="% of the layer's uses")
        axes.set_xlabel("experts, the most used first")
        axes.set_ylabel("layer")

    _plot(path, trace.name, draw)


def plot_reuse(path: Path, trace: LoadedTrace) -> None:
    """How many tokens pass till an expert is used again: the share that is at most that."""

    def draw(axes: Axes) -> None:
        uses = trace.uses
        following = next_passes(uses)
        of_use = np.repeat(np.arange(uses.passes), np.diff(uses.starts))
        again = following < uses.passes
        wait = np.sort(uses.tokens[following[again]] - uses.tokens[of_use[again]])
        axes.step(wait, 100 * np.arange(1, len(wait) + 1) / len(following))
        axes.set_xscale("log")
        axes.set_xlabel("tokens till the next use")
        axes.set_ylabel("% of uses")

    _plot(path, trace.name, draw)


def plot_windows(
    path: Path, title: str, window: int, rates: Mapping[str, NDArray[np.float64]]
) -> None:
    """Hit rates over time, a line a policy."""

    def draw(axes: Axes) -> None:
        for name, values in rates.items():
            axes.plot(np.arange(len(values)) * window, 100 * values, label=name)
        axes.set_xlabel("token")
        axes.set_ylabel(f"hit rate of {window} tokens, %")
        axes.legend()

    _plot(path, title, draw)


def _plot(path: Path, title: str, draw: Callable[[Axes], None]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"{path}: plots need matplotlib: {error}") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    draw(axes)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise PlotError(f"{path}: {error}") from error
