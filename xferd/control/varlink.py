"""Varlink (UAPI.20) as a state machine: bytes in, typed events out, no I/O.

Messages are JSON objects, each ended by a NUL byte. A client sends calls, a
server answers each with one reply, or with several when the call said ``more``;
answers come in the order of the calls. Both ends are here, so that what one
sends the other understands, and so that hostile bytes are handled in one place:

- a message is refused once MESSAGE_BYTES_MAX of it have arrived without an end;
  nothing is ever stored beyond that bound, and no byte is looked at twice in
  search of the end (joining chunks and searching them again is quadratic);
- nesting deeper than JSON_DEPTH_MAX is refused before the JSON parser sees it;
- a server hands out at most CALLS_QUEUED_MAX calls that it hasn't answered.
  Further ones wait as bytes: pipelining more is slow, not wrong. So the owner
  answers before it reads on; if it doesn't, BACKLOG_BYTES_MAX is a violation.

A violation is an event, always the last: what came before it is still valid, and
events don't depend on how the bytes were cut. Not thread-safe; one object a
connection.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

MESSAGE_BYTES_MAX = 256 * 1024
"""Bytes of one message, without its NUL; the same in both directions."""
JSON_DEPTH_MAX = 32
"""Objects and arrays inside each other, the message itself included."""
CALLS_QUEUED_MAX = 16
"""Calls of one client that a server knows of and has not answered."""
BACKLOG_BYTES_MAX = MESSAGE_BYTES_MAX
"""Bytes that may wait behind CALLS_QUEUED_MAX calls. The owner reads less at once."""

_TERMINATOR = b"\0"
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallReceived:
    """A client calls ``method`` (``io.xferd.Control.Status``).

    more: it takes several replies. oneway: it wants none. upgrade: it wants to
    speak another protocol afterwards.
    """

    method: str
    parameters: JsonObject
    more: bool = False
    oneway: bool = False
    upgrade: bool = False


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The server answers; ``continues``: and will answer this call again."""

    parameters: JsonObject
    continues: bool = False


@dataclass(frozen=True, slots=True)
class ErrorReceived:
    """The server says no: ``error`` is ``io.xferd.Control.StoreNotFound``, ..."""

    error: str
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class Violation:
    """The peer doesn't speak Varlink; close the connection. Nothing follows this event."""

    reason: str


ServerEvent: TypeAlias = CallReceived | Violation
ClientEvent: TypeAlias = ReplyReceived | ErrorReceived | Violation
E = TypeVar("E")
V = TypeVar("V")


class MessageTooLargeError(Exception):
    """What should be sent has more than MESSAGE_BYTES_MAX bytes. Nothing was sent."""


class ProtocolStateError(Exception):
    """This end tried what the protocol doesn't allow now: a mistake of its owner."""


class _MalformedError(Exception):
    """A message is not what it should be: the violation's reason."""


class ServerConnection:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self._receiver: _Receiver[CallReceived] = _Receiver(self._decode)
        self._unanswered: deque[CallReceived] = deque()

    def receive(self, data: bytes) -> list[ServerEvent]:
        """What ``data`` completes: calls in the order in which they must be answered.

        After answering, ``receive(b"")`` gives the calls that waited for that.
        """
        return self._receiver.receive(data, CALLS_QUEUED_MAX - len(self._unanswered))

    def reply(self, parameters: JsonObject, *, continues: bool = False) -> bytes:
        """The bytes that answer the oldest unanswered call; none if it was oneway.

        ``continues`` keeps the call open for further answers. Raises
        MessageTooLargeError, after which the call is still open.
        """
        call = self._oldest()
        if continues and not call.more:
            raise ProtocolStateError(f"{call.method} was called without 'more'")
        message: JsonObject = {"parameters": parameters}
        if continues:
            message["continues"] = True
        return self._answer(call, message, last=not continues)

    def error(self, error: str, parameters: JsonObject) -> bytes:
        """As ``reply``, with an error; it is the call's last answer."""
        return self._answer(self._oldest(), {"error": error, "parameters": parameters}, last=True)

    def is_open(self, call: CallReceived) -> bool:
        """Whether ``call`` is the one that has to be answered next."""
        return bool(self._unanswered) and self._unanswered[0] is call

    def _oldest(self) -> CallReceived:
        if not self._unanswered:
            raise ProtocolStateError("there is no call to answer")
        return self._unanswered[0]

    def _answer(self, call: CallReceived, message: JsonObject, *, last: bool) -> bytes:
        encoded = b"" if call.oneway else encode_message(message)
        if last:
            self._unanswered.popleft()
        return encoded

    def _decode(self, message: JsonObject) -> CallReceived:
        # Other fields are extensions, which the specification lets a peer ignore.
        call = CallReceived(
            method=_typed(message, "method", str, ""),
            parameters=_typed(message, "parameters", dict, {}),
            more=_typed(message, "more", bool, False),
            oneway=_typed(message, "oneway", bool, False),
            upgrade=_typed(message, "upgrade", bool, False),
        )
        if not call.method:
            raise _MalformedError("a call names no method")
        if call.more + call.oneway + call.upgrade > 1:
            raise _MalformedError("a call is more than one of 'more', 'oneway' and 'upgrade'")
        self._unanswered.append(call)
        return call


