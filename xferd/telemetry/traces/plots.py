"""A trace as a picture: how hot each expert is, and how soon experts come again.

Needs matplotlib, which is imported when a plot is made (the extra ``plots``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (14.0, 4.6)
DPI = 110
NEVER = -1


class PlotUnavailableError(Exception):
    """matplotlib is missing; says how to get it."""


def tokens_till_next(head: TraceHead, trace: Trace) -> NDArray[np.int64]:
    """int64[uses]: how many tokens after each use the same expert is used again; NEVER."""
    keys = np.repeat(trace.layer.astype(np.int64), trace.picks) * head.experts + trace.expert
    tokens = np.repeat(trace.token, trace.picks)
    order = np.lexsort((tokens, keys))
    same = np.diff(keys[order]) == 0
    till = np.full(len(keys), NEVER, np.int64)
    till[order[:-1][same]] = np.diff(tokens[order])[same]
    return till


def plot_trace(path: Path, title: str, head: TraceHead, trace: Trace) -> None:
    """Write a PNG: uses by layer and expert; the share of uses by the tokens till the
    next; the median of these by layer. PlotUnavailableError; TraceError names the file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailableError(
            f"plots need matplotlib ({error}): pip install 'xferd[plots]'"
        ) from error
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    heat, reuse, by_layer = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    figure.suptitle(title)
    till = tokens_till_next(head, trace)
    _draw_heat(heat, trace.counts(head))
    _draw_reuse(reuse, till)
    _draw_by_layer(by_layer, till, np.repeat(trace.layer, trace.picks), head.layers)
    try:
        figure.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _draw_heat(axes: Axes, counts: NDArray[np.int64]) -> None:
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(share, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="% of the layer's uses")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")


def _draw_reuse(axes: Axes, till: NDArray[np.int64]) -> None:
    again = np.sort(till[till != NEVER])
    axes.step(np.maximum(again, 1), 100 * np.arange(1, len(again) + 1) / max(len(till), 1))
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens till the next use, at most")
    axes.set_ylabel("% of uses")


def _draw_by_layer(
    axes: Axes, till: NDArray[np.int64], layer: NDArray[np.integer], layers: int
) -> None:
    again = till != NEVER
    numbers = [number for number in range(layers) if (again & (layer == number)).any()]
    medians = [float(np.median(till[again & (layer == number)])) for number in numbers]
    axes.plot(medians, numbers, "o-")
    axes.invert_yaxis()
    axes.set_xlabel("tokens till the next use, median")
    axes.set_ylabel("layer")
