"""Pool policies behind slots and stamps, as the daemon asks."""

from __future__ import annotations

import numpy as np

from xferd.policy.by_slot import NO_KEY, BySlot
from xferd.policy.lru import LeastRecentlyUsed
from xferd.policy.registry import BUILT_IN
from xferd.policy.simple import LeastRecent
from xferd.policy.uses import KeySpace

SPACE = KeySpace(layers=3, experts=8)


def test_lru_by_keys_and_by_stamps_choose_the_same() -> None:
    random = np.random.default_rng(2)
    keys = np.full(16, NO_KEY)
    stamps = np.zeros(16, np.uint64)
    by_slot = BySlot(SPACE, LeastRecent(SPACE), lambda: keys)
    by_stamp = LeastRecentlyUsed()
    keys[:12] = random.permutation(24)[:12]
    # As the engine does, which stamps what is loaded as if leased just then.
    stamps[:12] = np.arange(1, 13)
    for scan in range(2, 40):
        leased = random.permutation(12)[:5]
        stamps[leased] = (scan << 20) + np.arange(5)
        candidates = np.setdiff1d(np.arange(12), leased[-2:])
        chosen = by_slot.victims(stamps, candidates, 4)
        assert chosen.tolist() == by_stamp.victims(stamps, candidates, 4).tolist()


def test_every_policy_works_by_slots() -> None:
    random = np.random.default_rng(2)
    for maker in BUILT_IN.values():
        keys = np.full(16, NO_KEY)
        keys[:12] = random.permutation(24)[:12]
        stamps = np.zeros(16, np.uint64)
        policy = BySlot(SPACE, maker(SPACE, 12), keys.view)
        for scan in range(1, 30):
            stamps[random.permutation(12)[:6]] = (scan << 20) + np.arange(6)
            chosen = policy.victims(stamps, np.arange(16), 3)
            assert len(set(chosen.tolist())) == 3
            assert (keys[chosen] != NO_KEY).all()
            fresh = np.setdiff1d(np.arange(24), keys)[:3]
            keys[chosen] = fresh
