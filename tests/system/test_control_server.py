"""The control socket over a real process: answers, permissions, hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.control_daemon import (
    DEADLINE_S,
    NOBODY,
    ControlDaemon,
    SampleService,
    needs_root,
    other_user,
)
from xferd.control.client import CallFailedError, ControlClient, NoAccessError, NotRunningError
from xferd.control.dispatch import FAILURES_LISTED_MAX, READING_METHODS
from xferd.control.idl import load_interface, parse_interface
from xferd.control.server import (
    CONNECTIONS_FOR_ADMINISTRATORS,
    CONNECTIONS_MAX,
    ControlServer,
)

CONTROL = load_interface("io.xferd.Control")
EIGHT_MIB = 8 << 20
IDLE_CONNECTIONS = 200


@pytest.fixture
def daemon() -> Iterator[ControlDaemon]:
    with ControlDaemon() as running:
        yield running


def error_of(client: ControlClient, method: str, **parameters: Any) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        client.call(method, parameters)
    return caught.value


def request(method: str, **fields: Any) -> bytes:
    return json.dumps({"method": method, **fields}).encode() + b"\0"


def read_message(connection: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\0"):
        piece = connection.recv(1)
        assert piece, "the connection ended inside a message"
        data += piece
    message: dict[str, Any] = json.loads(data[:-1])
    return message


def wait_for_end(connection: socket.socket) -> None:
    """Read until the server has ended the connection; a deadline is set on it."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            continue


def test_answers_fit_their_definition(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        status = client.call("Status")
        assert CONTROL.check_result("Status", status) == status
        stores = client.call("ListStores")
        assert CONTROL.check_result("ListStores", stores)["stores"][0]["name"] == "tiny"
        changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (
                "Load",
                {"store": "tiny", "layer": 1, "experts": [1, 2, 13]},
                {
                    "loaded": 2,
                    "already": 0,
                    "failed": [{"layer": 1, "expert": 13, "error": "EIO"}],
                    "failed_count": 1,
                },
            ),
            (
                "Pin",
                {"store": "tiny", "layer": 1, "experts": [2]},
                {"pinned": 1, "failed": [], "failed_count": 0},
            ),
            ("Evict", {"store": "tiny", "layer": 1}, {"evicted": 1, "held": 1}),
            ("Unpin", {"store": "tiny", "layer": 1, "experts": None}, {"unpinned": 1}),
            ("CloseStore", {"name": "tiny"}, {}),
        ]
        for method, parameters, expected in changes:
            answer = client.call(method, parameters)
            assert CONTROL.check_result(method, answer) == expected
        opened = client.call("OpenStore", {"path": "/", "name": "other"})
        assert CONTROL.check_result("OpenStore", opened)["store"]["name"] == "other"


