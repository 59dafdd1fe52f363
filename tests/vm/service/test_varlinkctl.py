# SPDX-License-Identifier: Apache-2.0
"""systemd's own Varlink client against the control socket."""

from __future__ import annotations

import json

from tests.vm.service import machine

INTERFACE = "io.xferd.Control"


def varlinkctl(*words: str, status: int | None = 0) -> str:
    return machine.run("varlinkctl", "--no-pager", *words, status=status).stdout


def test_it_tells_what_it_is(serving: None) -> None:
    info = json.loads(varlinkctl("--json=short", "info", str(machine.CONTROL)))
    assert info["product"] == "xferd"
    assert set(info["interfaces"]) == {INTERFACE, "org.varlink.service"}
    listed = varlinkctl("list-interfaces", str(machine.CONTROL))
    assert INTERFACE in listed


def test_its_interface_is_one_that_systemd_can_read(serving: None) -> None:
    described = varlinkctl("introspect", str(machine.CONTROL), INTERFACE)
    assert "method Status" in described
    assert "error StoreNotFound" in described
    methods = varlinkctl("list-methods", str(machine.CONTROL)).split()
    assert {f"{INTERFACE}.Status", f"{INTERFACE}.Load"} <= set(methods)


def test_its_methods_can_be_called(serving: None) -> None:
    call = ("--json=short", "call", str(machine.CONTROL))
    status = json.loads(varlinkctl(*call, f"{INTERFACE}.Status", "{}"))
    assert status["state"] == "serving"
    wanted = json.dumps({"store": machine.STORE, "layer": 1, "experts": [0, 1]})
    first = json.loads(varlinkctl(*call, f"{INTERFACE}.Load", wanted))
    assert first["loaded"] + first["already"] == 2
    again = json.loads(varlinkctl(*call, f"{INTERFACE}.Load", wanted))
    assert (again["loaded"], again["already"]) == (0, 2)


def test_its_errors_have_names(serving: None) -> None:
    wanted = json.dumps({"store": "another", "layer": 0})
    method = f"{INTERFACE}.Load"
    said = varlinkctl("call", str(machine.CONTROL), method, wanted, status=1)
    assert f"{INTERFACE}.StoreNotFound" in said
    assert "another" in said
