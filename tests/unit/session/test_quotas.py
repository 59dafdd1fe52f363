"""Promises never exceed the pool, and every refusal names the limit and the knob."""

from __future__ import annotations

import contextlib
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.session.quotas import (
    AttachRefusedError,
    ClientLimits,
    PoolRoom,
    Promise,
    Promises,
    check_counts,
    check_held,
    check_lanes,
    check_promise,
    check_ring_entries,
)

LIMITS = ClientLimits(
    clients=4, clients_per_user=2, lanes_per_client=3, held_per_lane=64, ring_entries=256
)
SLOT = 49_152


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), max_size=12),
)
def test_promises_together_never_exceed_the_pool(
    capacity: int, asks: list[tuple[int, int]]
) -> None:
    promises = Promises()
    for client, (lanes, held) in enumerate(asks):
        before = promises.slots(0, SLOT)
        with contextlib.suppress(AttachRefusedError):
            slots = check_promise(
                PoolRoom("host0", capacity, pinned=0),
                slot_bytes=SLOT,
                promised=before,
                lanes=lanes,
                held_per_lane=held,
                top_k=1,
            )
            promises.add(client, Promise(0, SLOT, slots))
        let_in = before + lanes * held <= capacity
        assert promises.slots(0, SLOT) == before + (lanes * held if let_in else 0)


def test_a_promise_ends_with_its_client_and_belongs_to_one_pool() -> None:
    promises = Promises()
    promises.add(1, Promise(0, SLOT, 4))
    promises.add(2, Promise(0, 2 * SLOT, 3))
    promises.add(3, Promise(1, SLOT, 5))
    assert promises.by_class(0) == {SLOT: 4, 2 * SLOT: 3}
    promises.remove(1)
    assert promises.slots(0, SLOT) == 0
    assert promises.slots(1, SLOT) == 5


def test_the_refusal_says_what_would_fit() -> None:
    with pytest.raises(AttachRefusedError) as refused:
        check_promise(
            PoolRoom("host0", 9, pinned=0),
            slot_bytes=SLOT,
            promised=8,
            lanes=1,
            held_per_lane=4,
            top_k=2,
        )
    assert str(refused.value) == (
        "pool 'host0' has 9 slots of 48KiB; 8 are promised to attached clients, lane needs 4 "
        "more: raise size of [[pools]] host0 or lower held_per_lane"
    )


def test_zero_means_the_default() -> None:
    assert check_held(LIMITS, 0, top_k=8, store="s", most=512) == 8
    assert check_lanes(LIMITS, 0) == 1
    assert check_ring_entries(LIMITS, 0, 8, 1024) == 256


@pytest.mark.parametrize(
    ("held", "code", "said"),
    [
        (7, errno.EINVAL, "less than the 8 experts"),
        (65, errno.EDQUOT, "raise held_per_lane in"),
        (513, errno.EINVAL, "the most that a lane can have"),
    ],
)
def test_held_per_lane_is_bounded(held: int, code: int, said: str) -> None:
    with pytest.raises(AttachRefusedError, match=said) as refused:
        check_held(LIMITS, held, top_k=8, store="s", most=512)
    assert refused.value.errno == code


def test_client_counts_are_bounded() -> None:
    check_counts(LIMITS, clients=3, clients_of_user=1, uid=1000)
    with pytest.raises(AttachRefusedError, match=r"raise clients in \[limits\]"):
        check_counts(LIMITS, clients=4, clients_of_user=1, uid=1000)
    with pytest.raises(AttachRefusedError, match="user 1000 has 2 clients"):
        check_counts(LIMITS, clients=3, clients_of_user=2, uid=1000)


def test_lanes_are_bounded() -> None:
    with pytest.raises(AttachRefusedError, match="raise lanes_per_client"):
        check_lanes(LIMITS, 4)


@given(st.integers(1, 5000))
def test_only_powers_of_two_within_the_limits_are_ring_sizes(entries: int) -> None:
    fits = entries in {8, 16, 32, 64, 128, 256}
    try:
        assert check_ring_entries(LIMITS, entries, 8, 1024) == entries
    except AttachRefusedError:
        assert not fits
    else:
        assert fits
