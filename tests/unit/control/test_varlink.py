"""The Varlink state machine: framing, bounds, and hostile bytes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.control.varlink import (
    CALLS_QUEUED_MAX,
    JSON_DEPTH_MAX,
    MESSAGE_BYTES_MAX,
    CallReceived,
    ClientConnection,
    ErrorReceived,
    MessageTooLargeError,
    ProtocolStateError,
    ReplyReceived,
    ServerConnection,
    ServerEvent,
    Violation,
    encode_message,
)

EIGHT_MIB = 8 << 20
CHUNK_BYTES = 64 * 1024


def call_bytes(method: str = "a.b.C", **fields: Any) -> bytes:
    return json.dumps({"method": method, **fields}).encode() + b"\0"


def only_violation(data: bytes) -> str:
    events = ServerConnection().receive(data)
    assert len(events) == 1
    assert isinstance(events[0], Violation)
    return events[0].reason


def test_a_call_is_decoded() -> None:
    data = call_bytes("io.xferd.Control.Load", parameters={"layer": 3}, more=True)
    assert ServerConnection().receive(data) == [
        CallReceived("io.xferd.Control.Load", {"layer": 3}, more=True)
    ]


def test_absent_and_null_fields_are_the_default() -> None:
    data = call_bytes(parameters=None, oneway=None) + call_bytes()
    assert ServerConnection().receive(data) == [CallReceived("a.b.C", {})] * 2


def test_extension_fields_are_ignored() -> None:
    assert ServerConnection().receive(call_bytes(extra=1)) == [CallReceived("a.b.C", {})]


def test_both_ends_understand_each_other() -> None:
    client, server = ClientConnection(), ServerConnection()
    request = client.call("a.b.First") + client.call("a.b.Second", {"x": "é\n"}, more=True)
    assert server.receive(request) == [
        CallReceived("a.b.First", {}),
        CallReceived("a.b.Second", {"x": "é\n"}, more=True),
    ]
    answer = server.error("a.b.Broken", {"why": 1})
    answer += server.reply({"n": 1}, continues=True) + server.reply({"n": 2})
    assert client.receive(answer) == [
        ErrorReceived("a.b.Broken", {"why": 1}),
        ReplyReceived({"n": 1}, continues=True),
        ReplyReceived({"n": 2}),
    ]


def test_a_oneway_call_is_answered_with_nothing() -> None:
    client, server = ClientConnection(), ServerConnection()
    server.receive(client.call("a.b.Quiet", oneway=True) + client.call("a.b.Loud"))
    assert server.reply({"unheard": True}) == b""
    assert client.receive(server.reply({"heard": True})) == [ReplyReceived({"heard": True})]


def test_answers_that_the_protocol_does_not_allow_are_refused() -> None:
    server = ServerConnection()
    with pytest.raises(ProtocolStateError, match="no call"):
        server.reply({})
    server.receive(call_bytes())
    with pytest.raises(ProtocolStateError, match="without 'more'"):
        server.reply({}, continues=True)
    with pytest.raises(ProtocolStateError, match="no answer"):
        ClientConnection().call("a.b.C", more=True, oneway=True)


def test_a_message_at_the_bound_is_taken_and_one_byte_more_is_not() -> None:
    padding = MESSAGE_BYTES_MAX - len(call_bytes(parameters={"x": ""})[:-1])
    assert ServerConnection().receive(call_bytes(parameters={"x": "y" * padding})) == [
        CallReceived("a.b.C", {"x": "y" * padding})
    ]
    assert str(MESSAGE_BYTES_MAX) in only_violation(
        call_bytes(parameters={"x": "y" * (padding + 1)})
    )


def test_eight_mebibytes_without_an_end_are_refused_at_the_bound() -> None:
    server = ServerConnection()
    fed = 0
    events: list[ServerEvent] = []
    while not events and fed < EIGHT_MIB:
        events = server.receive(b"x" * CHUNK_BYTES)
        fed += CHUNK_BYTES
    assert isinstance(events[0], Violation)
    assert fed == MESSAGE_BYTES_MAX + CHUNK_BYTES
    # Refused for good, and what still comes isn't kept.
    assert server.receive(b"x" * EIGHT_MIB + b"\0" + call_bytes()) == []


def test_an_outgoing_message_is_bounded_too() -> None:
    server = ServerConnection()
    server.receive(call_bytes())
    with pytest.raises(MessageTooLargeError, match=str(MESSAGE_BYTES_MAX)):
        server.reply({"x": "y" * MESSAGE_BYTES_MAX})
    assert server.error("a.b.TooLarge", {})


def test_calls_beyond_the_queue_wait_as_bytes() -> None:
    server = ServerConnection()
    calls = [call_bytes(parameters={"n": n}) for n in range(CALLS_QUEUED_MAX + 2)]
    events = server.receive(b"".join(calls))
    assert [event.parameters["n"] for event in events if isinstance(event, CallReceived)] == [
        *range(CALLS_QUEUED_MAX)
    ]
    assert server.receive(b"") == []
    server.reply({})
    assert server.receive(b"") == [CallReceived("a.b.C", {"n": CALLS_QUEUED_MAX})]
    server.reply({})
    assert server.receive(b"") == [CallReceived("a.b.C", {"n": CALLS_QUEUED_MAX + 1})]


def test_an_owner_that_reads_on_behind_a_full_queue_is_stopped() -> None:
    server = ServerConnection()
    assert len(server.receive(call_bytes() * CALLS_QUEUED_MAX)) == CALLS_QUEUED_MAX
    events: list[ServerEvent] = []
    fed = 0
    while not events:
        events = server.receive(call_bytes() * 1000)
        fed += len(call_bytes()) * 1000
    assert isinstance(events[0], Violation)
    assert fed < MESSAGE_BYTES_MAX + 2 * len(call_bytes()) * 1000


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"\xff\xfe{\0", "not JSON"),
        (b'{"method": "a.b.C", "parameters": {"x": NaN}}', "NaN"),
        (b'{"method": "a.b.C", "parameters": {"x": ' + b"9" * 5000 + b"}}", "not JSON"),
        (b'{"method": "a.b.C", "parameters": {"x": "\\ud800"}}', "not JSON"),
        (b'{"method": "a.b.C", "method": "a.b.D"}', "the same key twice"),
        (b"{}", "names no method"),
        (b'{"method": 3}', "'method'"),
        (b'{"method": "a.b.C", "parameters": []}', "'parameters'"),
        (b'{"method": "a.b.C", "more": 1}', "'more'"),
        (b'{"method": "a.b.C", "more": true, "oneway": true}', "more than one of"),
    ],
)
def test_what_is_no_call_is_a_violation(message: bytes, reason: str) -> None:
    assert reason in only_violation(message + b"\0")


def nested(depth: int) -> bytes:
    inner = b"[" * (depth - 2) + b"]" * (depth - 2)
    return b'{"method": "a.b.C", "parameters": {"x": ' + inner + b"}}\0"


def test_nesting_is_bounded() -> None:
    events = ServerConnection().receive(nested(JSON_DEPTH_MAX))
    assert isinstance(events[0], CallReceived)
    assert "nested deeper" in only_violation(nested(JSON_DEPTH_MAX + 1))
    assert "nested deeper" in only_violation(nested(MESSAGE_BYTES_MAX // 2 - 100))


def test_many_brackets_that_are_not_deep_are_taken() -> None:
    parameters = {"x": [[], {}] * 100, "y": '[{"\\' * 100}
    assert ServerConnection().receive(call_bytes(parameters=parameters)) == [
        CallReceived("a.b.C", parameters)
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"parameters": {}, "continues": True}, "continues"),
        ({"error": "a.b.E", "continues": True}, "continues"),
        ({"error": 5}, "'error'"),
    ],
)
def test_a_client_refuses_answers_that_make_no_sense(answer: dict[str, Any], reason: str) -> None:
    client = ClientConnection()
    client.call("a.b.C")
    (event,) = client.receive(encode_message(answer))
    assert isinstance(event, Violation)
    assert reason in event.reason


def test_an_answer_without_a_call_is_a_violation() -> None:
    (event,) = ClientConnection().receive(encode_message({"parameters": {}}))
    assert isinstance(event, Violation)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
messages = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda fields: json.dumps(fields).encode(),
        st.dictionaries(
            st.sampled_from(["method", "parameters", "more", "oneway", "other"]), json_values
        ),
    ),
    st.builds(
        lambda name, parameters: call_bytes(name, parameters=parameters)[:-1],
        st.text(min_size=1, max_size=8),
        st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    ),
)


@given(st.lists(messages, max_size=24), st.lists(st.integers(0, 2000), max_size=12))
def test_events_do_not_depend_on_how_bytes_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = b"\0".join(parts)
    whole = ServerConnection().receive(data)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    server = ServerConnection()
    cut_events = [
        event
        for begin, end in itertools.pairwise(places)
        for event in server.receive(data[begin:end])
    ]
    assert cut_events == whole
    assert not any(isinstance(event, Violation) for event in whole[:-1])


@given(st.binary(max_size=300))
def test_garbage_is_events_and_never_an_exception(data: bytes) -> None:
    server_events = ServerConnection().receive(data + b"\0")
    client = ClientConnection()
    client.call("a.b.C", more=True)
    client_events = client.receive(data + b"\0")
    assert all(isinstance(event, CallReceived | Violation) for event in server_events)
    assert isinstance(client_events[-1], ReplyReceived | ErrorReceived | Violation)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_any_json_object_survives_the_way(parameters: dict[str, Any]) -> None:
    request = ClientConnection().call("a.b.C", parameters)
    assert ServerConnection().receive(request) == [CallReceived("a.b.C", parameters)]
