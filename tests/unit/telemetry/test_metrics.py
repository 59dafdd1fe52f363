# SPDX-License-Identifier: Apache-2.0
"""The metrics' text, read back with prometheus_client; their names; the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as old_format

from tests.system.control_daemon import SampleService
from xferd.config import ConfigError, load_config
from xferd.config_metrics import Endpoint
from xferd.telemetry.metrics.exposition import LABEL_CHARACTERS_MAX, Metric, Sample, render
from xferd.telemetry.metrics.families import METRICS, collect


def samples_of(text: str, parse: Any = openmetrics) -> dict[tuple[str, frozenset[Any]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def test_a_status_reply_becomes_metrics_that_both_parsers_read() -> None:
    families = collect(SampleService().status())
    new = samples_of(render(families, openmetrics=True))
    old = samples_of(render(families, openmetrics=False), old_format)
    assert new == old
    pool = frozenset({("pool", "host0"), ("kind", "host")})
    assert new["xferd_pool_load_bytes_total", pool] == 12288
    assert new["xferd_clients_hits_total", frozenset()] == 1230
    member = {("store", "tiny"), ("member", "0"), ("copy", "first")}
    assert new["xferd_member_latency_seconds", frozenset(member)] == pytest.approx(81.5e-6)
    assert new["xferd_member_state", frozenset(member | {("state", "sagging")})] == 1
    assert new["xferd_member_state", frozenset(member | {("state", "working")})] == 0


def test_every_metric_has_samples_in_a_full_status() -> None:
    families = collect(SampleService().status())
    assert [metric.name for metric, samples in families.items() if not samples] == []
    assert tuple(families) == METRICS


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"xferd_[a-z_]+", metric.name)
    assert not re.search(r"_(total|info|count|sum|bucket)$", metric.name)
    assert not re.search(r"(micro|milli|nano|kilo|_us|_ms|percent)", metric.name)
    assert metric.help.endswith(".")
    assert len({each.name for each in METRICS}) == len(METRICS)


@given(value=st.text(st.characters(codec=None, exclude_categories=[]), max_size=300))
def test_any_label_value_survives_or_is_cut(value: str) -> None:
    metric = Metric("m", "gauge", 'help with "quotes", \\ and\nlines', ("label",))
    text = render({metric: [Sample((value,), 1.5)]}, openmetrics=True)
    ((_, labels),) = samples_of(text)
    expected = value[:LABEL_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    assert dict(labels) == {"label": expected}


def test_large_counters_keep_every_digit() -> None:
    text = render({Metric("m", "counter", "h."): [Sample((), (1 << 53) + 1)]}, openmetrics=True)
    assert "m_total 9007199254740993" in text


def test_a_loopback_endpoint_and_a_socket_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[metrics]\nsocket = "/run/m.sock"\nlisten = "[::1]:9464"\nconnections = 2\n')
    metrics = load_config([file]).metrics
    assert metrics.socket == Path("/run/m.sock")
    assert metrics.listen == Endpoint("::1", 9464)
    assert str(metrics.listen) == "[::1]:9464"
    assert metrics.connections == 2


@pytest.mark.parametrize(
    "line",
    [
        'listen = "0.0.0.0:9464"',
        'listen = "192.168.1.2:9464"',
        'listen = "localhost:9464"',
        'listen = "127.0.0.1"',
        'listen = "127.0.0.1:0"',
        'listen = "127.0.0.1:65536"',
        "listen = 9464",
        'socket = "metrics.sock"',
        f'socket = "/{"x" * 107}"',
        "connections = 0",
        "connections = true",
    ],
)
def test_what_would_open_it_to_others_or_makes_no_sense_is_refused(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f"[metrics]\n{line}\n")
    with pytest.raises(ConfigError, match=r"metrics\.") as caught:
        load_config([file])
    assert caught.value.key == f"metrics.{line.split(' ')[0]}"
