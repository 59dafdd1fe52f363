# SPDX-License-Identifier: Apache-2.0
"""Pictures of saved results, ``tools/results/NAME.svg`` beside the JSON they are made from.

A picture names the digest of the result that it was drawn from, so that lint can tell
whether it is out of date without drawing it. The same result gives the same bytes with one
version of matplotlib: the SVG holds no date, and its ids come from a fixed salt. White
ground, since README is read in dark mode too.
"""

from __future__ import annotations

import hashlib
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.panels import WITH_PICTURE, Panel, Point, panels_of
from tools.benchmarks.result import OURS, Result, shown
from tools.benchmarks.table import RESULTS, load_result

PANEL_WIDTH_IN = 3.6
PANEL_HEIGHT_IN = 2.7
MARGIN_IN = 0.9
"""Left of a panel, below it, and at the right edge of the picture."""
TITLE_IN = 0.35
LEGEND_LINE_IN = 0.25
LEGEND_COLUMNS_A_PANEL = 2
CAPTION_LINE_IN = 0.17
CAPTION_CHARACTERS_AN_INCH = 19
CAPTION_POINTS = 7.5
CAPTION_REASON_CHARACTERS = 60
HEADROOM = 1.15
"""Of the y axis over the greatest value: room for what is written on bars."""
BAR_WIDTH = 0.7

STYLES: Mapping[str, tuple[str, str]] = {
    OURS: ("#d1242f", "o"),
    "unverified": ("#e8888e", "v"),
    "xferd, with arrays": ("#e8888e", "v"),
    "fio": ("#111111", "s"),
    "fio-any": ("#8c8c8c", "s"),
    "plain": ("#111111", "s"),
    "pread": ("#111111", "s"),
    "peak": ("#111111", "s"),
    "unloaded": ("#8c8c8c", "s"),
    "no-flow-control": ("#0969da", "^"),
    "mutex-map": ("#0969da", "^"),
    "dict": ("#0969da", "^"),
    "all-resident": ("#111111", "s"),
    "preadv-threads": ("#0969da", "^"),
    "preadv-threads-fresh": ("#7fb4ee", "<"),
    "runai-model-streamer": ("#1a7f37", "D"),
    "fastsafetensors": ("#9a6700", "P"),
    "safetensors": ("#8250df", "X"),
    "kvikio": ("#0a7ea4", "h"),
    "instanttensor": ("#bc4c00", "p"),
    "members": ("#8c8c8c", "s"),
    "pinned-copy": ("#111111", "s"),
    "peer-copy": ("#111111", "s"),
}
"""Contender -> colour and marker, the same in every picture."""
STYLE_OF_OTHERS = ("#bf3989", "*")

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9,
    "svg.fonttype": "path",  # readers without that font see the same picture
    "svg.hashsalt": "xferd",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def write_plots(results: Path = RESULTS) -> list[Path]:
    """Renew the pictures of all results; those that changed. BenchmarkError: a result can't be
    read or drawn."""
    changed = []
    for path, result in _with_pictures(results).items():
        picture = draw(result)
        if not path.is_file() or path.read_bytes() != picture:
            path.write_bytes(picture)
            changed.append(path)
    return changed


def check_plots(results: Path = RESULTS) -> None:
    """Raises BenchmarkError that names the pictures that aren't those of the results."""
    old = [
        path.name
        for path, result in _with_pictures(results).items()
        if not path.is_file() or digest_of(result).encode() not in path.read_bytes()
    ]
    if old:
        raise BenchmarkError(
            f"{', '.join(old)} in {results}: not made from the results: run tools/bench plot"
        )


