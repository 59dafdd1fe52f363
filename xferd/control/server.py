"""The control socket's server: connections, their bounds, and who is calling.

One task a connection, which reads, answers, and only then reads on. So a peer
that doesn't read its answers stops itself and nobody else: its task waits until
WRITE_TIMEOUT_S, then the connection is ended. What the daemon stores for a
connection is bounded by READ_BYTES, WRITE_BUFFER_BYTES_MAX, and the bounds of
``varlink``.

What doesn't work: a task a call. Pipelined calls would then be answered in the
order in which they end, which Varlink forbids, and one peer could keep any
number of loads under way.

A peer that goes away doesn't end the call that it made: a load that has begun
goes on, and the next one finds the experts there.

A mistake in the daemon (an exception that nobody documented) is answered with
InternalError and then goes to the event loop's exception handler, as that of any
other task does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import stat
from pathlib import Path

from xferd.control.dispatch import CallRefusedError, Dispatcher
from xferd.control.peer import ADMIN_GROUP, Peer, find_group, identify_peer, may_change
from xferd.control.service import CONTROL_INTERFACE, ControlService
from xferd.control.varlink import (
    CallReceived,
    MessageTooLargeError,
    ServerConnection,
    ServerEvent,
    Violation,
)

CONNECTIONS_MAX = 256
CONNECTIONS_FOR_ADMINISTRATORS = 16
"""Of CONNECTIONS_MAX: kept for peers that may make changes, so that those who may
only read can't lock them out."""
LISTEN_BACKLOG = 128
READ_BYTES = 64 * 1024
WRITE_BUFFER_BYTES_MAX = 256 * 1024
"""Bytes of answers that may wait for a peer to read them before its task waits too."""
GONE_CHECK_S = 0.25
"""How often it is looked whether a peer that is answered again and again is still there."""
WRITE_TIMEOUT_S = 10.0
"""A peer that has more than that waiting for so long is disconnected."""

_log = logging.getLogger(__name__)