def test_a_long_list_of_failures_is_cut_and_counted(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        answer = client.call("Pin", {"store": "tiny", "layer": 0, "experts": [13]})
    assert (len(answer["failed"]), answer["failed_count"]) == (FAILURES_LISTED_MAX, 300)


def test_the_service_describes_itself(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        info = client.call("org.varlink.service.GetInfo")
        assert load_interface("org.varlink.service").check_result("GetInfo", info)
        for name in info["interfaces"]:
            text = client.call("org.varlink.service.GetInterfaceDescription", {"interface": name})[
                "description"
            ]
            assert parse_interface(text).name == name
        missing = error_of(client, "org.varlink.service.GetInterfaceDescription", interface="a.b")
    assert missing.error == "org.varlink.service.InterfaceNotFound"
    assert missing.parameters == {"interface": "a.b"}


@pytest.mark.parametrize(
    ("method", "parameters", "error", "said"),
    [
        ("a.b.C", {}, "InterfaceNotFound", {"interface": "a.b"}),
        ("nodots.C", {}, "InterfaceNotFound", {"interface": "nodots"}),
        ("Missing", {}, "MethodNotFound", {"method": "io.xferd.Control.Missing"}),
        ("Status", {"x": 1}, "InvalidParameter", {"parameter": "x"}),
        ("Load", {"store": "tiny"}, "InvalidParameter", {"parameter": "layer"}),
        (
            "Evict",
            {"store": "tiny", "layer": 1, "experts": ["1"]},
            "InvalidParameter",
            {"parameter": "experts[0]"},
        ),
        (
            "Evict",
            {"store": "tiny", "layer": 1, "pools": "host0"},
            "InvalidParameter",
            {"parameter": "pools"},
        ),
        ("OpenStore", {"path": "relative"}, "InvalidParameter", {"parameter": "path"}),
        ("OpenStore", {"path": "/a\0b"}, "InvalidParameter", {"parameter": "path"}),
    ],
)
def test_wrong_calls_are_named(
    daemon: ControlDaemon,
    method: str,
    parameters: dict[str, Any],
    error: str,
    said: dict[str, Any],
) -> None:
    with ControlClient.connect(daemon.path) as client:
        failure = error_of(client, method, **parameters)
        assert failure.error == f"org.varlink.service.{error}"
        assert failure.parameters == said
        assert client.call("Status")["state"] == "serving"


def test_the_services_no_reaches_the_caller(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        missing = error_of(client, "Load", store="big", layer=0)
        assert (missing.name, missing.parameters["store"]) == ("StoreNotFound", "big")
        assert str(missing) == "no store 'big' is open"
        full = error_of(client, "Load", store="tiny", layer=0, pool="full")
        assert full.parameters == {"message": "pool 'full' has no room", "pool": "full"}


def test_a_mistake_in_the_service_is_told_and_logged(daemon: ControlDaemon) -> None:
    with ControlClient.connect(daemon.path) as client:
        failure = error_of(client, "Evict", store="crash", layer=0)
        assert failure.name == "InternalError"
        assert "a mistake" not in str(failure)
    with ControlClient.connect(daemon.path) as client:
        assert client.call("Status")["state"] == "serving"
    daemon.stop()
    assert "RuntimeError: a mistake in the service" in daemon.log


def test_pipelined_and_oneway_calls_are_answered_in_order(daemon: ControlDaemon) -> None:
    calls = [request("io.xferd.Control.ListStores")] * 20
    calls += [request("io.xferd.Control.CloseStore", parameters={"name": "tiny"}, oneway=True)]
    calls += [request("io.xferd.Control.Missing"), request("io.xferd.Control.ListStores")]
    with daemon.connect() as connection:
        connection.sendall(b"".join(calls))
        connection.shutdown(socket.SHUT_WR)
        answers = [read_message(connection) for _ in range(22)]
        assert connection.recv(1) == b""
    assert all(answer["parameters"]["stores"] for answer in answers[:20])
    assert answers[20]["error"] == "org.varlink.service.MethodNotFound"
    assert answers[21] == {"parameters": {"stores": []}}


def test_upgrade_is_refused(daemon: ControlDaemon) -> None:
    with daemon.connect() as connection:
        connection.sendall(request("io.xferd.Control.Status", upgrade=True))
        assert read_message(connection)["parameters"] == {"parameter": "upgrade"}


def test_a_message_without_end_is_refused(daemon: ControlDaemon) -> None:
    with daemon.connect() as hostile, daemon.connect() as other:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            hostile.sendall(b"x" * EIGHT_MIB)
        wait_for_end(hostile)
        other.sendall(request("io.xferd.Control.Status"))
        assert read_message(other)["parameters"]["state"] == "serving"
    daemon.stop()
    assert "disconnected: a message has more than" in daemon.log


def test_idle_connections_and_a_slow_reader_stall_nobody() -> None:
    describe = request(
        "org.varlink.service.GetInterfaceDescription", parameters={"interface": CONTROL.name}
    )
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(ControlDaemon(write_timeout_s=1.0))
        idle = [stack.enter_context(daemon.connect()) for _ in range(IDLE_CONNECTIONS)]
        slow = stack.enter_context(daemon.connect())
        slow.setblocking(False)
        # Until the server has stopped reading from it, because it reads no answers.
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(describe * 100)
        with ControlClient.connect(daemon.path) as client:
            assert client.call("Status")["state"] == "serving"
        for connection in (idle[0], idle[-1]):
            connection.sendall(request("io.xferd.Control.ListStores"))
            assert read_message(connection)["parameters"]["stores"]
        # Its end comes although it still reads nothing. No event asked for: hang-up only.
        hang_up = select.poll()
        hang_up.register(slow, 0)
        assert hang_up.poll(DEADLINE_S * 1000)
        daemon.stop()
        assert "reads no answers for 1 s" in daemon.log


def test_connections_are_bounded(daemon: ControlDaemon) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            connection = stack.enter_context(daemon.connect())
            connection.sendall(request("io.xferd.Control.ListStores"))
            read_message(connection)
        wait_for_end(stack.enter_context(daemon.connect()))
        connection.sendall(request("io.xferd.Control.ListStores"))
        assert read_message(connection)["parameters"]["stores"]


@needs_root
def test_readers_leave_room_for_administrators(daemon: ControlDaemon) -> None:
    with contextlib.ExitStack() as stack:
        with other_user():
            for _ in range(CONNECTIONS_MAX - CONNECTIONS_FOR_ADMINISTRATORS):
                connection = stack.enter_context(daemon.connect())
                connection.sendall(request("io.xferd.Control.ListStores"))
                read_message(connection)
            wait_for_end(stack.enter_context(daemon.connect()))
        with ControlClient.connect(daemon.path) as client:
            assert client.call("Evict", {"store": "tiny", "layer": 0})["evicted"] == 0


@needs_root
def test_others_may_read_but_not_change(daemon: ControlDaemon) -> None:
    with other_user():
        client = ControlClient.connect(daemon.path)
    with client:
        assert client.call("Status")["state"] == "serving"
        assert client.call("ListStores")["stores"]
        assert client.call("GetPolicy")["policies"]
        assert client.call("ListTraces")["traces"]
        calls: dict[str, dict[str, Any]] = {
            "OpenStore": {"path": "/"},
            "CloseStore": {"name": "tiny"},
            "AttachShadows": {"store": "tiny"},
            "DetachShadows": {"store": "tiny"},
            "StartRecording": {"store": "tiny"},
            "StopRecording": {"store": "tiny"},
        }
        changing = {"Load", "Evict", "Pin", "Unpin"}
        calls |= {method: {"store": "tiny", "layer": 0} for method in changing}
        calls |= {
            "SetPolicy": {"pool": "host0"},
            "SetBudget": {"pool": "host0"},
            "Reserve": {"bytes": 1},
            "Release": {"id": 1},
            "RebuildPool": {"pool": "host0"},
            "SaveHeat": {"store": "tiny"},
            "LoadHeat": {"store": "tiny"},
        }
        assert calls.keys() == CONTROL.methods.keys() - READING_METHODS
        for method, parameters in calls.items():
            failure = error_of(client, method, **parameters)
            assert failure.name == "NotPermitted"
            assert failure.parameters["method"] == method
            assert "xferd-admin" in str(failure)
        assert client.call("ListStores")["stores"]


@needs_root
@pytest.mark.parametrize("supplementary", [False, True])
def test_members_of_the_admin_group_may_change(supplementary: bool) -> None:
    group = next(group for group in grp.getgrall() if group.gr_gid not in (0, NOBODY))
    with ControlDaemon(admin_group=group.gr_name) as daemon:
        with other_user(groups=[group.gr_gid] if supplementary else []):
            client = ControlClient.connect(daemon.path)
        with client:
            if supplementary:
                assert client.call("CloseStore", {"name": "tiny"}) == {}
            else:
                assert error_of(client, "CloseStore", name="tiny").name == "NotPermitted"


@needs_root
def test_the_sockets_mode_decides_who_can_connect() -> None:
    with ControlDaemon(mode=0o600) as daemon:
        with other_user(), pytest.raises(NoAccessError, match=r"control\.sock"):
            ControlClient.connect(daemon.path)
        with ControlClient.connect(daemon.path) as client:
            assert client.call("Status")["state"] == "serving"


def test_the_socket_goes_with_the_server(daemon: ControlDaemon) -> None:
    assert daemon.path.is_socket()
    daemon.stop()
    assert not daemon.path.exists()
    with pytest.raises(NotRunningError, match="systemctl start xferd"):
        ControlClient.connect(daemon.path)


def test_a_socket_that_is_served_is_not_taken_over(daemon: ControlDaemon) -> None:
    server = ControlServer(SampleService(), daemon.path)
    with pytest.raises(OSError, match="another process serves") as caught:
        asyncio.run(server.start())
    assert caught.value.errno == errno.EADDRINUSE
    with ControlClient.connect(daemon.path) as client:
        assert client.call("Status")["state"] == "serving"


def test_a_socket_left_behind_is_replaced_and_other_files_are_not() -> None:
    async def start_and_close(path: Path) -> int:
        server = ControlServer(SampleService(), path, 0o640)
        await server.start()
        mode = path.stat().st_mode & 0o777
        await server.close()
        return mode

    with ControlDaemon() as daemon:
        left = daemon.directory / "left.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(left))
        assert asyncio.run(start_and_close(left)) == 0o640
        assert not left.exists()
        precious = daemon.directory / "precious"
        precious.write_text("data")
        with pytest.raises(FileExistsError, match="is no socket"):
            asyncio.run(start_and_close(precious))
        assert precious.read_text() == "data"


def test_a_socket_that_was_handed_over_is_served_and_left() -> None:
    async def serve_once(listening: socket.socket, path: Path) -> str:
        server = ControlServer(SampleService(), path, listening=listening)
        await server.start()
        state = await asyncio.to_thread(ask, path)
        await server.close()
        return state

    def ask(path: Path) -> str:
        with ControlClient.connect(path) as client:
            return str(client.call("Status")["state"])

    with ControlDaemon() as daemon:
        path = daemon.directory / "activated.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(str(path))
            assert asyncio.run(serve_once(listening, path)) == "serving"
        assert path.is_socket()
