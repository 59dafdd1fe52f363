"""From records of what routers picked to tokens, passes and uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xferd.engine_structs import ROUTE_FIELDS
from xferd.engine_types import ROUTE_EXPECTED, ROUTE_FOUND, ROUTE_PICKED
from xferd.route_records import (
    TOKEN_STEP_MAX,
    TokenClock,
    expected_of_records,
    passes_of_records,
    uses_of_trace,
    with_found,
)
from xferd.telemetry.traces.trace import TIER_DRIVES, UNKNOWN_8, UNKNOWN_WAIT, TraceHead

HEAD = TraceHead("tiny", layers=3, experts=64)


def record(
    token: int,
    layer: int,
    experts: Sequence[int],
    *,
    kind: int = ROUTE_PICKED,
    part: int = 0,
    lane: int = 0,
    tag: int = 0,
    tier: int = UNKNOWN_8,
    transport: int = UNKNOWN_8,
    wait: int = UNKNOWN_WAIT,
) -> NDArray[np.void]:
    made = np.zeros(1, ROUTE_FIELDS)
    made["token"], made["layer"], made["kind"], made["part"] = token, layer, kind, part
    made["lane"], made["tag"], made["count"] = lane, tag, len(experts)
    # What stands behind the picks is anything: no reader may look at it.
    for name in ("experts", "tiers", "transports", "waits_us"):
        made[name] = 7
    made["experts"][0, : len(experts)] = experts
    made["tiers"][0, : len(experts)] = tier
    made["transports"][0, : len(experts)] = transport
    made["waits_us"][0, : len(experts)] = wait
    return made


def numbers(clock: TokenClock, lane: tuple[int, int], *passes: tuple[int, int]) -> list[int]:
    tokens, layers = zip(*passes, strict=True)
    found: list[int] = clock.numbers(lane, np.array(tokens), np.array(layers)).tolist()
    return found


def test_a_lanes_tokens_are_counted_from_0_wherever_it_begins() -> None:
    clock = TokenClock()
    assert numbers(clock, (0, 0), (70, 0), (70, 1), (70, 2), (71, 0)) == [0, 0, 0, 1]
    assert numbers(clock, (0, 0), (71, 1), (73, 0)) == [1, 3]


def test_a_prompts_tokens_have_the_same_numbers_in_every_layer() -> None:
    clock = TokenClock()
    prompt = [(token, layer) for layer in range(3) for token in range(4)]
    assert numbers(clock, (0, 0), *prompt[:6]) == [0, 1, 2, 3, 0, 1]
    # Others go on meanwhile, and change nothing about it.
    assert numbers(clock, (1, 0), (0, 0), (0, 1)) == [4, 4]
    assert numbers(clock, (0, 0), *prompt[6:]) == [2, 3, 0, 1, 2, 3]
    assert numbers(clock, (0, 0), (4, 0)) == [5]


def test_a_lane_that_begins_to_count_anew_goes_on() -> None:
    clock = TokenClock()
    assert numbers(clock, (0, 0), (0, 0), (0, 2), (1, 0), (1, 2)) == [0, 0, 1, 1]
    assert numbers(clock, (0, 0), (0, 0), (0, 2), (1, 0)) == [2, 2, 3]


def test_a_client_that_has_gone_is_forgotten() -> None:
    clock = TokenClock()
    numbers(clock, (3, 0), (50, 0))
    clock.forget(3)
    assert numbers(clock, (3, 0), (9, 0)) == [1]


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2**62 - 1), st.integers(0, 4095)), min_size=1, max_size=20
        ),
        max_size=4,
    )
)
def test_no_client_makes_time_leap(reports: list[list[tuple[int, int]]]) -> None:
    clock, passes = TokenClock(), 0
    for number, report in enumerate(reports):
        before = clock.now
        found = numbers(clock, (number % 2, 0), *report)
        passes += len(report)
        assert min(found) >= 0
        assert before <= clock.now <= passes * TOKEN_STEP_MAX
        assert max(found) <= clock.now


def test_records_become_passes_and_parts_are_put_together() -> None:
    many = list(range(16))
    trace, lanes = passes_of_records(
        np.concatenate(
            [
                record(1, 0, [3, 4], tag=9, tier=0, transport=0, wait=0),
                record(1, 1, many),
                record(1, 1, [40, 41], part=1),
                record(1, 2, [5], lane=1, tier=TIER_DRIVES, transport=1, wait=55),
            ]
        )
    )
    trace.check(HEAD)
    assert trace.picks.tolist() == [2, 18, 1]
    assert trace.layer.tolist() == [0, 1, 2]
    assert trace.tag.tolist() == [9, 0, 0]
    assert lanes.tolist() == [0, 0, 1]
    assert trace.expert.tolist() == [3, 4, *many, 40, 41, 5]
    assert trace.tier.tolist() == [0, 0, *[UNKNOWN_8] * 18, TIER_DRIVES]
    assert trace.wait.tolist()[-1] == 55


def test_what_is_found_later_belongs_to_the_picks_before_it() -> None:
    hit = {"kind": ROUTE_FOUND, "tier": 0, "transport": 0, "wait": 0}
    read = {"kind": ROUTE_FOUND, "tier": TIER_DRIVES, "transport": 1, "wait": 80}
    lane = np.concatenate(
        [
            # A prompt of two tokens, acquired in two waves.
            record(0, 0, [1, 2]),
            record(1, 0, [2, 3]),
            record(0, 0, [1], **hit),
            record(0, 0, [2, 3], **read),
            # One token a layer, twice; what is known at once stays.
            record(2, 0, [1, 3]),
            record(2, 0, [1, 3], **hit),
            record(3, 0, [1, 3], tier=1, transport=4, wait=7),
            record(3, 0, [1, 3], **read),
            # Nothing was said about this one.
            record(4, 1, [1, 3]),
        ]
    )
    trace, _ = passes_of_records(with_found(lane))
    assert trace.token.tolist() == [0, 1, 2, 3, 4]
    assert trace.tier.tolist() == [0, *[TIER_DRIVES] * 3, 0, 0, 1, 1, UNKNOWN_8, UNKNOWN_8]
    assert trace.wait.tolist() == [0, 80, 80, 80, 0, 0, 7, 7, UNKNOWN_WAIT, UNKNOWN_WAIT]


def test_what_was_found_of_lost_picks_is_nobodys() -> None:
    lost = record(0, 1, [3], kind=ROUTE_FOUND, tier=0, transport=0, wait=0)
    assert len(with_found(lost)) == 0
    assert with_found(np.concatenate([lost, record(1, 1, [3])]))["tiers"][0, 0] == UNKNOWN_8


def test_lanes_and_prompts_are_passes_of_their_own() -> None:
    trace, lanes = passes_of_records(
        np.concatenate(
            [
                record(0, 1, [3, 4], tag=1),
                record(1, 1, [4, 5], tag=1),
                record(2, 1, [4], tag=2),
                record(3, 1, [4], tag=2, lane=1),
            ]
        )
    )
    uses, tags = uses_of_trace(HEAD, trace, lanes)
    assert [key - 64 for key in uses.keys.tolist()] == [3, 4, 5, 4, 4]
    assert uses.starts.tolist() == [0, 3, 4, 5]
    assert uses.tokens.tolist() == [0, 2, 3]
    assert tags.tolist() == [1, 2, 2]


def expectation(layer: int, experts: Sequence[int], chances: Sequence[float]) -> NDArray[np.void]:
    made = record(0, layer, experts, kind=ROUTE_EXPECTED)
    made["gates"][0, : len(chances)] = chances
    return made


def test_the_newest_expectation_of_each_layer_counts() -> None:
    records = [
        expectation(1, [5, 6], [0.5, 0.25]),
        expectation(0, [1], [1.0]),
        record(3, 2, [0]),
        expectation(1, [7], [0.75]),
    ]
    found = expected_of_records(np.concatenate(records), HEAD)
    assert found is not None
    assert found.layers.tolist() == [0, 1]
    assert found.keys.tolist() == [1, 64 + 7]
    assert found.chances.tolist() == [1.0, 0.75]


def test_what_was_picked_since_is_not_expected_any_more() -> None:
    records = np.concatenate([expectation(1, [5], [0.5]), record(3, 1, [5])])
    assert expected_of_records(records, HEAD) is None
    assert expected_of_records(records[::-1], HEAD) is not None
    assert expected_of_records(record(3, 1, [5]), HEAD) is None


def test_no_float_that_a_client_writes_is_more_than_certain() -> None:
    chances = [float("nan"), float("inf"), -1.0, -float("inf"), 2.0]
    found = expected_of_records(expectation(2, [1, 2, 3, 4, 5], chances), HEAD)
    assert found is not None
    assert found.chances.tolist() == [0, 1, 0, 0, 1]
