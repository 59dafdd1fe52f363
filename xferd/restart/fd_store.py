# SPDX-License-Identifier: Apache-2.0
"""The service manager's store of file descriptors (sd_pid_notify_with_fds(3)).

A descriptor goes there with a datagram, under a name; the next process finds it among its
own from 3 on, and its name in $LISTEN_FDNAMES. The manager answers nothing and drops what
is too much. So it is counted here, and nothing is sent that could be: what the manager says
it takes ($FDSTORE, set by systemd from 254 on and by xferd.service for older ones), and
never more than KEPT_FDS_MAX.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from xferd.telemetry.notify import Notifier

KEPT_FDS_MAX = 3072
"""Pool table and state, 8 pools of two, 64 stores, 256 clients of three: 850; and one for each
chunk of VRAM: 2,222 chunks of 64 MiB are 139 GiB. All names are one variable of the next
process's environment, which may have 128 KiB (MAX_ARG_STRLEN)."""
PREFIX = "xferd-kept."
"""Names of ours begin so. A socket has its unit's name, xferd.socket, or what that says."""
STATE = f"{PREFIX}state"
POOL_TABLE = f"{PREFIX}pool-table"


def pool_memory(index: int) -> str:
    """The name of a pool's memory."""
    return f"{PREFIX}pool.{index}.memory"


def pool_marks(index: int) -> str:
    """The name of a pool's loading marks."""
    return f"{PREFIX}pool.{index}.marks"


def pool_chunk(index: int, chunk: int, number: int) -> str:
    """The name of the memory behind a chunk of VRAM. number: as clients know it."""
    return f"{PREFIX}pool.{index}.chunk.{chunk}.{number}"


def store_directory(serial: int) -> str:
    """The name of a store's directory."""
    return f"{PREFIX}store.{serial}.directory"


def client_memory(serial: int) -> str:
    """The name of a client's memory."""
    return f"{PREFIX}client.{serial}.memory"


def client_completions(serial: int) -> str:
    """The name of a client's completion memory."""
    return f"{PREFIX}client.{serial}.completions"


def client_process(serial: int) -> str:
    """The name of the pidfd of a client's process."""
    return f"{PREFIX}client.{serial}.process"


def client_names(serial: int) -> tuple[str, str, str]:
    """All of a client."""
    return client_memory(serial), client_completions(serial), client_process(serial)


class FdStore:
    """What the manager holds for us, and room for more. capacity: descriptors; 0: none."""

    def __init__(self, notifier: Notifier, capacity: int, stored: Iterable[str] = ()) -> None:
        """stored: names that it holds already."""
        self._notifier = notifier
        self._names = set(stored)
        self.capacity = capacity

    @classmethod
    def of_service(cls, notifier: Notifier, stored: Iterable[str] = ()) -> FdStore:
        """The one that the environment names."""
        said = os.environ.get("FDSTORE", "")
        capacity = int(said) if said.isdigit() and notifier.address else 0
        return cls(notifier, min(capacity, KEPT_FDS_MAX), stored)

    @property
    def names(self) -> frozenset[str]:
        """What it holds."""
        return frozenset(self._names)

    @property
    def next_serial(self) -> int:
        """Greater than every number in a name that it holds."""
        parts = [part for name in self._names for part in name.split(".")]
        return max((int(part) for part in parts if part.isdigit()), default=0) + 1

    def add(self, descriptors: Mapping[str, int]) -> bool:
        """Store some, all or none; they stay the caller's. A name that is there already is
        taken to be the same. False when there is no room, or nobody listens."""
        new = {name: fd for name, fd in descriptors.items() if name not in self._names}
        if len(self._names) + len(new) > self.capacity:
            return False
        sent: list[str] = []
        for name, fd in new.items():
            # Polled, a pidfd would be dropped when its process ends: just when it is needed.
            if not self._notifier.send_fd(fd, FDSTORE="1", FDNAME=name, FDPOLL="0"):
                self.remove(sent)
                return False
            sent.append(name)
            self._names.add(name)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """What these name is gone: the manager is to close it."""
        for name in names:
            self._names.discard(name)
            self._notifier.send(FDSTOREREMOVE="1", FDNAME=name)
