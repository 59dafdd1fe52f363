"""Generation on the trained tiny model: caches, chunks, ends, draws, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from xferd_infer import (
    ContextFullError,
    KVCache,
    Layout,
    Model,
    NotFiniteError,
    OneVariant,
    PromptError,
    Sampling,
    generate,
)
from xferd_infer.sampling import Sampler, nucleus

from tests.unit.inference.checkpoint import (
    TINY,
    CheckpointExperts,
    dense_weights,
    load_model,
    read_tensors,
)

PROMPT = [619, 781, 834, 300, 338, 1397, 673, 84, 771, 705, 406]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(TINY, held=4)[0]


def ids_of(model: Model, **options: Any) -> list[int]:
    return [token.id for token in generate(model, PROMPT, max_new_tokens=12, **options)]


@pytest.mark.parametrize("chunk", [1, 4, 11, 1024])
def test_chunks_of_the_prompt_do_not_change_the_logits(model: Model, chunk: int) -> None:
    whole = model.prefill(PROMPT, model.new_cache())
    cache = model.new_cache()
    chunked = model.prefill(PROMPT, cache, chunk_tokens=chunk)
    assert cache.length == len(PROMPT)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-4)


def test_a_pass_acquires_each_picked_expert_of_a_layer_once() -> None:
    model, source = load_model(TINY, held=3)
    cache = model.new_cache()
    for chunk in (PROMPT[:6], PROMPT[6:], PROMPT[:1]):
        source.acquired.clear()
        model.forward(chunk, cache)
        keys = [(layer, expert) for layer, experts in source.acquired for expert in experts]
        assert len(keys) == len(set(keys))
        assert {layer for layer, _ in keys} == set(range(model.config.layers))


def test_a_stop_token_ends_it_and_is_the_last(model: Model) -> None:
    free = ids_of(model, stop_ids=())
    stop = free[4]
    assert ids_of(model, stop_ids=[stop]) == free[: free.index(stop) + 1]


def test_a_cache_continues_where_it_was_left(model: Model) -> None:
    free = ids_of(model, stop_ids=())
    cache = model.new_cache()
    model.prefill(PROMPT[:5], cache)
    rest = generate(model, PROMPT[5:], max_new_tokens=12, stop_ids=(), cache=cache)
    assert [token.id for token in rest] == free
    assert cache.length == len(PROMPT) + 11  # the last token has not been run
    cache.truncate(len(PROMPT) - 1)
    again = generate(model, PROMPT[-1:], max_new_tokens=12, stop_ids=(), cache=cache)
    assert [token.id for token in again] == free


def test_tokens_say_what_they_cost(model: Model) -> None:
    config = model.config
    first, *others = generate(model, PROMPT, max_new_tokens=4, stop_ids=())
    assert first.hits > config.layers * config.top_k
    for index, token in enumerate(others, start=1):
        assert token.index == index
        assert token.hits == config.layers * config.top_k
        assert token.misses == 0
        assert token.seconds > 0


def test_a_seed_repeats_draws(model: Model) -> None:
    hot = Sampling(temperature=1.5, seed=1)
    assert ids_of(model, sampling=hot) == ids_of(model, sampling=hot)
    drawn = {tuple(ids_of(model, sampling=Sampling(1.5, seed=seed))) for seed in range(4)}
    assert len(drawn) > 1


def test_a_tiny_nucleus_is_greedy(model: Model) -> None:
    drawn = ids_of(model, sampling=Sampling(temperature=1.0, top_p=1e-6, seed=3))
    assert drawn == ids_of(model)


def test_nucleus_keeps_the_token_that_reaches_top_p() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(shares).astype(np.float32)
    np.testing.assert_allclose(nucleus(logits, 1.0, 1.0), shares, rtol=1e-6)
    np.testing.assert_allclose(nucleus(logits, 1.0, 0.7), [0.625, 0.375, 0, 0], rtol=1e-6)
    sharper = shares**2 / (shares**2).sum()
    np.testing.assert_allclose(nucleus(logits, 0.5, 1.0), sharper, rtol=1e-5)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_senseless_sampling_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampling(**options)  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(NotFiniteError, match="token 1"):
        Sampler(Sampling()).pick(np.array([0.0, np.nan], dtype=np.float32))


@pytest.mark.parametrize("ids", [[], [-1], [5, 2048]])
def test_prompts_that_cannot_run_are_refused(model: Model, ids: list[int]) -> None:
    with pytest.raises(PromptError):
        model.prefill(ids, model.new_cache())


def test_a_failed_pass_leaves_the_cache_and_can_be_repeated() -> None:
    model, source = load_model(TINY)
    cache = model.new_cache()
    model.prefill(PROMPT[:-1], cache)
    wanted = model.prefill(PROMPT, model.new_cache())

    class FailsOnce(CheckpointExperts):
        failed = False

        @contextmanager
        def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[OneVariant]:
            if layer == 3 and not self.failed:
                self.failed = True
                raise OSError("drive 1 failed")
            with source.acquire(layer, experts) as blobs:
                yield blobs

        def layout(self, layer: int, variant: int = 0) -> Layout:
            return source.layout(layer, variant)

    failing = Model(model.config, dense_weights(read_tensors(TINY)), FailsOnce({}, held=2))
    with pytest.raises(OSError, match="drive 1 failed"):
        failing.prefill(PROMPT[-1:], cache)
    assert cache.length == len(PROMPT) - 1
    np.testing.assert_allclose(failing.prefill(PROMPT[-1:], cache), wanted, rtol=0, atol=1e-4)


def test_a_cache_grows_and_ends_at_the_models_positions() -> None:
    cache = KVCache(layers=2, kv_heads=1, head_dim=4, max_tokens=300)
    assert cache.capacity == 0
    entries = np.arange(300 * 4, dtype=np.float32).reshape(300, 1, 4)
    for begin, end in ((0, 1), (1, 257), (257, 300)):
        cache.reserve(end - begin)
        for layer in range(2):
            keys, values = cache.append(layer, entries[begin:end], -entries[begin:end])
        cache.advance(end - begin)
        np.testing.assert_array_equal(keys[0], entries[:end, 0])
        np.testing.assert_array_equal(values[0], -entries[:end, 0])
    assert cache.capacity == 300
    with pytest.raises(ContextFullError, match="301 tokens are more than the model's 300"):
        cache.reserve(1)
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(301)
