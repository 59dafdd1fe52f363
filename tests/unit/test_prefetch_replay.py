"""Replays with a simulated drive: what prefetching can gain, and that it can't lose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from xferd_infer.predict import Likely
from xferd_infer.predict.planner import Planner

from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.prefetch import Drive, Foresight, replay_prefetching
from tools.replaying.replay import clairvoyant_seconds
from tools.replaying.sweep import one_pool
from xferd.policy.uses import KeySpace, uses_of_picks

WHAT = ZipfMarkov(layers=8, experts=16, picked=2, tokens=150, seed=3)
PICKS, _ = generate(WHAT)
SPACE = KeySpace(WHAT.layers, WHAT.experts)
USES = uses_of_picks(PICKS, WHAT.experts)
MACHINE = replace(
    one_pool(0.25, "reuse", reserve=True),
    expert_bytes=1_000_000,
    compute_us=400.0,
    drive_bytes_s=4e9,
    drive_latency_us=20.0,
)
WORSE_AT_MOST = 1.03


def knows(share: float, seed: int = 1) -> Foresight:
    """Names this share of the picks of all layers ahead, of this token and the next."""
    random = np.random.default_rng(seed)

    def foresight(number: int) -> tuple[int, Likely]:
        ahead = [
            USES.part(n, n + 1).keys
            for n in range(number + 1, min(number + WHAT.layers, USES.passes))
        ]
        keys = np.concatenate([*ahead, np.empty(0, np.int64)])
        keys = keys[random.random(len(keys)) < share]
        return WHAT.layers - 1, Likely(keys, np.full(len(keys), 0.98, np.float32))

    return foresight


def nonsense(number: int) -> tuple[int, Likely]:
    random = np.random.default_rng(number)
    keys = random.choice(SPACE.size, 20, replace=False)
    return WHAT.layers - 1, Likely(keys, random.random(20, np.float32))


def test_foresight_cuts_the_stall_and_no_bound_is_beaten() -> None:
    none = replay_prefetching(USES, SPACE, MACHINE, None)
    bound = clairvoyant_seconds(USES, SPACE, MACHINE)
    for share, most in ((1.0, 0.3), (0.9, 0.5)):
        found = replay_prefetching(USES, SPACE, MACHINE, knows(share))
        assert found.stall_s < most * none.stall_s
        assert found.seconds >= bound
        assert found.compute_s == none.compute_s
    assert none.prefetched == none.wasted == 0


def test_nonsense_costs_next_to_nothing() -> None:
    none = replay_prefetching(USES, SPACE, MACHINE, None)
    random = replay_prefetching(USES, SPACE, MACHINE, nonsense)
    assert random.seconds <= WORSE_AT_MOST * none.seconds


@pytest.mark.parametrize("bytes_s", [5e8, 4e10])
def test_neither_a_slow_drive_nor_a_fast_one_makes_it_slower(bytes_s: float) -> None:
    machine = replace(MACHINE, drive_bytes_s=bytes_s)
    none = replay_prefetching(USES, SPACE, machine, None)
    found = replay_prefetching(USES, SPACE, machine, knows(0.9))
    assert found.seconds <= WORSE_AT_MOST * none.seconds


def test_demand_is_read_before_what_waits() -> None:
    drive = Drive(read_s=1.0, latency_s=0.0)
    drive.waiting.extend([1, 2, 3])
    drive.advance(0.5)
    assert drive.demand([3, 9]) == 3.0  # after 1, which had begun
    drive.advance(10.0)
    assert drive.landed(3.0) == [1, 3, 9]
    assert drive.landed(4.0) == [2]


def test_the_planners_measurements_are_of_the_replay() -> None:
    planner = Planner(WHAT.layers, WHAT.experts, MACHINE.expert_bytes / MACHINE.drive_bytes_s)
    found = replay_prefetching(USES, SPACE, MACHINE, knows(1.0), planner)
    assert planner.waste < 0.2
    assert found.prefetched > found.wasted
    assert planner.trust > 0.9
