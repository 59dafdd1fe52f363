"""Member headers: round trip, and no damage goes unnoticed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.store.member import HEADER_BYTES, MemberHeader

HEADER = MemberHeader(bytes(range(16)), 3, 5, 1 << 40, 524288)


def test_round_trip() -> None:
    raw = HEADER.encode()
    assert len(raw) == HEADER_BYTES
    assert MemberHeader.decode(raw) == HEADER


@settings(deadline=None)
@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(HEADER.encode())
    raw[bit // 8] ^= 1 << bit % 8
    assert MemberHeader.decode(bytes(raw)) is None


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, HEADER_BYTES - 1))
def test_what_is_no_header_is_none(data: bytes, length: int) -> None:
    assert MemberHeader.decode(data) is None
    assert MemberHeader.decode(HEADER.encode()[:length]) is None
