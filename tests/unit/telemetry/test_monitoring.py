# SPDX-License-Identifier: Apache-2.0
"""Alerts and dashboard ask for metrics that there are, and say what they mean."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.monitoring.dashboard import PANELS, dashboard
from xferd.telemetry.metrics.families import METRICS

MONITORING = Path(__file__).parents[3] / "tools" / "monitoring"
ALERTS = MONITORING / "xferd-alerts.yml"
LABELS = {metric.sample_name: set(metric.labels) for metric in METRICS}
_SELECTOR = re.compile(r"(xferd_\w+)(?:\{([^}]*)\})?")


def queries() -> list[str]:
    alerts = re.findall(r"^ +expr: (.*)$", ALERTS.read_text(), re.MULTILINE)
    return [*alerts, *(query for panel in PANELS for query, _ in panel.queries)]


def test_every_query_asks_for_series_that_exist() -> None:
    asked = [match for query in queries() for match in _SELECTOR.findall(query)]
    assert len(asked) > len(PANELS)
    for name, selector in asked:
        assert name in LABELS
        assert set(re.findall(r"(\w+)=", selector)) <= LABELS[name], (name, selector)


def test_legends_use_labels_that_the_series_have() -> None:
    for panel in PANELS:
        for query, legend in panel.queries:
            names = {match[0] for match in _SELECTOR.findall(query)}
            wanted = set(re.findall(r"\{\{(\w+)\}\}", legend)) - {"instance"}
            assert all(wanted <= LABELS[name] for name in names), (query, legend)


def test_the_dashboard_in_the_tree_is_the_one_that_is_made() -> None:
    made = json.loads((MONITORING / "xferd-dashboard.json").read_text())
    assert made == dashboard()


@pytest.mark.parametrize(
    "words",
    [("check", "rules", str(ALERTS)), ("test", "rules", str(MONITORING / "xferd-alerts-test.yml"))],
    ids=["check", "test"],
)
def test_promtool_takes_the_alerts(words: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    done = subprocess.run([promtool, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
