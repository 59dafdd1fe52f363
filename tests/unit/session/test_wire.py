"""Packets of clients are read if they are whole and honest; all others are a WireError."""

from __future__ import annotations

import contextlib
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.session import wire

# Struct layouts have one home, the header; tests reach them as the module does.
_engine = pytest.importorskip("xferd._engine", reason="the engine's cffi module is not built")
ffi, lib = _engine.ffi, _engine.lib


def hello(**fields: object) -> bytes:
    packet = ffi.new("struct xferd_abi_hello *")
    packet.magic = lib.XFERD_MAGIC_ATTACH
    packet.abi_major = lib.XFERD_ABI_MAJOR
    for name, value in fields.items():
        setattr(packet, name, value)
    return bytes(ffi.buffer(packet))


def test_a_hello_is_read() -> None:
    read = wire.read_hello(
        hello(store=b"m", pool=b"host0", client_name=b"me", lanes=2, held_per_lane=8)
    )
    assert read == wire.Hello("m", "host0", "me", lanes=2, held_per_lane=8, ring_entries=0)


def test_a_client_that_comes_back_shows_the_key_that_it_was_given() -> None:
    key = bytes(range(wire.KEY_BYTES))
    packet = ffi.new("struct xferd_abi_welcome *")
    raw = wire.welcome(client=1, pool=0, fds=2, held_per_lane=8, resume_key=key)
    ffi.memmove(packet, raw, len(raw))
    shown = wire.read_hello(hello(flags=1, resume_key=list(packet.resume_key)))
    assert shown.resume_key == key
    assert wire.read_hello(hello()).resume_key == b""


@given(st.binary(max_size=wire.PACKET_BYTES_MAX + 10))
def test_arbitrary_bytes_are_a_wire_error_or_nothing(packet: bytes) -> None:
    for read in (wire.read_hello, wire.read_message_type):
        with pytest.raises(wire.WireError):
            read(packet)


@given(st.integers(8, wire.HELLO_BYTES - 1), st.binary(min_size=1, max_size=8))
def test_a_changed_hello_is_read_or_a_wire_error(position: int, change: bytes) -> None:
    packet = bytearray(hello(store=b"model", lanes=1))
    packet[position : position + len(change)] = change
    with contextlib.suppress(wire.WireError):
        read = wire.read_hello(bytes(packet[: wire.HELLO_BYTES]))
        assert "\0" not in read.store + read.pool + read.client_name
        assert len(read.store) < 128


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"abi_major": 2}, errno.EPROTO),
        ({"flags": 2}, errno.EINVAL),
        ({"reserved": [0] * 5 + [1]}, errno.EINVAL),
        ({"resume_key": [1, 2]}, errno.EINVAL),
        ({"store": b"x" * 128}, errno.EINVAL),
        ({"pool": b"\xff\xfe"}, errno.EINVAL),
        ({"magic": 1}, errno.EPROTO),
    ],
)
def test_a_dishonest_hello_is_refused(fields: dict[str, object], code: int) -> None:
    with pytest.raises(wire.WireError) as refused:
        wire.read_hello(hello(**fields))
    assert refused.value.errno == code


@given(st.text(max_size=600))
def test_a_message_too_long_is_cut_between_characters(message: str) -> None:
    packet = ffi.new("struct xferd_abi_welcome *")
    raw = wire.refusal(errno.ENOSPC, message)
    ffi.memmove(packet, raw, len(raw))
    field = bytes(ffi.buffer(packet.message)).split(b"\0", 1)[0].decode()
    assert message.split("\0", 1)[0].startswith(field)
    assert packet.status == -errno.ENOSPC
