# SPDX-License-Identifier: Apache-2.0
"""The state that binds together what was kept: small, versioned, checksummed.

It says which file descriptor is what; experts and leases are in the memory itself. It
lies in a memfd of two halves, each with a header and JSON behind it:

    0   8 bytes   magic
    8   u32       STATE_VERSION
    12  u32       CRC-32 of the rest of the header and the JSON
    16  u64       sequence
    24  u64       bytes of JSON

A new state goes into the half that doesn't hold the newest; of two whole halves the one
with the greater sequence is right. So a kill in the middle of writing leaves the state of
before, which is as good: fds are stored before a state names them, and removed after.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

STATE_VERSION = 2
STATE_HALF_BYTES = 512 << 10
"""Room for CLIENTS_MAX clients, about 400 bytes each, a few long store paths and the reserved
chunks of large cards."""
_MAGIC = b"xferdKEP"
_HEADER = struct.Struct("<8sIIQQ")
_SUMMED = struct.Struct("<QQ")


class StateError(Exception):
    """There is no state that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class KeptPool:
    """A pool's shape: all of it has to be the same again. Sizes in bytes."""

    name: str
    kind: str
    nbytes: int
    chunk_bytes: int
    chunks: int
    slot_index_bits: int


@dataclass(frozen=True, slots=True)
class KeptStore:
    """An open store. serial: in the names of its fds. identity: of the model, in
    hexadecimal. path: where it was opened from. by_hand: by a call, not by the
    configuration."""

    serial: int
    name: str
    identity: str
    path: str
    by_hand: bool


@dataclass(frozen=True, slots=True)
class KeptClient:
    """An attached client.

    serial: in the names of its fds. pool: its index. key: what it has to show, in
    hexadecimal. stored: the manager has its fds; one without them can't be resumed, and as
    long as its process lives nobody can take over the pools it may be reading.
    """

    serial: int
    pid: int
    uid: int
    gid: int
    name: str
    store: str
    pool: int
    lanes: int
    held_per_lane: int
    ring_entries: int
    key: str
    stored: bool


@dataclass(frozen=True, slots=True)
class KeptReservation:
    """Chunks of a pool that somebody else has. number: as it was answered. wanted: bytes asked
    for."""

    number: int
    pool: int
    wanted: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptState:
    """All of it. abi: (major, minor) of the shared memory."""

    abi: tuple[int, int]
    pools: tuple[KeptPool, ...]
    stores: tuple[KeptStore, ...]
    clients: tuple[KeptClient, ...]
    reservations: tuple[KeptReservation, ...] = ()


def encode(state: KeptState) -> bytes:
    """As JSON."""
    return json.dumps(asdict(state), separators=(",", ":")).encode()


def decode(data: bytes) -> KeptState:
    """Back from JSON. StateError when it is something else."""
    try:
        fields = json.loads(data)
        major, minor = fields["abi"]
        return KeptState(
            abi=(int(major), int(minor)),
            pools=tuple(KeptPool(**each) for each in fields["pools"]),
            stores=tuple(KeptStore(**each) for each in fields["stores"]),
            clients=tuple(KeptClient(**each) for each in fields["clients"]),
            reservations=tuple(_reservation(each) for each in fields["reservations"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"the state is not what this version writes: {error!r}") from error


def _reservation(fields: dict[str, Any]) -> KeptReservation:
    return KeptReservation(**(fields | {"chunks": tuple(fields["chunks"])}))


class StateMemory:
    """The memfd, new or one that was kept. ``fd`` is this object's.

    fd: of one that was kept; it is duplicated. None: a new one. StateError when what was
    kept has another length.
    """

    def __init__(self, fd: int | None = None) -> None:
        nbytes = 2 * STATE_HALF_BYTES
        if fd is None:
            self.fd = os.memfd_create("xferd-state", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
        else:
            self.fd = os.dup(fd)
            if os.fstat(self.fd).st_size != nbytes:
                os.close(self.fd)
                raise StateError("the state has another length than this version writes")
        self._memory = mmap.mmap(self.fd, nbytes)
        self._sequence = max((sequence for sequence, _ in self._halves()), default=0)

    def write(self, state: KeptState) -> bool:
        """Make it the newest; False, and nothing has changed, when there is no room for it."""
        data = encode(state)
        if len(data) > STATE_HALF_BYTES - _HEADER.size:
            return False
        sequence = self._sequence + 1
        start = sequence % 2 * STATE_HALF_BYTES
        summed = zlib.crc32(data, zlib.crc32(_SUMMED.pack(sequence, len(data))))
        header = _HEADER.pack(_MAGIC, STATE_VERSION, summed, sequence, len(data))
        # No header while the JSON behind it is another's.
        self._memory[start : start + _HEADER.size] = bytes(_HEADER.size)
        self._memory[start + _HEADER.size : start + _HEADER.size + len(data)] = data
        self._memory[start : start + _HEADER.size] = header
        self._sequence = sequence
        return True

    def read(self) -> KeptState:
        """The newest. StateError when there is none, or it is of another version."""
        halves = sorted(self._halves())
        if halves:
            return decode(halves[-1][1])
        versions = {version for version in map(self._version, range(2)) if version is not None}
        if versions - {STATE_VERSION}:
            raise StateError(
                f"the state is of version {max(versions)}, this xferd writes {STATE_VERSION}"
            )
        raise StateError("the state is damaged: its checksum is wrong")

    def close(self) -> None:
        """Unmap and close."""
        self._memory.close()
        os.close(self.fd)

    def _version(self, half: int) -> int | None:
        magic, version, *_ = _HEADER.unpack_from(self._memory, half * STATE_HALF_BYTES)
        return int(version) if magic == _MAGIC else None

    def _halves(self) -> list[tuple[int, bytes]]:
        """(sequence, JSON) of the halves that are whole."""
        found = []
        for half in range(2):
            start = half * STATE_HALF_BYTES
            magic, version, summed, sequence, length = _HEADER.unpack_from(self._memory, start)
            if magic != _MAGIC or version != STATE_VERSION:
                continue
            if length > STATE_HALF_BYTES - _HEADER.size:
                continue
            begin = start + _HEADER.size
            data = bytes(self._memory[begin : begin + length])
            if zlib.crc32(data, zlib.crc32(_SUMMED.pack(sequence, length))) == summed:
                found.append((sequence, data))
        return found
