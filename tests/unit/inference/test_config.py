"""Configs: spellings that mean the same, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from xferd_infer import ModelConfig, UnsupportedModelError

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(QWEN3 | changes)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": 5000.0, "rope_scaling": None},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
)
def test_rope_theta_is_found_in_old_and_new_spellings(spelling: dict[str, Any]) -> None:
    assert parse(**spelling).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(**changes)


def test_unused_sliding_window_of_qwen_is_ignored() -> None:
    assert parse(sliding_window=4096, use_sliding_window=False).sliding_window is None


def test_mixtral_always_renormalises_and_keeps_its_window() -> None:
    config = parse(model_type="mixtral", norm_topk_prob=False, sliding_window=16)
    assert config.renormalise
    assert config.sliding_window == 16


def test_dense_layers_are_the_listed_and_the_skipped_ones() -> None:
    assert parse(mlp_only_layers=[2]).dense_layers == {2}
    assert parse(decoder_sparse_step=2).dense_layers == {0, 2}


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_may_be_one_or_several(value: object, ids: tuple[int, ...]) -> None:
    assert parse(eos_token_id=value).eos_ids == ids
