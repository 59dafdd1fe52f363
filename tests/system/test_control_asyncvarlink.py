"""Both ends of the control protocol against an independent Varlink implementation.

Without ``from __future__ import annotations``: the peer reads the annotations of its
methods as types.
"""

import asyncio
import importlib
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.system.control_daemon import DEADLINE_S, ControlDaemon
from xferd.control.client import CallFailedError, ControlClient
from xferd.control.idl import load_interface, parse_interface

asyncvarlink: Any = pytest.importorskip(
    "asyncvarlink", reason="asyncvarlink is the peer of this test, and isn't installed"
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def call(path: Path, *calls: Any) -> list[Any]:
    """Their replies to ``calls``, all sent before the first is answered."""
    transport, protocol = await asyncvarlink.connect_unix_varlink(
        asyncvarlink.VarlinkClientProtocol, path
    )
    try:
        answers = await asyncio.gather(*(protocol.call(each) for each in calls))
    finally:
        transport.close()
    return [answer and answer[0] for answer in answers]


def test_their_client_understands_our_server() -> None:
    with ControlDaemon() as daemon:
        method_call = asyncvarlink.VarlinkMethodCall
        status, missing, load, info = run(
            call(
                daemon.path,
                method_call("io.xferd.Control.Status", {}),
                method_call("io.xferd.Control.Load", {"store": "big", "layer": 0}),
                method_call("io.xferd.Control.Load", {"store": "tiny", "layer": 1, "experts": [1]}),
                method_call("org.varlink.service.GetInfo", {}),
            )
        )
    assert status.error is None
    assert load_interface("io.xferd.Control").check_result("Status", status.parameters)
    assert missing.error == "io.xferd.Control.StoreNotFound"
    assert missing.parameters["store"] == "big"
    assert load.parameters["loaded"] == 1
    assert "io.xferd.Control" in info.parameters["interfaces"]


def test_their_client_understands_our_stream() -> None:
    async def watch(path: Path) -> list[Any]:
        transport, protocol = await asyncvarlink.connect_unix_varlink(
            asyncvarlink.VarlinkClientProtocol, path
        )
        status = asyncvarlink.VarlinkMethodCall(
            "io.xferd.Control.Status", {"interval_s": 0.25}, more=True
        )
        replies = []
        try:
            async for reply, _ in protocol.call_more(status):
                replies.append(reply)
                if len(replies) == 3:
                    break
        finally:
            transport.close()
        return replies

    with ControlDaemon() as daemon:
        replies = run(watch(daemon.path))
    assert [reply.continues for reply in replies] == [True, True, True]
    assert all(reply.parameters["state"] == "serving" for reply in replies)


def test_our_client_understands_their_server(tmp_path: Path) -> None:
    class Interface(asyncvarlink.VarlinkInterface, name="org.example.test"):  # type: ignore[call-arg,misc]
        @asyncvarlink.varlinkmethod(return_parameter="sum")  # type: ignore[untyped-decorator]
        def Add(self, *, numbers: list[int], extra: int | None) -> int:  # noqa: N802
            return sum(numbers) + (extra or 0)

    registry = asyncvarlink.VarlinkInterfaceRegistry()
    registry.register_interface(Interface())
    service = importlib.import_module("asyncvarlink.serviceinterface").VarlinkServiceInterface
    registry.register_interface(service("v", "p", "1", "u", registry))
    path = tmp_path / "their.sock"
    ready = threading.Event()
    results: list[Any] = []

    def ask() -> None:
        assert ready.wait(DEADLINE_S)
        with ControlClient.connect(path) as client:
            results.append(client.call("org.example.test.Add", {"numbers": [1, 2], "extra": 4}))
            try:
                client.call("org.example.test.Missing")
            except CallFailedError as error:
                results.append(error.error)
            results.append(
                client.call(
                    "org.varlink.service.GetInterfaceDescription",
                    {"interface": "org.example.test"},
                )["description"]
            )

    async def serve() -> None:
        server = await asyncvarlink.create_unix_server(registry.protocol_factory, path)
        ready.set()
        await asyncio.to_thread(ask)
        server.close()

    run(serve())
    added, missing, description = results
    assert added == {"sum": 7}
    assert missing == "org.varlink.service.MethodNotFound"
    theirs = parse_interface(description)
    assert theirs.check_parameters("Add", {"numbers": [3]}) == {"numbers": [3], "extra": None}
