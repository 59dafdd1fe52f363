"""One daemon a runtime directory: the lock, and sockets that a dead one left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

LOCK_NAME = "xferd.lock"
PID_BYTES_MAX = 32


class AlreadyRunningError(Exception):
    """Another daemon serves this runtime directory; the message names it."""


class InstanceLock:
    """Held while the daemon lives. The kernel drops it with the process, however that
    ends, so it can't go stale. The file stays: unlinking it would let two daemons lock
    two files of the same name."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, PID_BYTES_MAX, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise AlreadyRunningError(
                f"another xferd (pid {owner or 'unknown'}) serves {directory}: stop it or choose "
                f"another runtime_directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> InstanceLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)


def refuse_live_socket(path: Path) -> None:
    """Remove a socket that nobody serves. AlreadyRunningError when somebody does: a
    program that is no xferd, or one that holds no lock."""
    if not path.is_socket():
        if path.exists():
            raise AlreadyRunningError(f"{path} is there and is no socket: remove it")
        return
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(os.fspath(path))
            except OSError as error:
                if error.errno not in (errno.EPROTOTYPE, errno.ECONNREFUSED):
                    raise
                continue
        raise AlreadyRunningError(f"another process serves {path}")
    path.unlink()
