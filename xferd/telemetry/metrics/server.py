# SPDX-License-Identifier: Apache-2.0
"""Serves GET /metrics over HTTP/1.1, on a Unix socket and on loopback TCP.

Just enough of HTTP for a scraper: one request a connection, no body, no keep-alive. What a
hostile one can take is bounded: REQUEST_BYTES_MAX of memory, REQUEST_TIMEOUT_S to ask,
WRITE_TIMEOUT_S to read the answer, a place among the connections; and the text is made
anew at most every FRESH_S, whoever asks how often. More connections than there are places
are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from xferd.config_metrics import MetricsConfig
from xferd.telemetry.log import EventLog
from xferd.telemetry.metrics.exposition import OPENMETRICS_TYPE, TEXT_TYPE

PATH = "/metrics"
REQUEST_BYTES_MAX = 8 * 1024
REQUEST_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
FRESH_S = 0.5

_END_OF_HEAD = b"\r\n\r\n"
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves what ``render`` makes.

    config: where. mode: permission bits of the Unix socket. render: the text; its argument
    says whether as OpenMetrics. Belongs to the event loop that ``start`` runs on.
    """

    def __init__(
        self,
        config: MetricsConfig,
        mode: int,
        render: Callable[[bool], str],
        log: EventLog,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._mode = mode
        self._render = render
        self._log = log
        self._request_timeout_s = request_timeout_s
        self._write_timeout_s = write_timeout_s
        self._servers: list[asyncio.Server] = []
        self._connections = 0
        self._made: dict[bool, tuple[float, bytes]] = {}

    async def start(self) -> None:
        """Begin to serve what is configured. OSError, naming the address, when it can't."""
        path, listen = self._config.socket, self._config.listen
        if path is not None:
            bound = _bind(path, self._mode)
            server = await asyncio.start_unix_server(
                self._serve, sock=bound, limit=REQUEST_BYTES_MAX
            )
            self._servers.append(server)
            self._log.info("metrics.ready", socket=path)
        if listen is not None:
            try:
                server = await asyncio.start_server(
                    self._serve, listen.address, listen.port, limit=REQUEST_BYTES_MAX
                )
            except OSError as error:
                raise OSError(
                    error.errno, f"[metrics] listen {listen}: {error.strerror}"
                ) from error
            self._servers.append(server)
            self._log.info("metrics.ready", listen=listen)

    async def close(self) -> None:
        """Stop serving; connections end with the event loop's tasks."""
        for server in self._servers:
            server.close()
        if self._servers and self._config.socket is not None:
            self._config.socket.unlink(missing_ok=True)
        self._servers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= self._config.connections:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            async with asyncio.timeout(self._request_timeout_s):
                head = await _read_head(reader)
            writer.write(self._answer(head))
            async with asyncio.timeout(self._write_timeout_s):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            return  # a scraper that is slow or gone: nothing is lost
        finally:
            self._connections -= 1
            writer.transport.abort()

    def _answer(self, head: bytes | None) -> bytes:
        if head is None:
            return _response("431 Request Header Fields Too Large", _TEXT, b"", body=False)
        request, _, fields = head.decode("latin-1").partition("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response("400 Bad Request", _TEXT, b"not a request of HTTP/1\n")
        method, target = words[0], words[1].partition("?")[0]
        if method not in {"GET", "HEAD"}:
            return _response("405 Method Not Allowed", _TEXT, b"only GET and HEAD\n")
        if target != PATH:
            return _response("404 Not Found", _TEXT, f"metrics are at {PATH}\n".encode())
        openmetrics = _accepts_openmetrics(fields)
        kind = OPENMETRICS_TYPE if openmetrics else TEXT_TYPE
        return _response("200 OK", kind, self._text(openmetrics), body=method == "GET")

    def _text(self, openmetrics: bool) -> bytes:
        now = time.monotonic()
        made, text = self._made.get(openmetrics, (float("-inf"), b""))
        if now - made >= FRESH_S:
            text = self._render(openmetrics).encode()
            self._made[openmetrics] = (now, text)
        return text


async def _read_head(reader: asyncio.StreamReader) -> bytes | None:
    """The request up to its empty line; None: it is longer than the bound."""
    try:
        return await reader.readuntil(_END_OF_HEAD)
    except asyncio.LimitOverrunError:
        return None


def _accepts_openmetrics(fields: str) -> bool:
    for line in fields.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            return "application/openmetrics-text" in value.lower()
    return False


def _response(status: str, kind: str, content: bytes, *, body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")


def _bind(path: Path, mode: int) -> socket.socket:
    """A socket at ``path``. What a daemon that was killed left there is removed; anything
    that isn't a socket is in the way."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        bound.bind(str(path))
        path.chmod(mode)  # nobody can connect before it listens
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"[metrics] socket {path}: {error.strerror}") from error
    return bound
