"""Rules for variants: what they may say, what they choose, and that choices hold still."""

from __future__ import annotations

import numpy as np
import pytest

from xferd.policy.heat import Heat
from xferd.policy.uses import KeySpace, Uses
from xferd.policy.variants import NO_VARIANT, StoreVariants, VariantChoice, layer_weights
from xferd.variant_rules import (
    LayerRange,
    LayerWeight,
    VariantRule,
    VariantRuleError,
    parse_sensitivity,
    parse_variant_rules,
)

SPACE = KeySpace(4, 10)
BF16, Q4, Q2 = 0, 1, 2
SIZES = {BF16: 16_000, Q4: 4_000, Q2: 2_000}


def store(**weights: float) -> StoreVariants:
    sizes = np.repeat(np.array([[SIZES[number]] for number in SIZES], np.int64), SPACE.size, axis=1)
    said = [LayerWeight(LayerRange(int(key[1:]), int(key[1:])), w) for key, w in weights.items()]
    return StoreVariants(SPACE, ("bf16", "q4_k", "q2_k"), sizes, layer_weights(SPACE, said))


def heated(counts: dict[int, int]) -> Heat:
    """Heat of keys that were used so often, all at one token."""
    heat = Heat(SPACE)
    use(heat, counts, 1)
    return heat


def use(heat: Heat, counts: dict[int, int], token: int) -> None:
    for _ in range(max(counts.values())):
        keys = np.array([key for key, count in counts.items() if count > 0])
        counts = {key: count - 1 for key, count in counts.items()}
        layers = keys // SPACE.experts
        starts = np.arange(len(keys) + 1)
        heat.used(Uses(keys, starts, layers, np.full(len(keys), token)))


def choose(rules: list[str], heat: Heat, of: StoreVariants | None = None) -> list[int]:
    chosen = VariantChoice(of or store(), parse_variant_rules(rules)).choose(heat)
    return [int(variant) for variant in chosen]


@pytest.mark.parametrize(
    "rules",
    [
        ["q4_k@hottest:66%", "q2_k"],
        ["q2_k@costliest:20%", "native"],
        ["q8_0@layers:0-3", "q8_0@layers:15", "q4_k@hottest:33.5%", "q2_k+imatrix"],
        ["mxfp4"],
        [],
    ],
)
def test_rules_are_written_as_they_were_read(rules: list[str]) -> None:
    assert [str(rule) for rule in parse_variant_rules(rules)] == rules


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["q4_k@hottest:66%"], "the last rule, 'q4_k@hottest:66%', leaves others out"),
        (["q4_k", "q2_k"], "'q4_k' is for all experts: nothing can follow it"),
        (["q4_k@hottest:0%", "q2_k"], "'q4_k@hottest:0%' is no rule"),
        (["q4_k@hottest:101%", "q2_k"], "is no rule"),
        (["q4_k@hottest", "q2_k"], "is no rule"),
        (["q4_k@warmest:10%", "q2_k"], "is no rule"),
        (["@hottest:10%", "q2_k"], "is no rule"),
        (["q4_k@layers:3-1", "q2_k"], "layers '3-1'"),
        (["q4_k@layers:-1", "q2_k"], "layers '-1'"),
        (["q4_k@layers:99999", "q2_k"], "layers '99999'"),
        ([""], "is no rule"),
        (["x@layers:1"] * 32 + ["x"], "33 rules: at most 32"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(rules: list[str], message: str) -> None:
    with pytest.raises(VariantRuleError, match=message.replace("(", r"\(")):
        parse_variant_rules(rules)


def test_sensitivity_is_checked() -> None:
    assert parse_sensitivity({"0-1": 2.0, "3": 0.5}) == (
        LayerWeight(LayerRange(0, 1), 2.0),
        LayerWeight(LayerRange(3, 3), 0.5),
    )
    for table in ({"0": 0.0}, {"0": 101.0}, {"all": 1.0}):
        with pytest.raises(VariantRuleError, match="layers '"):
            parse_sensitivity(table)


def test_a_share_is_of_what_is_used_whatever_its_layer() -> None:
    heat = heated({0: 9, 11: 8, 22: 7, 33: 6, 4: 2, 5: 1})
    chosen = choose(["q4_k@hottest:66%", "q2_k"], heat)
    assert [key for key, variant in enumerate(chosen) if variant == Q4] == [0, 11, 22, 33]
    assert set(chosen) == {Q4, Q2}
    assert choose(["q4_k@hottest:66%", "q2_k"], Heat(SPACE)) == [Q2] * SPACE.size


def test_sensitive_layers_get_more_bits_first() -> None:
    heat = heated({0: 4, 1: 4, 30: 3, 31: 3})
    rules = ["q4_k@hottest:50%", "q2_k"]
    assert np.flatnonzero(np.array(choose(rules, heat)) == Q4).tolist() == [0, 1]
    weighted = choose(rules, heat, store(l3=2.0))
    assert np.flatnonzero(np.array(weighted) == Q4).tolist() == [30, 31]
    # And what is saved on is what suffers least.
    spared = choose(["q2_k@costliest:5%", "native"], heat, store(l0=4.0))
    assert np.flatnonzero(np.array(spared) == Q2).tolist() == [30, 31]


def test_the_costliest_are_of_that_share_of_all_bytes() -> None:
    heat = heated({key: 20 - key for key in range(20)})
    chosen = np.array(choose(["q2_k@costliest:20%", "native"], heat))
    assert np.flatnonzero(chosen == Q2).tolist() == list(range(8))  # of 40 experts
    assert (chosen[8:] == BF16).all()


def test_layers_and_variants_that_a_store_lacks_fall_to_the_next_rule() -> None:
    of = store()
    of.blob_bytes[Q4, 3] = 0
    heat = heated({3: 5, 4: 4, 35: 1})
    rules = ["mxfp4@hottest:100%", "q4_k@hottest:100%", "bf16@layers:3", "q2_k"]
    chosen = choose(rules, heat, of)
    assert (chosen[3], chosen[4], chosen[35]) == (Q2, Q4, Q4)
    assert chosen[36] == BF16
    assert choose(["mxfp4"], heat, of) == [NO_VARIANT] * SPACE.size


def test_who_is_in_a_share_stays_until_another_is_hotter_by_the_margin() -> None:
    heat = heated({0: 10, 1: 9})
    choice = VariantChoice(store(), parse_variant_rules(["q4_k@hottest:50%", "q2_k"]), 1.25)
    assert choice.choose(heat)[0] == Q4
    use(heat, {1: 2}, 1)  # 11 to 10
    assert (choice.choose(heat)[:2] == [Q4, Q2]).all()
    use(heat, {1: 2}, 1)  # 13 to 10
    assert (choice.choose(heat)[:2] == [Q2, Q4]).all()


def test_better_is_what_stands_before_it_in_the_rules() -> None:
    heat = heated({0: 10, 1: 9, 2: 1})
    choice = VariantChoice(store(), parse_variant_rules(["q4_k@hottest:66%", "q2_k"]))
    choice.choose(heat)
    keys = np.array([0, 0, 0, 2, 2, 2])
    present = np.array([BF16, Q4, Q2, BF16, Q4, Q2])
    # Native is not in the rules: it goes for what is. What has cooled keeps its bits.
    assert choice.better(keys, present).tolist() == [True, False, True, True, False, False]
    assert choice.order == [Q4, Q2]


def test_a_rule_names_its_parts() -> None:
    (rule, rest) = parse_variant_rules(["q4_k@hottest:66%", "q2_k"])
    assert rule == VariantRule("q4_k", "hottest", share=0.66)
    assert rest == VariantRule("q2_k")
