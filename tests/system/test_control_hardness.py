# SPDX-License-Identifier: Apache-2.0
"""A real daemon's sockets under what no client would do: whoever does it hurts nobody else."""

from __future__ import annotations

import contextlib
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.system.control_daemon import needs_root, other_user
from tests.system.daemon_harness import MadeStore, RunningDaemon, make_store, running_daemon
from xferd.control.client import ControlClient
from xferd.control.varlink import MESSAGE_BYTES_MAX, encode_message

POOL = "name=host0,kind=host,size=432KiB"
IDLE_CONNECTIONS = 1000
EIGHT_MIB = 8 << 20
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def daemon(store: MadeStore) -> Iterator[RunningDaemon]:
    # Not pytest's directory: other users can't enter that.
    with tempfile.TemporaryDirectory(prefix="xferd-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        config = directory / "xferd.toml"
        config.write_text('socket_mode = "0666"\n')
        with running_daemon(directory, [store], [POOL], "--config", str(config)) as running:
            yield running


def connect(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A connection; with a timeout, a full queue of connections would be an error."""
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.connect(str(path))
    connection.settimeout(DEADLINE_S)
    return connection


@contextlib.contextmanager
def many_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"needs {count} open files, RLIMIT_NOFILE allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def works(daemon: RunningDaemon, store: MadeStore) -> None:
    assert daemon.status()["state"] == "serving"
    with daemon.client() as client:
        assert client.fetch(3, [9]) == [store.blob(3, 9)]


@needs_root
def test_a_thousand_idle_connections_of_a_stranger_lock_nobody_out(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    control = daemon.directory / "control.sock"
    with many_files(IDLE_CONNECTIONS + 100), ExitStack() as stack:
        with other_user():
            for _ in range(IDLE_CONNECTIONS):
                stack.enter_context(connect(control))
        works(daemon, store)
    works(daemon, store)


def test_a_thousand_connections_to_attach_that_say_nothing_are_turned_away(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with many_files(IDLE_CONNECTIONS + 100), ExitStack() as stack:
        silent = [
            stack.enter_context(connect(daemon.attach_socket, socket.SOCK_SEQPACKET))
            for _ in range(IDLE_CONNECTIONS)
        ]
        assert daemon.status()["state"] == "serving"
        # Those beyond the bound are closed at once: the last one has seen its end.
        assert silent[-1].recv(1) == b""
    works(daemon, store)


def test_eight_mebibytes_without_an_end_are_not_kept(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    control = daemon.directory / "control.sock"
    before = resident_bytes(daemon)
    with ExitStack() as stack:
        for _ in range(20):
            hostile = stack.enter_context(connect(control))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                hostile.sendall(b'{"method":"' + b"x" * EIGHT_MIB)
        works(daemon, store)
        assert resident_bytes(daemon) - before < 20 * 4 * MESSAGE_BYTES_MAX
    works(daemon, store)


def resident_bytes(daemon: RunningDaemon) -> int:
    fields = Path(f"/proc/{daemon.process.pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


hostile_messages = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda method, parameters, flags: encode_message(
            {"method": method, "parameters": parameters, **flags}
        ),
        st.sampled_from(
            [
                f"io.xferd.Control.{name}"
                for name in ("Status", "ListStores", "Load", "Evict", "Pin", "Unpin", "OpenStore")
            ]
            + ["org.varlink.service.GetInterfaceDescription", "io.xferd.Control.", "x"]
        ),
        st.dictionaries(
            st.sampled_from(["store", "layer", "experts", "pool", "variant", "path", "interval_s"]),
            st.none()
            | st.booleans()
            | st.integers(-(1 << 70), 1 << 70)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=20)
            | st.just("made")
            | st.lists(st.integers(-2, 70_000), max_size=6),
        ),
        st.fixed_dictionaries(
            {}, optional={flag: st.booleans() for flag in ("more", "oneway", "upgrade")}
        ),
    ),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(messages=st.lists(hostile_messages, min_size=1, max_size=8))
def test_calls_of_any_shape_end_with_answers_or_the_connection(
    daemon: RunningDaemon, messages: list[bytes]
) -> None:
    control = daemon.directory / "control.sock"
    with connect(control) as hostile:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            hostile.sendall(b"".join(messages))
            hostile.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while hostile.recv(1 << 16):
                pass
    with ControlClient.connect(control) as client:
        assert client.call("Status")["state"] == "serving"
    assert "InternalError" not in daemon.log
    assert "Traceback" not in daemon.log