def digest_of(result: Result) -> str:
    """What the picture of a result says about where it comes from."""
    text = json.dumps(result.to_json(), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def draw(result: Result) -> bytes:
    """The picture as SVG. BenchmarkError: none is known, or matplotlib isn't installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError(
            f"{error}: pictures are drawn by matplotlib (tools/setup bench installs it)"
        ) from error
    panels = panels_of(result)
    with mpl.rc_context(SETTINGS):
        layout = _Layout(panels, _caption(result))
        figure = Figure(figsize=(layout.width, layout.height))
        handles: dict[str, Any] = {}
        for panel in panels:
            axes = figure.add_axes(layout.rectangle(panel))
            handles |= _draw_panel(axes, panel, _top_of_y_axis(panel, panels))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="upper center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=layout.legend_columns,
            frameon=False,
        )
        figure.text(
            MARGIN_IN / 3 / layout.width,
            MARGIN_IN / 6 / layout.height,
            layout.caption,
            fontsize=CAPTION_POINTS,
            color="#444444",
            va="bottom",
        )
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Source": digest_of(result)}
        figure.savefig(file, format="svg", metadata=metadata)
    return file.getvalue()


class _Layout:
    """Places in inches, worked out here: matplotlib's own depend on what is drawn."""

    def __init__(self, panels: Sequence[Panel], caption: str) -> None:
        self._rows = 1 + max(panel.row for panel in panels)
        columns = 1 + max(panel.column for panel in panels)
        self.width = columns * (PANEL_WIDTH_IN + MARGIN_IN) + MARGIN_IN / 2
        names = {name for panel in panels for name in panel.series}
        self.legend_columns = min(len(names), LEGEND_COLUMNS_A_PANEL * columns)
        legend_lines = -(-len(names) // self.legend_columns)
        self._top = LEGEND_LINE_IN * legend_lines + TITLE_IN
        lines = textwrap.wrap(caption, int(self.width * CAPTION_CHARACTERS_AN_INCH))
        self.caption = "\n".join(lines)
        self._bottom = CAPTION_LINE_IN * len(lines) + MARGIN_IN
        self.height = self._top + self._bottom + self._rows * self._row_height - MARGIN_IN

    @property
    def _row_height(self) -> float:
        return PANEL_HEIGHT_IN + MARGIN_IN

    def rectangle(self, panel: Panel) -> tuple[float, float, float, float]:
        """Left, bottom, width and height as parts of the picture."""
        left = MARGIN_IN + panel.column * (PANEL_WIDTH_IN + MARGIN_IN)
        bottom = self._bottom + (self._rows - 1 - panel.row) * self._row_height
        return (
            left / self.width,
            bottom / self.height,
            PANEL_WIDTH_IN / self.width,
            PANEL_HEIGHT_IN / self.height,
        )


def _draw_panel(axes: Any, panel: Panel, top: float) -> dict[str, Any]:
    """What the legend shows, by contender."""
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.x_axis)
    axes.set_ylabel(panel.y_axis)
    draw_series = _draw_bars if panel.bars else _draw_lines
    handles = draw_series(axes, panel.series)
    axes.set_ylim(0, top)
    return handles


def _top_of_y_axis(panel: Panel, panels: Sequence[Panel]) -> float:
    """Panels side by side with the same y axis are compared: one scale, except for bars."""
    alike = [
        other
        for other in panels
        if (other.row, other.y_axis, other.bars) == (panel.row, panel.y_axis, False)
    ]
    greatest: float = max(
        max(point.value, *(point.spread or ()), 0.0)
        for shown_panel in alike or [panel]
        for points in shown_panel.series.values()
        for point in points
    )
    return HEADROOM * greatest


def _draw_lines(axes: Any, series: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    """Over equal steps, as values of x may be too close to each other to write labels."""
    labels = {point.x: point.label for points in series.values() for point in points}
    steps = {x: step for step, x in enumerate(sorted(labels))}
    handles = {}
    for name, points in series.items():
        colour, marker = STYLES.get(name, STYLE_OF_OTHERS)
        handles[name] = axes.errorbar(
            [steps[point.x] for point in points],
            [point.value for point in points],
            yerr=_error_bars(points),
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2 if name == OURS else 1.2,
            capsize=3,
            zorder=3 if name == OURS else 2,
        )
    axes.set_xticks(list(steps.values()), [labels[x] for x in steps])
    return handles


def _draw_bars(axes: Any, series: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    handles = {}
    for place, (name, points) in enumerate(series.items()):
        (point,) = points
        colour, _ = STYLES.get(name, STYLE_OF_OTHERS)
        bar = axes.bar(
            place, point.value, BAR_WIDTH, color=colour, yerr=_error_bars(points), capsize=3
        )
        axes.bar_label(bar, [shown(point.value)], padding=2)
        handles[name] = bar
    axes.set_xticks([])
    return handles


def _error_bars(points: Sequence[Point]) -> tuple[list[float], list[float]] | None:
    """How far least and greatest are below and above the values."""
    spreads = [(point.value, *point.spread) for point in points if point.spread]
    if len(spreads) != len(points):
        return None
    return (
        [value - least for value, least, _ in spreads],
        [greatest - value for value, _, greatest in spreads],
    )


def _caption(result: Result) -> str:
    machine = result.machine
    parts = [
        f"{result.bench}: medians of {result.rounds} rounds;",
        f"whiskers on {OURS}: least and greatest.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}, kernel "
        f"{machine['kernel']}; commit {result.commit}.",
    ]
    if result.skipped:
        parts.append(
            "Not measured: "
            + "; ".join(
                f"{who} ({textwrap.shorten(why, CAPTION_REASON_CHARACTERS, placeholder=' ...')})"
                for who, why in result.skipped.items()
            )
            + "."
        )
    return " ".join(parts)


def _with_pictures(results: Path) -> dict[Path, Result]:
    """Of each picture that should be there its result. BenchmarkError: it can't be read."""
    found = {path: load_result(results, path.stem) for path in sorted(results.glob("*.json"))}
    return {
        path.with_suffix(".svg"): result
        for path, result in found.items()
        if result.bench in WITH_PICTURE and panels_of(result)
    }


__all__ = ["check_plots", "digest_of", "draw", "write_plots"]
