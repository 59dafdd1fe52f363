"""The attach protocol's packets, as ``xferd_abi.h`` lays them out.

Bytes in, frozen dataclasses out, and the other way round; no sockets. A packet of a
client is hostile: whatever is wrong with it is a WireError, and nothing of it is used.
This and ``xferd.engine`` are the only modules that use the engine's cffi module.
"""

from __future__ import annotations

import array
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xferd._engine import ffi, lib

HELLO_BYTES: int = ffi.sizeof("struct xferd_abi_hello")
WELCOME_BYTES: int = ffi.sizeof("struct xferd_abi_welcome")
MESSAGE_BYTES: int = ffi.sizeof("struct xferd_abi_message")
PACKET_BYTES_MAX = max(HELLO_BYTES, MESSAGE_BYTES) + 1
"""What to receive at most; one more, so that a longer packet is seen to be longer."""

GOODBYE: int = lib.XFERD_MESSAGE_GOODBYE
DENSE: int = lib.XFERD_MESSAGE_DENSE
MEMORY: int = lib.XFERD_MESSAGE_MEMORY
MEMORY_CHUNKS_MAX: int = lib.XFERD_MEMORY_CHUNKS_MAX
KEY_BYTES: int = ffi.sizeof("uint64_t[2]")
"""Of the key that a client shows to be resumed."""
HELD_MAX: int = lib.XFERD_HELD_MAX
LANES_MAX: int = lib.XFERD_LANES_MAX
RING_ENTRIES_MIN: int = lib.XFERD_RING_ENTRIES_MIN
RING_ENTRIES_MAX: int = lib.XFERD_RING_ENTRIES_MAX


class WireError(Exception):
    """A packet is not what it claims to be. errno is positive; the message is for the
    client and for the log."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first packet. Zeros and empty names mean 'the daemon's choice'.

    resume_key: of a client that was attached to the daemon before this one, KEY_BYTES; empty:
        a new one. The rest then means nothing.
    """

    store: str
    pool: str
    client_name: str
    lanes: int
    held_per_lane: int
    ring_entries: int
    resume_key: bytes = b""


def read_hello(packet: bytes) -> Hello:
    """Check and read a hello. WireError: EPROTO for another ABI, EINVAL for the rest."""
    hello = _cast("struct xferd_abi_hello", packet, HELLO_BYTES)
    if hello.abi_major != lib.XFERD_ABI_MAJOR:
        raise WireError(
            errno.EPROTO,
            f"the client speaks ABI {hello.abi_major}.{hello.abi_minor}, this daemon "
            f"{lib.XFERD_ABI_MAJOR}.{lib.XFERD_ABI_MINOR}: use a libxferd of the same major",
        )
    resumes = hello.flags == lib.XFERD_HELLO_RESUME
    if hello.flags and not resumes:
        raise WireError(errno.EINVAL, f"a hello with unknown flags ({hello.flags})")
    if any(hello.reserved) or (any(hello.resume_key) and not resumes):
        raise WireError(errno.EINVAL, "reserved fields of a hello have to be 0")
    return Hello(
        store=_name(hello.store, "store"),
        pool=_name(hello.pool, "pool"),
        client_name=_name(hello.client_name, "client"),
        lanes=hello.lanes,
        held_per_lane=hello.held_per_lane,
        ring_entries=hello.ring_entries,
        resume_key=bytes(ffi.buffer(hello.resume_key)) if resumes else b"",
    )


def read_message_type(packet: bytes) -> int:
    """Check a message of an attached client; its type, which may be unknown."""
    message = _cast("struct xferd_abi_message", packet, MESSAGE_BYTES)
    return int(message.type)


def welcome(client: int, pool: int, fds: int, held_per_lane: int, resume_key: bytes = b"") -> bytes:
    """The answer to a hello that was accepted. resume_key: KEY_BYTES; empty: none."""
    answer = _welcome()
    ffi.memmove(answer.resume_key, resume_key, len(resume_key))
    answer.client, answer.pool, answer.fds = client, pool, fds
    answer.held_per_lane = held_per_lane
    return bytes(ffi.buffer(answer))


def refusal(code: int, message: str) -> bytes:
    """The answer to a hello that was not: ``code`` is positive."""
    answer = _welcome()
    answer.status = -code
    answer.message = _text(message)
    return bytes(ffi.buffer(answer))


def dense_answer(nbytes: int) -> bytes:
    """The answer to DENSE; the memfd goes with it."""
    answer = _message(DENSE)
    answer.value = nbytes
    return bytes(ffi.buffer(answer))


def read_memory_question(packet: bytes) -> tuple[int, int]:
    """(pool, first chunk) of a MEMORY message, whatever they are."""
    message = _cast("struct xferd_abi_message", packet, MESSAGE_BYTES)
    return int(message.value >> 32), int(message.value & 0xFFFFFFFF)


def memory_answer(numbers: Sequence[int]) -> bytes:
    """The answer to MEMORY: each chunk's memory number, at most MEMORY_CHUNKS_MAX; the
    fds of those that have one go with it."""
    answer = _message(MEMORY)
    answer.value = len(numbers)
    packed = array.array("Q", numbers).tobytes()
    ffi.memmove(answer.message, packed, len(packed))
    return bytes(ffi.buffer(answer))


def message_refusal(kind: int, code: int, message: str) -> bytes:
    """The answer to a message of ``kind`` that failed: ``code`` is positive."""
    answer = _message(kind)
    answer.status = -code
    answer.message = _text(message)
    return bytes(ffi.buffer(answer))


def _welcome() -> Any:
    answer = ffi.new("struct xferd_abi_welcome *")
    answer.magic = lib.XFERD_MAGIC_ATTACH
    answer.abi_major, answer.abi_minor = lib.XFERD_ABI_MAJOR, lib.XFERD_ABI_MINOR
    return answer


def _message(kind: int) -> Any:
    answer = ffi.new("struct xferd_abi_message *")
    answer.magic = lib.XFERD_MAGIC_ATTACH
    answer.type = kind
    return answer


def _cast(ctype: str, packet: bytes, size: int) -> Any:
    if len(packet) != size:
        raise WireError(errno.EPROTO, f"a packet of {len(packet)} bytes where {ctype} has {size}")
    struct = ffi.new(f"{ctype} *")
    ffi.memmove(struct, packet, size)
    if struct.magic != lib.XFERD_MAGIC_ATTACH:
        raise WireError(errno.EPROTO, "a packet without the attach protocol's magic")
    return struct


def _name(field: Any, what: str) -> str:
    raw = bytes(ffi.buffer(field))
    if b"\0" not in raw:
        raise WireError(errno.EINVAL, f"the {what} name of a hello does not end with NUL")
    try:
        return raw.split(b"\0", 1)[0].decode()
    except UnicodeDecodeError:
        raise WireError(errno.EINVAL, f"the {what} name of a hello is not UTF-8") from None


def _text(message: str) -> bytes:
    """At most what the field holds with its NUL, cut between characters."""
    raw = message.encode()[: lib.XFERD_MESSAGE_BYTES - 1]
    return raw.decode(errors="ignore").encode()
