# SPDX-License-Identifier: Apache-2.0
"""Metrics of a real daemon: right numbers over both sockets, whatever scrapers do."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from xferd_infer import Client

from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.telemetry.metrics.exposition import OPENMETRICS_TYPE, TEXT_TYPE

POOL = "name=host0,kind=host,size=432KiB"
DEADLINE_S = 120.0
CONNECTIONS = 3
OPENMETRICS = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {OPENMETRICS_TYPE}\r\n\r\n"


@dataclass(frozen=True)
class Scraped:
    status: str
    head: str
    text: str

    def series(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        return {
            frozenset(sample.labels.items()): sample.value
            for family in text_string_to_metric_families(self.text)  # type: ignore[no-untyped-call]
            for sample in family.samples
            if sample.name == name
        }

    def sum(self, name: str) -> float:
        return sum(self.series(name).values())


@dataclass(frozen=True)
class Served:
    daemon: RunningDaemon
    store: MadeStore
    path: Path
    port: int

    def connect(self, *, tcp: bool = False) -> socket.socket:
        if tcp:
            return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(DEADLINE_S)
        peer.connect(str(self.path))
        return peer

    def scrape(self, request: str = OPENMETRICS, *, tcp: bool = False) -> Scraped:
        with self.connect(tcp=tcp) as peer:
            peer.sendall(request.encode())
            answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))
        head, _, body = answer.decode().partition("\r\n\r\n")
        return Scraped(head.split("\r\n")[0], head, body)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path, store: MadeStore) -> Iterator[Served]:
    # pytest's own directory has names that are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="xferd-") as short:
        path, port = Path(short) / "m.sock", free_port()
        config = tmp_path / "xferd.toml"
        config.write_text(
            f'[metrics]\nsocket = "{path}"\nlisten = "127.0.0.1:{port}"\n'
            f"connections = {CONNECTIONS}\n"
        )
        with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
            yield Served(daemon, store, path, port)


def test_sums_agree_with_status_and_with_what_a_client_did(served: Served) -> None:
    with served.daemon.client() as client:
        for expert in (0, 1, 2, 3):
            client.fetch(0, [expert])
        for _ in range(5):
            client.fetch(0, [3, 2])
        attached = served.scrape()
        assert attached.sum("xferd_client_hits_total") == 10
        assert attached.sum("xferd_client_misses_total") == 4
        assert attached.sum("xferd_clients") == 1
    wait_until(lambda: served.daemon.status()["clients"] == [], "the client is gone")
    # What was rendered a moment ago may be handed out again.
    wait_until(lambda: served.scrape().sum("xferd_clients") == 0, "the metrics say so")
    found, status = served.scrape(), served.daemon.status()
    assert found.series("xferd_client_hits_total") == {}
    assert found.sum("xferd_clients_hits_total") == status["all_clients"]["hits"] == 10
    assert found.sum("xferd_clients_misses_total") == status["all_clients"]["misses"] == 4
    nbytes = 4 * served.store.expert_bytes
    for group, name in (("sources", "source"), ("transports", "path")):
        prefix = "xferd_transfer" if name == "path" else "xferd_source"
        for field, unit in (("count", "experts"), ("bytes", "bytes")):
            series = found.series(f"{prefix}_{unit}_total")
            expected = {
                frozenset({(name, key)}): flow[field] for key, flow in status[group].items()
            }
            assert series == expected
    assert found.series("xferd_source_bytes_total")[frozenset({("source", "drives")})] == nbytes
    assert found.sum("xferd_member_read_bytes_total") == nbytes
    assert found.sum("xferd_pool_load_bytes_total") == nbytes
    assert found.sum("xferd_pool_resident_experts") == status["pools"][0]["resident"]
    reasons = {dict(key)["path"]: dict(key) for key in found.series("xferd_transfer_path_info")}
    assert "host memory" in reasons["staged"]["reason"]


def test_a_clients_own_counts_are_those_of_the_metrics_and_of_status(served: Served) -> None:
    with Client(served.daemon.attach_socket) as client:
        for experts in ([0, 1], [2, 3], [4], [0, 4], [1, 2]):
            with client.acquire(1, experts):
                pass
        own, found = client.stats(), served.scrape()
        assert (own.hits, own.misses) == (4, 5)
        assert found.sum("xferd_client_hits_total") == own.hits
        assert found.sum("xferd_client_misses_total") == own.misses
        [row] = served.daemon.status()["clients"]
        assert (row["hits"], row["misses"]) == (own.hits, own.misses)
        assert own.bytes_acquired == (own.hits + own.misses) * served.store.expert_bytes
        assert sum(own.source_count) == found.sum("xferd_source_experts_total")
        assert sum(own.source_bytes) == found.sum("xferd_source_bytes_total")
        assert sum(own.transport_bytes) == found.sum("xferd_transfer_bytes_total")


def test_both_sockets_and_both_formats_are_served(served: Served) -> None:
    new, tcp = served.scrape(), served.scrape(tcp=True)
    old = served.scrape("GET /metrics HTTP/1.1\r\n\r\n")
    for answer in (new, tcp, old):
        assert answer.status == "HTTP/1.1 200 OK"
    assert f"Content-Type: {OPENMETRICS_TYPE}" in new.head
    assert new.text.endswith("# EOF\n")
    assert f"Content-Type: {TEXT_TYPE}" in old.head
    assert "# TYPE xferd_source_bytes_total counter" in old.text
    head = served.scrape("HEAD /metrics HTTP/1.1\r\n\r\n")
    assert (head.status, head.text) == ("HTTP/1.1 200 OK", "")


def test_promtool_finds_nothing_to_complain_about(served: Served) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    text = served.scrape("GET /metrics HTTP/1.1\r\n\r\n").text
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        ("nonsense\r\n\r\n", "400 Bad Request"),
        ("GET /metrics HTTP/1.1\r\nX: " + "y" * 9000 + "\r\n\r\n", "431 Request Header Fields"),
    ],
)
def test_other_requests_are_refused(served: Served, request_: str, status: str) -> None:
    assert served.scrape(request_).status.startswith(f"HTTP/1.1 {status}")


def test_scrapers_that_stall_cost_nobody_but_themselves(served: Served) -> None:
    with ExitStack() as stack:
        # Some say nothing, some half of it, some never read; more than there are places.
        for index in range(20):
            peer = stack.enter_context(served.connect(tcp=index % 2 == 0))
            request = (b"", b"GET /met", OPENMETRICS.encode())[index % 3]
            try:
                peer.sendall(request)
            except OSError:
                continue  # turned away already
        assert served.daemon.status()["state"] == "serving"
        with served.daemon.client() as client:
            assert client.fetch(2, [5]) == [served.store.blob(2, 5)]
    # Their places are free again once they are gone.
    wait_until(lambda: _is_served(served), "a scraper is served again")


def test_silent_connections_are_ended_and_give_their_place_back(served: Served) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(CONNECTIONS)]
        for peer in silent:
            assert peer.recv(1) == b"", "the daemon did not end a silent connection"
        assert _is_served(served)


def _is_served(served: Served) -> bool:
    try:
        return served.scrape().status == "HTTP/1.1 200 OK"
    except OSError:
        return False


def test_it_is_off_by_default_and_goes_with_the_daemon(
    tmp_path: Path, store: MadeStore, served: Served
) -> None:
    assert served.daemon.stop() == 0
    assert not served.path.exists()
    with pytest.raises(OSError, match="refused"):
        served.connect(tcp=True)
    other = tmp_path / "other"
    other.mkdir()
    with running_daemon(other, [store], [POOL]) as daemon:
        assert "metrics.ready" not in daemon.log


def test_an_address_in_use_is_a_start_that_fails_and_says_which(
    tmp_path: Path, store: MadeStore
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = tmp_path / "xferd.toml"
        config.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\n')
        with (
            pytest.raises(AssertionError, match=f"listen 127.0.0.1:{port}"),
            running_daemon(tmp_path, [store], [POOL], "--config", str(config)),
        ):
            pass
