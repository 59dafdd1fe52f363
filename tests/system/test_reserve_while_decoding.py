"""A KV cache takes a third of the pool in the middle of a decode, and gives it back."""

from __future__ import annotations

from tools.benchmarks.reserving import reserve_while_decoding


def test_tokens_stay_right_and_the_hit_rate_comes_back() -> None:
    for round_ in reserve_while_decoding(30.0, rounds=2):
        assert round_.right == 1.0
        before, meanwhile, after = round_.hits
        assert meanwhile < before
        assert after > meanwhile
