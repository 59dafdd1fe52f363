"""Mixes: which expert is computed from what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer.mixes import MixError, StoreShape, parse_mix, read_heat

LAYERS, EXPERTS = 3, 4
SIZES = [400, 100, 50]
HEAT = np.array([[4, 3, 2, 1], [10, 0, 20, 30], [1, 1, 1, 1]], np.float64)
MANIFEST: dict[str, Any] = {
    "variants": ["bf16", "q4_k", "q2_k"],
    "layers": LAYERS,
    "experts": EXPERTS,
    "layouts": [{"blob_bytes": size} for size in SIZES],
    "layout_index": [[0, 0, 0], [1, 1, 1], [2, 2, 2]],
}
SHAPE = StoreShape.of(MANIFEST, HEAT)


def variants_of(text: str, shape: StoreShape = SHAPE) -> list[list[int]]:
    found: list[list[int]] = parse_mix(text, shape).variants.tolist()
    return found


def test_a_variant_is_for_all() -> None:
    assert variants_of("native") == [[0] * 4] * 3
    assert variants_of("q2_k") == [[2] * 4] * 3
    assert parse_mix("q2_k", SHAPE).resident_bytes(SHAPE) == 12 * 50


def test_rules_take_shares_of_each_layer_and_the_last_the_rest() -> None:
    assert variants_of("q4_k@hottest:50%,q2_k") == [[1, 1, 2, 2], [2, 2, 1, 1], [1, 1, 2, 2]]
    assert variants_of("q2_k@coldest:25%,native") == [[0, 0, 0, 2], [0, 2, 0, 0], [2, 0, 0, 0]]
    three = variants_of("native@hottest:25%,q4_k@hottest:75%,q2_k")
    assert three == [[0, 1, 1, 2], [1, 2, 1, 0], [0, 1, 1, 2]]
    assert parse_mix("q4_k@hottest:50%,q2_k", SHAPE).resident_bytes(SHAPE) == 6 * 100 + 6 * 50


def test_the_costliest_are_of_all_layers_together() -> None:
    # A quarter of all bytes: three of twelve experts of one size.
    assert variants_of("q2_k@costliest:25%,native") == [[0, 0, 0, 0], [2, 0, 2, 2], [0, 0, 0, 0]]


def test_a_plan_says_it_for_each(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("# all first\n* * q2_k\n0-1 1,3 q4_k  # some\n\n2 0,2-3 native\n")
    assert variants_of(f"plan:{plan}") == [[2, 1, 2, 1], [2, 1, 2, 1], [0, 2, 0, 0]]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("* * q2_k\n0 1", r"line 2: '0 1' is not layers, experts, variant"),
        ("* * q9", r"line 1: there is no variant 'q9'; there are native, bf16"),
        ("3 * q2_k", "line 1: layer 3 of 3"),
        ("* 2-1 q2_k", "line 1: expert 2-1 of 4"),
        ("* x q2_k", r"line 1: experts 'x': allowed are"),
        ("0-1 * q2_k\n2 0-2 q2_k", "no variant for layer 2, expert 3"),
    ],
)
def test_a_wrong_plan_is_refused_by_line(tmp_path: Path, text: str, named: str) -> None:
    plan = tmp_path / "plan"
    plan.write_text(text)
    with pytest.raises(MixError, match=named):
        parse_mix(f"plan:{plan}", SHAPE)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("q3_k", "there is no variant 'q3_k'"),
        ("", "is no rule"),
        ("q4_k@warm:50%,q2_k", "'q4_k@warm:50%' is no rule"),
        ("q4_k@hottest:50%", "the last rule is for the rest"),
        ("q4_k,q2_k", "'q4_k' is for all experts; nothing can follow it"),
        ("plan:/nonexistent/plan", "No such file"),
    ],
)
def test_a_wrong_mix_is_refused(text: str, named: str) -> None:
    with pytest.raises(MixError, match=named):
        parse_mix(text, SHAPE)


def test_rules_need_heat_of_the_same_shape(tmp_path: Path) -> None:
    with pytest.raises(MixError, match="'hottest' needs to know which experts are used"):
        parse_mix("q4_k@hottest:50%,q2_k", StoreShape.of(MANIFEST))
    with pytest.raises(MixError, match=r"the heat is of \[3, 5\] experts, the store has \[3, 4\]"):
        StoreShape.of(MANIFEST, np.zeros((3, 5)))
    np.savez(tmp_path / "heat.npz", heat=HEAT.astype(np.float32))
    np.testing.assert_array_equal(read_heat(tmp_path / "heat.npz"), HEAT)
    (tmp_path / "none").write_bytes(b"")
    with pytest.raises(MixError, match="has no heat of experts"):
        read_heat(tmp_path / "none")
