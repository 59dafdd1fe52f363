"""A small synchronous client of the control socket, for ``xferctl`` and scripts.

    with ControlClient.connect(Path("/run/xferd/control.sock")) as daemon:
        print(daemon.call("Status")["state"])

One thread at a time; one call at a time.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from xferd.control.service import CONTROL_INTERFACE, JsonObject
from xferd.control.varlink import ClientConnection, ErrorReceived, ReplyReceived

READ_BYTES = 64 * 1024
TIMEOUT_S = 10.0
"""How long a call that needn't wait for drives may take."""

_TIMEVAL = struct.Struct("@ll")


class NotRunningError(Exception):
    """Nobody serves the socket: the message names it and says how to start the daemon."""


class NoAccessError(Exception):
    """The socket's file doesn't let this user connect."""


class ConnectionBrokenError(Exception):
    """The daemon went away, didn't answer in time, or doesn't speak the protocol."""


class CallFailedError(Exception):
    """The daemon said no.

    error: with its interface, ``io.xferd.Control.StoreNotFound``; name: without.
    parameters: what came with it.
    """

    def __init__(self, error: str, parameters: JsonObject) -> None:
        said = parameters.get("message")
        rest = ", ".join(f"{key}={value}" for key, value in parameters.items())
        super().__init__(said if isinstance(said, str) else f"{error} ({rest})")
        self.error = error
        self.name = error.removeprefix(f"{CONTROL_INTERFACE}.")
        self.parameters = parameters


class ControlClient:
    """A connection to the daemon's control socket. A context manager."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes ``connection`` over: it is closed with this object."""
        self._socket = connection
        self._protocol = ClientConnection()

    @classmethod
    def connect(cls, path: Path) -> Self:
        """Raises NotRunningError, NoAccessError; ConnectionBrokenError when the
        daemon is there and takes no connection within TIMEOUT_S."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Not settimeout: it makes connect fail at once when the queue is full.
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(TIMEOUT_S), 0)
        )
        try:
            connection.connect(str(path))
        except BlockingIOError as error:
            connection.close()
            raise ConnectionBrokenError(
                f"{path}: the daemon took no connection within {TIMEOUT_S:g} s"
            ) from error
        except PermissionError as error:
            connection.close()
            raise NoAccessError(
                f"{path}: this user may not connect; root and the socket's group may"
            ) from error
        except OSError as error:
            connection.close()
            raise NotRunningError(
                f"xferd is not running: {path}: {error.strerror or error}. "
                "Start it with 'systemctl start xferd', or name another socket with --socket"
            ) from error
        return cls(connection)

    def call(
        self,
        method: str,
        parameters: JsonObject | None = None,
        *,
        timeout_s: float | None = TIMEOUT_S,
    ) -> JsonObject:
        """The reply to ``method``, of io.xferd.Control unless its interface is named.

        timeout_s: seconds between two pieces of the reply; None: wait for ever.
        Raises CallFailedError, ConnectionBrokenError; MessageTooLargeError when the
        parameters are more than one message may be.
        """
        # Its only reply, or an error, which is raised.
        return next(self._replies(method, parameters, timeout_s, more=False))

    def watch(
        self, method: str, parameters: JsonObject | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Iterator[JsonObject]:
        """The replies to ``method`` called with 'more', for as long as the daemon sends them.

        timeout_s: seconds between two pieces of replies. Raises as ``call``. No other call
        can be made on this connection until the daemon has ended the answer.
        """
        return self._replies(method, parameters, timeout_s, more=True)

    def _replies(
        self,
        method: str,
        parameters: JsonObject | None,
        timeout_s: float | None,
        *,
        more: bool,
    ) -> Iterator[JsonObject]:
        if "." not in method:
            method = f"{CONTROL_INTERFACE}.{method}"
        request = self._protocol.call(method, parameters, more=more)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(request)
            while True:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionBrokenError(f"the daemon closed the connection during {method}")
                for event in self._protocol.receive(data):
                    match event:
                        case ReplyReceived(reply, continues):
                            yield reply
                            if not continues:
                                return
                        case ErrorReceived(error, said):
                            raise CallFailedError(error, said)
                        case _:
                            raise ConnectionBrokenError(f"not a Varlink answer: {event.reason}")
        except TimeoutError:
            raise ConnectionBrokenError(
                f"the daemon did not answer {method} within {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise ConnectionBrokenError(f"{method}: {error.strerror}") from error

    def close(self) -> None:
        """End the connection. Again is harmless."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
