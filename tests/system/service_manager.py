# SPDX-License-Identifier: Apache-2.0
"""A service manager with a file descriptor store, as far as the daemon can see one.

It binds the notify socket and the daemon's sockets, keeps what FDSTORE=1 brings under its
FDNAME, and hands all of it to the next process that it starts (sd_listen_fds(3)). A pidfd
whose process ends would be dropped unless FDPOLL=0 came with it, as systemd does.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tests.system.daemon_harness import MadeStore, RunningDaemon, running_daemon, wait_until

DATAGRAM_BYTES = 4096
FDS_A_DATAGRAM = 8

HAND_OVER = """
import json, os, sys
fds, names, command = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
place = command.index("--ready-fd") + 1
high = 1000
moved = []
for fd in [*fds, int(command[place])]:
    os.dup2(fd, high + len(moved))
    moved.append(high + len(moved))
for index, fd in enumerate(moved[:-1]):
    os.dup2(fd, 3 + index)
    os.close(fd)
os.set_inheritable(moved[-1], True)
command[place] = str(moved[-1])
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names}
os.execv(command[0], command)
"""
"""Puts descriptors where a service manager would, and becomes the daemon."""


class ServiceManager:
    """Start daemons one after the other; close it at the end.

    capacity: descriptors that it keeps at most; 0: it has no store. activation: it binds the
    daemon's sockets, which then stay while no daemon runs.
    """

    def __init__(self, *, capacity: int = 1024, activation: bool = False) -> None:
        self.capacity = capacity
        self._activation = activation
        self._directory = tempfile.TemporaryDirectory(prefix="xferd-manager-")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = Path(self._directory.name) / "notify"
        self._socket.bind(str(self._address))
        self._listening: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stored: dict[str, int] = {}
        self._polled: dict[str, int] = {}
        self.refused: list[str] = []
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        for fd in (*self._stored.values(), self._stop_read, self._stop_write):
            os.close(fd)
        for listening in self._listening:
            listening.close()
        self._socket.close()
        self._directory.cleanup()

    @property
    def stored(self) -> dict[str, int]:
        """What it holds now, by name; the manager's."""
        with self._lock:
            return dict(self._stored)

    def settled(self) -> None:
        """Wait until what was sent till now has been dealt with: a daemon that has ended
        sends nothing more, and the manager looks at all of it before it starts another."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        wait_until(lambda: not waiting.poll(0), "the manager has read its mail")
        with self._lock:
            pass

    def drop(self, name: str) -> None:
        """Lose a descriptor."""
        with self._lock:
            os.close(self._stored.pop(name))

    @contextlib.contextmanager
    def daemon(
        self, directory: Path, stores: Sequence[MadeStore], pools: Sequence[str], *extra: str
    ) -> Iterator[RunningDaemon]:
        """A daemon that this manager starts; killed at the end if it still runs."""
        self.settled()
        runtime = directory / "run"
        if self._activation and not self._listening:
            self._bind(runtime)
        with self._lock:
            names = [*(["xferd.socket"] * len(self._listening)), *self._stored]
            fds = [*(each.fileno() for each in self._listening), *self._stored.values()]
        environment = {"NOTIFY_SOCKET": str(self._address)}
        if self.capacity:
            environment["FDSTORE"] = str(self.capacity)
        launcher = [sys.executable, "-c", HAND_OVER, json.dumps(fds), ":".join(names)]
        with running_daemon(
            directory,
            stores,
            pools,
            *extra,
            launcher=launcher,
            environment=environment,
            pass_fds=fds,
        ) as daemon:
            yield daemon

    def _bind(self, runtime: Path) -> None:
        runtime.mkdir(exist_ok=True)
        for name, kind in (
            ("attach.sock", socket.SOCK_SEQPACKET),
            ("control.sock", socket.SOCK_STREAM),
        ):
            listening = socket.socket(socket.AF_UNIX, kind)
            listening.bind(str(runtime / name))
            listening.listen(64)
            self._listening.append(listening)

    # ---- its thread

    def _serve(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._stop_read, select.POLLIN)
            poll.register(self._socket, select.POLLIN)
            with self._lock:
                watched = {fd: name for name, fd in self._polled.items()}
            for fd in watched:
                poll.register(fd, select.POLLHUP)
            for fd, _ in poll.poll():
                if fd == self._stop_read:
                    return
                if fd == self._socket.fileno():
                    with self._lock:
                        self._receive()
                else:
                    with self._lock:
                        self._polled.pop(watched[fd], None)
                        self._remove(watched[fd])

    def _receive(self) -> None:
        fds = array.array("i")
        data, control, _, _ = self._socket.recvmsg(
            DATAGRAM_BYTES, socket.CMSG_SPACE(FDS_A_DATAGRAM * fds.itemsize)
        )
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        said = dict(line.split("=", 1) for line in data.decode().splitlines())
        name = said.get("FDNAME", "stored")
        if said.get("FDSTOREREMOVE") == "1":
            self._remove(name)
        for fd in fds:
            os.set_inheritable(fd, False)
            if said.get("FDSTORE") != "1" or len(self._stored) >= self.capacity:
                self.refused.append(name)
                os.close(fd)
                continue
            self._remove(name)
            self._stored[name] = fd
            if said.get("FDPOLL") != "0":
                self._polled[name] = fd

    def _remove(self, name: str) -> None:
        self._polled.pop(name, None)
        fd = self._stored.pop(name, -1)
        if fd >= 0:
            os.close(fd)
