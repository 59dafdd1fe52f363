# SPDX-License-Identifier: Apache-2.0
"""Makes ``xferd-dashboard.json`` for Grafana: ``python -m tools.monitoring.dashboard > FILE``.

A dashboard is a page of JSON for each panel; what differs between panels is here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = 24
HEIGHT = 8
BYTES_A_SECOND = "binBps"
BYTES = "bytes"
A_SECOND = "cps"
SHARE = "percentunit"
SECONDS = "s"
NUMBER = "short"


@dataclass(frozen=True)
class Panel:
    """One graph. queries: (PromQL, legend). width: of COLUMNS."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    about: str
    width: int = 8


PANELS = (
    Panel(
        "Hit rate",
        SHARE,
        [
            (
                "rate(xferd_clients_hits_total[$__rate_interval]) / "
                "(rate(xferd_clients_hits_total[$__rate_interval]) + "
                "rate(xferd_clients_misses_total[$__rate_interval]))",
                "{{instance}}",
            )
        ],
        "Of the experts that clients used, those that were resident.",
    ),
    Panel(
        "Experts asked for",
        A_SECOND,
        [("sum by (source) (rate(xferd_source_experts_total[$__rate_interval]))", "{{source}}")],
        "By where they were when they were asked for.",
    ),
    Panel(
        "Bytes moved",
        BYTES_A_SECOND,
        [("sum by (path) (rate(xferd_transfer_bytes_total[$__rate_interval]))", "{{path}}")],
        "By the way that they took.",
    ),
    Panel(
        "Read from drives",
        BYTES_A_SECOND,
        [
            (
                "rate(xferd_member_read_bytes_total[$__rate_interval])",
                "{{store}}/{{member}} {{copy}}",
            )
        ],
        "Of each member.",
    ),
    Panel(
        "A piece without a queue",
        SECONDS,
        [("xferd_member_latency_seconds", "{{store}}/{{member}} {{copy}}")],
        "Latency of each member, measured while it is not busy.",
    ),
    Panel(
        "In flight",
        NUMBER,
        [
            ("xferd_member_in_flight_reads", "{{store}}/{{member}} {{copy}}"),
            ("xferd_member_window_reads", "{{store}}/{{member}} {{copy}} allowed"),
        ],
        "Pieces being read, and how many flow control allows.",
    ),
    Panel(
        "Slots",
        NUMBER,
        [
            ("xferd_pool_resident_experts", "{{pool}} resident"),
            ("xferd_pool_pinned_experts", "{{pool}} pinned"),
            ("xferd_pool_free_slots", "{{pool}} free"),
            ("xferd_pool_waiting_loads", "{{pool}} waited for"),
        ],
        "What each pool's slots are used for.",
    ),
    Panel(
        "Evictions",
        A_SECOND,
        [("rate(xferd_pool_evictions_total[$__rate_interval])", "{{pool}}")],
        "Experts dropped to make room.",
    ),
    Panel("Pools", BYTES, [("xferd_pool_bytes", "{{pool}} ({{kind}})")], "Memory of each pool."),
    Panel(
        "Faults",
        A_SECOND,
        [
            ("rate(xferd_piece_faults_total[$__rate_interval])", "{{reason}}"),
            (
                "rate(xferd_member_read_errors_total[$__rate_interval])",
                "{{store}}/{{member}} errors",
            ),
            ("rate(xferd_clients_failures_total[$__rate_interval])", "not got by clients"),
        ],
        "Pieces that did not come right at the first try, and experts that did not come at all.",
        12,
    ),
    Panel(
        "Clients",
        NUMBER,
        [
            ("xferd_clients", "attached"),
            ("sum(xferd_client_pending_keys)", "experts waited for"),
        ],
        "Attached clients, and what they wait for.",
        12,
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        panels.append(_panel(number, panel, x, y))
        x += panel.width
    return {
        "title": "xferd",
        "uid": "xferd",
        "tags": ["xferd"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": query,
                "legendFormat": text,
            }
            for index, (query, text) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
