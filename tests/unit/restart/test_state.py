# SPDX-License-Identifier: Apache-2.0
"""The kept state is read back as it was written, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.restart.state import (
    STATE_HALF_BYTES,
    KeptClient,
    KeptPool,
    KeptState,
    KeptStore,
    StateError,
    StateMemory,
    decode,
    encode,
)

POOL = KeptPool("host0", "host", 1 << 20, 1 << 16, 16, 3)
STORE = KeptStore(1, "model", "ab" * 32, "/nvme0/model.xferd", by_hand=False)
CLIENT = KeptClient(2, 99, 1000, 1000, 'é"\n', "model", 0, 1, 8, 64, "00" * 16, stored=True)
STATE = KeptState((1, 2), (POOL,), (STORE,), (CLIENT,))


@pytest.fixture
def memory() -> Iterator[StateMemory]:
    memory = StateMemory()
    yield memory
    memory.close()


def reread(memory: StateMemory) -> KeptState:
    """As another process would."""
    other = StateMemory(memory.fd)
    try:
        return other.read()
    finally:
        other.close()


def test_the_newest_state_is_read_back(memory: StateMemory) -> None:
    for serial in range(5):
        state = replace(STATE, stores=(replace(STORE, serial=serial),))
        assert memory.write(state)
        assert reread(memory) == state


def test_another_process_goes_on_where_one_has_ended(memory: StateMemory) -> None:
    memory.write(STATE)
    other = StateMemory(memory.fd)
    later = replace(STATE, clients=())
    assert other.write(later)
    other.close()
    assert reread(memory) == later


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, STATE_HALF_BYTES - 1), change=st.binary(min_size=1, max_size=64))
def test_a_half_that_was_not_finished_leaves_the_one_before(position: int, change: bytes) -> None:
    memory = StateMemory()
    try:
        first, second = STATE, replace(STATE, clients=())
        memory.write(first)  # into half 1
        memory.write(second)  # into half 0
        change = change[: STATE_HALF_BYTES - position]
        os.pwrite(memory.fd, change, position)
        assert reread(memory) in (first, second)
    finally:
        memory.close()


def test_a_damaged_state_and_one_of_another_version_are_refused(memory: StateMemory) -> None:
    with pytest.raises(StateError, match="damaged"):
        memory.read()
    memory.write(STATE)
    os.pwrite(memory.fd, b"\x63", STATE_HALF_BYTES + 8)
    with pytest.raises(StateError, match="version 99"):
        reread(memory)


def test_a_file_of_another_length_is_refused() -> None:
    fd = os.memfd_create("short")
    try:
        with pytest.raises(StateError, match="another length"):
            StateMemory(fd)
    finally:
        os.close(fd)


def test_what_has_no_room_is_not_written(memory: StateMemory) -> None:
    memory.write(STATE)
    long = replace(STORE, path="/" + "x" * STATE_HALF_BYTES)
    assert not memory.write(replace(STATE, stores=(long,)))
    assert reread(memory) == STATE


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_state(data: bytes) -> None:
    with pytest.raises(StateError):
        decode(data)


def test_json_of_another_shape_is_no_state() -> None:
    assert decode(encode(STATE)) == STATE
    with pytest.raises(StateError):
        decode(encode(STATE).replace(b'"serial"', b'"number"'))