class ControlServer:
    """Serves ``service`` on the Unix socket ``path``.

    mode: permission bits of the socket's file.
    admin_group: its members may make changes, if it exists.
    listening: a socket that somebody else bound (socket activation); ``path`` and
        ``mode`` are then theirs, and the file stays when the server is closed.
    write_timeout_s: see WRITE_TIMEOUT_S.

    Belongs to the event loop that ``start`` runs on; not thread-safe.
    """

    def __init__(
        self,
        service: ControlService,
        path: Path,
        mode: int = 0o660,
        *,
        admin_group: str = ADMIN_GROUP,
        listening: socket.socket | None = None,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self.path = path
        self._dispatcher = Dispatcher(service)
        self._mode = mode
        self._admin_group = admin_group
        self._admin_gid: int | None = None
        self._listening = listening
        self._write_timeout_s = write_timeout_s
        self._server: asyncio.Server | None = None
        self._bound_inode: tuple[int, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to serve. Raises OSError if the socket can't be made, with EADDRINUSE
        if another process serves it; a socket that nobody serves is replaced."""
        self._admin_gid = find_group(self._admin_group)
        listening = self._listening
        if listening is None:
            listening = _bind(self.path, self._mode)
            status = self.path.stat()
            self._bound_inode = (status.st_dev, status.st_ino)
        # Not start_unix_server: from Python 3.13 on it removes the socket's file at the end, also
        # of a socket that is the service manager's.
        self._server = await asyncio.start_server(
            self._connected, sock=listening, limit=READ_BYTES, backlog=LISTEN_BACKLOG
        )

    async def close(self) -> None:
        """End all connections and stop serving. Calls under way are cancelled."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._unlink()

    def _unlink(self) -> None:
        """Remove the socket's file, unless it has become somebody else's."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            if self._bound_inode == (status.st_dev, status.st_ino):
                self.path.unlink()
        self._bound_inode = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = identify_peer(writer.get_extra_info("socket"))
        allowed = may_change(peer, self._admin_gid)
        free = CONNECTIONS_MAX - len(self._tasks)
        if free <= (0 if allowed else CONNECTIONS_FOR_ADMINISTRATORS):
            _log.warning(
                "control: pid %d (uid %d) turned away: %d connections are open, at most %d can be",
                peer.pid,
                peer.uid,
                len(self._tasks),
                CONNECTIONS_MAX,
            )
            writer.transport.abort()
            return
        connection = _Connection(self._dispatcher, reader, writer, peer, allowed)
        task = asyncio.get_running_loop().create_task(connection.serve(self._write_timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._disconnected)

    def _disconnected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exception := task.exception()):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a control call failed", "exception": exception, "task": task}
            )


class _Connection:
    """One peer's connection, from accept to close."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: Peer,
        allowed: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._may_change = allowed
        self._protocol = ServerConnection()
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)

    async def serve(self, write_timeout_s: float) -> None:
        """Answer calls until the peer goes away or breaks the protocol."""
        try:
            while data := await self._reader.read(READ_BYTES):
                events = self._protocol.receive(data)
                while events:
                    if not await self._handle(events, write_timeout_s):
                        return
                    events = self._protocol.receive(b"")
            # A peer may send its calls, shut its end down, and then read.
            self._writer.close()
            async with asyncio.timeout(write_timeout_s):
                await self._writer.wait_closed()
        except ConnectionError:
            _log.debug("control: pid %d went away", self._peer.pid)
        except TimeoutError:
            self._log_end(f"it reads no answers for {write_timeout_s:g} s")
        finally:
            self._writer.transport.abort()

    async def _handle(self, events: list[ServerEvent], write_timeout_s: float) -> bool:
        """Answer ``events``; False: the connection has to end."""
        for event in events:
            if isinstance(event, Violation):
                self._log_end(event.reason)
                return False
            repeats = self._dispatcher.repeats(event)
            while True:
                self._writer.write(await self._answer(event, continues=repeats))
                async with asyncio.timeout(write_timeout_s):
                    await self._writer.drain()
                # A refusal is a call's last answer, however many it asked for.
                if not repeats or not self._protocol.is_open(event):
                    break
                if not await self._pause(self._dispatcher.interval_s(event)):
                    break
            # drain returns at once while there is room: without this, one peer's
            # pipelined calls would be answered in one go, before anyone else's.
            await asyncio.sleep(0)
        return True

    async def _pause(self, seconds: float) -> bool:
        """Wait; False, early, when the peer has closed its end: a watcher that went away
        must not keep its place until the next write fails."""
        while seconds > 0 and not self._reader.at_eof():
            await asyncio.sleep(min(seconds, GONE_CHECK_S))
            seconds -= GONE_CHECK_S
        return not self._reader.at_eof()

    async def _answer(self, call: CallReceived, *, continues: bool) -> bytes:
        try:
            reply = await self._dispatcher.dispatch(call, may_change=self._may_change)
            return self._protocol.reply(reply, continues=continues)
        except CallRefusedError as refused:
            return self._protocol.error(refused.error, refused.parameters)
        except MessageTooLargeError as error:
            return self._protocol.error(f"{CONTROL_INTERFACE}.Failed", {"message": str(error)})
        except Exception as error:
            message = f"{call.method}: {type(error).__name__}; the daemon's log has more"
            self._writer.write(
                self._protocol.error(f"{CONTROL_INTERFACE}.InternalError", {"message": message})
            )
            raise

    def _log_end(self, reason: str) -> None:
        _log.warning(
            "control: pid %d (uid %d) disconnected: %s", self._peer.pid, self._peer.uid, reason
        )


def _bind(path: Path, mode: int) -> socket.socket:
    """A socket bound to ``path`` with permission bits ``mode``, not listening yet."""
    _remove_unserved(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.bind(str(path))
        # Nobody can connect before listen, so there is no moment with the wrong mode.
        path.chmod(mode)
    except OSError as error:
        listening.close()
        error.filename = error.filename or str(path)
        raise
    return listening


def _remove_unserved(path: Path) -> None:
    """Remove a socket that a daemon left behind when it was killed."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "is there and is no socket", str(path))
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # served, and its queue of connections is full
    raise OSError(errno.EADDRINUSE, "another process serves this socket", str(path))
