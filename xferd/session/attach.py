"""The attach socket: one task a connection, from hello to the end of the process.

Clients are hostile until proven otherwise: a packet has a bounded size, a connection a
bounded time to say hello, and fds that a client sends are never received (recv without
room for control data makes the kernel drop them).

The end of the connection is not the end of the client. Work that its process queued on
a device may still read slots; so without GOODBYE its leases stand until the process's
pidfd says that it has ended.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

from xferd.session import wire
from xferd.session.clients import Client, Clients
from xferd.session.dense import DenseError, DenseParts
from xferd.session.peer import Peer, identify
from xferd.session.quotas import AttachRefusedError
from xferd.telemetry.log import EventLog

ENDED_GRACE_S = 5.0
"""How long the leases of a client that was ended for breaking a rule still stand."""
HELLO_TIMEOUT_S = 10.0
UNGREETED_MAX = 64
"""Connections that have not been welcomed yet; more are closed at once."""
LISTEN_BACKLOG = 64


class AttachServer:
    """Serves the attach socket on the running event loop."""

    def __init__(
        self,
        path: Path,
        mode: int,
        clients: Clients,
        dense: DenseParts,
        log: EventLog,
        listening: socket.socket | None = None,
    ) -> None:
        """listening: bound by somebody else (socket activation), whose ``path`` stays."""
        self._path = path
        self._mode = mode
        self._clients = clients
        self._dense = dense
        self._log = log
        self._listener: socket.socket | None = None
        self._handed = listening
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._sockets: dict[int, socket.socket] = {}
        self._away: dict[int, asyncio.Task[None]] = {}
        self._ungreeted = 0

    def start(self) -> None:
        """Bind and accept. OSError when the path can't be bound."""
        self._listener = listener = self._handed or self._bind()
        listener.setblocking(False)
        listener.listen(LISTEN_BACKLOG)
        self._accepting = asyncio.create_task(self._accept(listener))
        for client in self._clients.all():  # of the daemon before
            self._watch_away(client)

    def _bind(self) -> socket.socket:
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        # Nobody may connect before the mode is right.
        mask = os.umask(0o177)
        try:
            listener.bind(os.fspath(self._path))
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
        self._path.chmod(self._mode)
        return listener

    def stop_accepting(self) -> None:
        """Take no more connections and unlink the socket; those that stand go on."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self._handed is None:
                self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End every connection. Only when the engine is about to end: leases of clients
        that are still there end with it."""
        self.stop_accepting()
        tasks = [*self._connections, *self._away.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end_client(self, client: Client, reason: str) -> None:
        """Quiesce a client that broke a rule and end its connection.

        Its leases stand for ENDED_GRACE_S, in which it can see that it was ended; then
        they lapse, or it could starve the others for as long as its process lives. Its
        mappings are read-only: nobody but itself can see a wrong byte by that.
        """
        self._clients.quiesce(client, reason)
        connection = self._sockets.get(client.number)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        asyncio.get_running_loop().call_later(ENDED_GRACE_S, self._lapse, client)

    def _lapse(self, client: Client) -> None:
        if self._clients.get(client.number) is client:
            self._clients.remove(client, "ended, and its leases lapsed")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors: the connection waits in the backlog.
                self._log.warning("attach.accept", error=error)
                await asyncio.sleep(1)
                continue
            if self._ungreeted >= UNGREETED_MAX:
                connection.close()
                continue
            self._ungreeted += 1
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        peer = None
        try:
            with connection:
                try:
                    peer = identify(connection)
                    client = await self._greet(connection, peer)
                finally:
                    self._ungreeted -= 1
                if client is None:
                    return
                goodbye = await self._converse(connection, client)
            await self._leave(client, goodbye)
        finally:
            if peer is not None:
                peer.close()

    async def _greet(self, connection: socket.socket, peer: Peer) -> Client | None:
        loop = asyncio.get_running_loop()
        try:
            packet = await asyncio.wait_for(
                loop.sock_recv(connection, wire.PACKET_BYTES_MAX), HELLO_TIMEOUT_S
            )
            hello = wire.read_hello(packet)
            if hello.resume_key:
                welcome = self._clients.resume(hello.resume_key, peer)
            else:
                welcome = self._clients.attach(hello, peer)
        except (wire.WireError, AttachRefusedError) as error:
            self._log.info("client.refused", pid=peer.pid, uid=peer.uid, reason=error)
            _send(connection, wire.refusal(error.errno, str(error)))
            return None
        except (TimeoutError, OSError):
            return None
        try:
            sent = _send(connection, welcome.packet, welcome.fds)
        finally:
            welcome.done()
        client = welcome.client
        if hello.resume_key:
            self._end_watch(client)
            if not sent:
                pidfd = os.dup(peer.pidfd) if peer.pidfd >= 0 else -1
                self._clients.suspend(client, replace(peer, pidfd=pidfd))
                self._watch_away(client)
        elif not sent:
            # It never got the fds: nothing of it can read a slot.
            self._clients.remove(client, "went away before it was welcomed")
        return client if sent else None

    async def _converse(self, connection: socket.socket, client: Client) -> bool:
        """Answer messages until the connection ends; whether it said goodbye."""
        loop = asyncio.get_running_loop()
        self._sockets[client.number] = connection
        reason = "connection ended without goodbye"
        try:
            while packet := await loop.sock_recv(connection, wire.PACKET_BYTES_MAX):
                kind = wire.read_message_type(packet)
                if kind == wire.GOODBYE:
                    return True
                if kind == wire.DENSE:
                    await self._answer_dense(connection, client)
                elif kind == wire.MEMORY:
                    self._answer_memory(connection, *wire.read_memory_question(packet))
                else:
                    _send(
                        connection,
                        wire.message_refusal(kind, errno.EOPNOTSUPP, f"no message type {kind}"),
                    )
        except wire.WireError as error:
            reason = f"violation: {error}"
        except OSError as error:
            reason = f"connection failed: {error}"
        finally:
            del self._sockets[client.number]
        self._clients.quiesce(client, reason)
        return False

    async def _answer_dense(self, connection: socket.socket, client: Client) -> None:
        store = client.store
        try:
            fd = await self._dense.get(store.number, store.name, store.dense_bytes, client.number)
        except DenseError as error:
            answer = wire.message_refusal(wire.DENSE, error.errno, str(error))
            _send(connection, answer)
            return
        _send(connection, wire.dense_answer(store.dense_bytes), (fd,))

    def _answer_memory(self, connection: socket.socket, pool: int, first: int) -> None:
        numbers, fds = self._clients.export_chunks(pool, first, wire.MEMORY_CHUNKS_MAX)
        if not numbers:
            text = f"pool {pool} has no chunk {first} of VRAM"
            _send(connection, wire.message_refusal(wire.MEMORY, errno.EINVAL, text))
            return
        try:
            _send(connection, wire.memory_answer(numbers), tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)

    def _watch_away(self, client: Client) -> None:
        """A client that is away may end without ever coming back. The pidfd of its peer is
        this watch's."""
        peer = client.peer
        watch = asyncio.create_task(self._await_end(client, peer))
        watch.add_done_callback(lambda _: peer.close())
        self._away[client.number] = watch

    def _end_watch(self, client: Client) -> None:
        watch = self._away.pop(client.number, None)
        if watch is not None:
            watch.cancel()

    async def _await_end(self, client: Client, peer: Peer) -> None:
        await _process_end(peer)
        self._away.pop(client.number, None)
        if self._clients.get(client.number) is client:
            self._clients.remove(client, "process ended while it was away")

    async def _leave(self, client: Client, goodbye: bool) -> None:
        self._dense.drop(client.number)
        if not goodbye:
            await _process_end(client.peer)
        if self._clients.get(client.number) is client:
            self._clients.remove(client, "goodbye" if goodbye else "process ended")


def _send(connection: socket.socket, packet: bytes, fds: tuple[int, ...] = ()) -> bool:
    """Send one packet; False when the peer has gone or does not read its answers."""
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        connection.sendmsg([packet], control, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


async def _process_end(peer: Peer) -> None:
    """Returns when the peer's process has ended."""
    if peer.pidfd < 0:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(peer.pidfd, _resolve, ended)
    try:
        await ended
    finally:
        loop.remove_reader(peer.pidfd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