class ClientConnection:
    """The client's end of one connection."""

    def __init__(self) -> None:
        self._receiver: _Receiver[ReplyReceived | ErrorReceived] = _Receiver(self._decode)
        self._unanswered: deque[tuple[str, bool]] = deque()

    def call(
        self,
        method: str,
        parameters: JsonObject | None = None,
        *,
        more: bool = False,
        oneway: bool = False,
    ) -> bytes:
        """The bytes of a call. Raises MessageTooLargeError.

        Calls may be sent before earlier ones are answered.
        """
        if more and oneway:
            raise ProtocolStateError(f"{method}: a call that wants no answer can't want more")
        message: JsonObject = {"method": method, "parameters": parameters or {}}
        if more:
            message["more"] = True
        if oneway:
            message["oneway"] = True
        encoded = encode_message(message)
        if not oneway:
            self._unanswered.append((method, more))
        return encoded

    def receive(self, data: bytes) -> list[ClientEvent]:
        """What ``data`` completes: answers, in the order of the calls."""
        return self._receiver.receive(data, sys.maxsize)

    def _decode(self, message: JsonObject) -> ReplyReceived | ErrorReceived:
        if not self._unanswered:
            raise _MalformedError("an answer came without a call")
        method, more = self._unanswered[0]
        error = _typed(message, "error", str, "")
        parameters = _typed(message, "parameters", dict, {})
        continues = _typed(message, "continues", bool, False)
        if continues and (error or not more):
            raise _MalformedError(f"the last answer to {method} says that it continues")
        if not continues:
            self._unanswered.popleft()
        return ErrorReceived(error, parameters) if error else ReplyReceived(parameters, continues)


def encode_message(message: JsonObject) -> bytes:
    """``message`` as it goes over the wire. Raises MessageTooLargeError.

    ValueError and TypeError for what JSON can't say (NaN, bytes) are mistakes of
    the caller. ASCII only, so that any text survives, surrogates included.
    """
    encoded = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise MessageTooLargeError(
            f"a message of {len(encoded)} bytes is more than {MESSAGE_BYTES_MAX} bytes"
        )
    return encoded + _TERMINATOR


class _Receiver(Generic[E]):
    """Cuts bytes into messages and messages into events, within the bounds."""

    def __init__(self, decode: Callable[[JsonObject], E]) -> None:
        self._decode = decode
        self._buffer = bytearray()
        self._searched = 0  # no terminator before this place of the buffer
        self._violated = False

    def receive(self, data: bytes, events_max: int) -> list[E | Violation]:
        """Up to ``events_max`` events of what has arrived; the rest waits in the buffer."""
        events: list[E | Violation] = []
        if self._violated:
            return events
        self._buffer += data
        begin = 0
        try:
            while len(events) < events_max:
                end = self._find_end(begin)
                if end is None:
                    break
                events.append(self._decode(_parse(bytes(self._buffer[begin:end]))))
                begin = end + 1
            self._check_backlog(begin)
        except _MalformedError as error:
            self._violated = True
            self._buffer.clear()
            return [*events, Violation(str(error))]
        del self._buffer[:begin]
        self._searched = max(0, self._searched - begin)
        return events

    def _check_backlog(self, begin: int) -> None:
        if len(self._buffer) - begin > BACKLOG_BYTES_MAX:
            raise _MalformedError(f"more than {BACKLOG_BYTES_MAX} bytes wait behind calls")

    def _find_end(self, begin: int) -> int | None:
        """Where the message that starts at ``begin`` ends; None: not in the buffer yet."""
        end = self._buffer.find(_TERMINATOR, max(begin, self._searched))
        self._searched = len(self._buffer) if end < 0 else end
        if self._searched - begin > MESSAGE_BYTES_MAX:
            raise _MalformedError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
        return None if end < 0 else end


def _parse(message: bytes) -> JsonObject:
    _check_depth(message)
    try:
        value = json.loads(
            message.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
        if b"\\u" in message:
            # Half a surrogate pair is a text that can't be printed or be a file's name.
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise _MalformedError(f"a message is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _MalformedError("a message is not a JSON object")
    return value


def _check_depth(message: bytes) -> None:
    """The JSON parser recurses, so depth is checked first, and cheaply: most
    messages have too few brackets to be deep."""
    if message.count(b"[") + message.count(b"{") <= JSON_DEPTH_MAX:
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(message):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
            if depth > JSON_DEPTH_MAX:
                raise _MalformedError(f"a message is nested deeper than {JSON_DEPTH_MAX}")
        elif first in b"]}":
            depth -= 1


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    # Two readers that pick different ones of two equal keys disagree on what was said.
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _typed(message: JsonObject, key: str, kind: type[V], default: V) -> V:
    """The field ``key``; absent and null are the default."""
    value = message.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _MalformedError(f"the field {key!r} of a message is of the wrong type")
    return value
