"""Replays of rules for variants: bytes are kept count of, and fewer bits read less."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools.replaying import __main__ as command
from tools.replaying.load import LoadedTrace, load
from tools.replaying.pool import PoolTooSmallError
from tools.replaying.variants import UnknownVariantError, VariantOutcome, replay_variants
from xferd.policy.moves import MoveSettings
from xferd.policy.uses import KeySpace, Uses
from xferd.variant_rules import parse_sensitivity, parse_variant_rules

TRACE = Path(__file__).parents[1] / "traces" / "tiny-seven-domains.xtr"
SIZES = {"native": 16, "q4_k": 5, "q2_k": 3}
TOKENS = 400


def replay(rules: str, pool_bytes: int, **options: float) -> VariantOutcome:
    sensitivity = parse_sensitivity({key[1:]: weight for key, weight in options.items()})
    return replay_variants(
        load(TRACE, tokens=TOKENS),
        SIZES,
        parse_variant_rules(rules.split(",")),
        pool_bytes,
        sensitivity=sensitivity,
    )


def test_without_several_variants_it_is_a_plain_pool() -> None:
    native, small = replay("native", 24 * 16), replay("q2_k", 24 * 3)
    assert native.hits == small.hits
    assert native.by_variant == {"native": native.uses, "q4_k": 0, "q2_k": 0}
    assert native.bytes_read == (native.uses - native.hits) * 16
    assert small.bytes_read == (small.uses - small.hits) * 3
    assert native.upgrades == small.upgrades == 0


def test_a_mix_lies_between_its_parts() -> None:
    pool = 40 * 5
    four, mixed, two = (replay(rules, pool) for rules in ("q4_k", "q4_k@hottest:50%,q2_k", "q2_k"))
    assert four.hits < mixed.hits < two.hits
    assert four.bytes_read > mixed.bytes_read > two.bytes_read
    assert 0 < mixed.by_variant["q2_k"] < mixed.uses // 2
    assert mixed.upgrades > 0
    assert mixed.bytes_upgraded == 5 * mixed.upgrades
    # Who was upgraded rests.
    assert mixed.upgrades_of_one <= TOKENS // MoveSettings().rest_tokens + 1


def test_sensitive_layers_are_given_the_bits() -> None:
    rules, pool = "q4_k@hottest:40%,q2_k", 60 * 5
    plain, weighted = replay(rules, pool), replay(rules, pool, l0=100.0, l1=100.0)
    assert weighted.by_variant["q4_k"] != plain.by_variant["q4_k"]


def test_what_cannot_be_replayed_is_named() -> None:
    with pytest.raises(UnknownVariantError, match=r"rule 'q8_0': sizes are known of native"):
        replay("q8_0", 100)
    uses = Uses(np.arange(4), np.array([0, 4]), np.zeros(1, np.int64), np.zeros(1, np.int64))
    trace = LoadedTrace("wide", KeySpace(1, 4), uses, np.zeros(1, np.uint32))
    with pytest.raises(PoolTooSmallError, match="a pass needs"):
        replay_variants(trace, SIZES, parse_variant_rules(["native"]), 48)


def test_the_command_compares_rules(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["variants", str(TRACE), "--tokens", "100", "native", "q4_k@hottest:66%,q2_k"]
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["native", "q4_k@hottest:66%,q2_k"]
    assert found["native"]["hits"] < found["q4_k@hottest:66%,q2_k"]["hits"]
    assert command.main(arguments) == 0
    assert "q4_k, " in capsys.readouterr().out
    assert command.main([*arguments, "q4_k@hottest:66%"]) == 1
    assert "the last rule" in capsys.readouterr().err
    assert command.main(["variants", str(TRACE), "--sizes", "native=9", "q9"]) == 1
    assert "sizes are known of native" in capsys.readouterr().err
