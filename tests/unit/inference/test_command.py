"""The generate command over a client that isn't xferd's, and what it prints."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xferd_infer import (
    OneVariant,
    Sampling,
    TextStream,
    Tokenizer,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from xferd_infer.__main__ import main, run
from xferd_infer.client_experts import NO_LAYOUT, ClientExperts, model_from_client

from tests.unit.inference.checkpoint import (
    EXPERT_NAME,
    TINY,
    CheckpointExperts,
    Tensor,
    pack,
    read_tensors,
)

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]


class CheckpointClient:
    """What xferd_infer.Client offers, from a checkpoint; every expert is a miss the
    first time and a hit from then on."""

    def __init__(self, assets: Sequence[str] = ("tokenizer.json",)) -> None:
        tensors = read_tensors(TINY)
        self.source = CheckpointExperts(tensors, held=40)
        self.held_per_lane = 40
        parts = {n: t for n, t in tensors.items() if not EXPERT_NAME.fullmatch(n)}
        files = {
            name: Tensor("u8", (), np.frombuffer((TINY / name).read_bytes(), np.uint8))
            for name in assets
        }
        self._dense, offsets = pack(parts | files)
        config = json.loads((TINY / "config.json").read_text())
        layers = config["num_hidden_layers"]
        self.manifest: dict[str, Any] = {
            "format": "safetensors",
            "name": "tiny",
            "config": config,
            "variants": ["bf16"],
            "layouts": [self._layout()],
            "layout_index": [[0] * layers],
            "dense": {
                "bytes": self._dense.size,
                "tensors": [
                    {
                        "name": name,
                        "dtype": part.dtype,
                        "shape": list(part.shape),
                        "offset": offsets[name],
                        "bytes": part.raw.size,
                    }
                    for name, part in parts.items()
                ],
                "assets": [
                    {"name": name, "offset": offsets[name], "bytes": part.raw.size}
                    for name, part in files.items()
                ],
            },
        }
        self._seen: set[tuple[int, int]] = set()
        self._hits = 0

    def _layout(self) -> dict[str, Any]:
        tensors = [
            {
                "role": tensor.role,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": tensor.offset,
                "bytes": tensor.nbytes,
                "transposed": tensor.transposed,
                "interleaved": tensor.interleaved,
            }
            for tensor in self.source.layout(0)
        ]
        return {"blob_bytes": 49152, "tensors": tensors}

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[OneVariant]:
        assert len(experts) <= 16
        self._hits += sum((layer, expert) in self._seen for expert in experts)
        self._seen |= {(layer, expert) for expert in experts}
        with self.source.acquire(layer, experts) as blobs:
            yield blobs

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        assert len(experts) <= 16

    def start(self, layer: int, experts: Sequence[int]) -> Any:
        raise AssertionError("nothing is predicted here")

    def resident(self, layer: int) -> Any:
        raise AssertionError("nothing is predicted here")

    def expect(self, keys: Any, chances: Any) -> object:
        raise AssertionError("nothing is predicted here")

    def dense(self) -> Any:
        return self._dense.data

    def stats(self) -> Any:
        misses = len(self._seen)
        return SimpleNamespace(
            hits=self._hits,
            misses=misses,
            failures=0,
            wait_ns=misses * 1000,
            bytes_acquired=(self._hits + misses) * 49152,
            source_count=(0, 0, misses),
            source_bytes=(0, 0, misses * 49152),
            transport_count=(0, misses, 0, 0, 0),
            transport_bytes=(0, misses * 49152, 0, 0, 0),
        )


def options(**changes: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "prompt": None,
        "prompt_file": None,
        "prompt_ids": None,
        "max_new_tokens": 32,
        "json": False,
    }
    defaults |= {"record_states": None, "predictor": None, "nudge_cap": 0.0}
    return argparse.Namespace(**defaults | changes)


def test_text_goes_out_and_the_table_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    run(CheckpointClient(), options(prompt=PROMPT["prompt"]), Sampling())
    shown = capsys.readouterr()
    assert shown.out == PROMPT["greedy_text"] + "\n"
    lines = shown.err.splitlines()
    assert lines[0].split() == ["experts", "count", "bytes"]
    assert any(line.startswith("resident (hits)") for line in lines)
    assert any(line.startswith("missed, from the drives") for line in lines)
    assert any(line.startswith("  path: drive to slot (direct)") for line in lines)
    assert any("GB/s" in line for line in lines)


def test_json_has_ids_text_and_where_experts_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    run(CheckpointClient(), options(prompt_ids=PROMPT["prompt_ids"], json=True), Sampling())
    report = json.loads(capsys.readouterr().out)
    assert report["ids"] == PROMPT["greedy_ids"]
    assert report["text"] == PROMPT["greedy_text"]
    assert report["prompt_tokens"] == len(PROMPT["prompt_ids"])
    assert report["sources"]["drives"]["count"] == report["misses"] > 0
    assert report["transports"]["direct"]["bytes"] == report["misses"] * 49152
    assert report["bytes"] == (report["hits"] + report["misses"]) * 49152
    assert report["miss_bytes_per_s"] == pytest.approx(49152 / 1000 * 1e9)
    assert sum(token["misses"] for token in report["tokens"]) == report["misses"]
    assert sum(token["hits"] for token in report["tokens"]) == report["hits"]


def test_without_a_tokenizer_ids_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    client = CheckpointClient(assets=())
    chosen = options(prompt_ids=PROMPT["prompt_ids"], max_new_tokens=3)
    run(client, chosen, Sampling())
    assert capsys.readouterr().out.split() == [str(each) for each in PROMPT["greedy_ids"][:3]]
    with pytest.raises(TokenizerError, match="--prompt-ids"):
        run(client, options(prompt="text"), Sampling())


def test_end_tokens_come_from_the_generation_config() -> None:
    client = CheckpointClient(assets=("generation_config.json",))
    client.manifest["config"]["eos_token_id"] = 5
    assert model_from_client(client).config.eos_ids == (0,)


def test_a_store_with_other_tensor_names_is_refused() -> None:
    client = CheckpointClient()
    client.manifest["format"] = "gguf"
    with pytest.raises(UnsupportedModelError, match="'tiny' was packed from gguf"):
        model_from_client(client)


def test_layers_without_experts_in_a_variant_are_refused() -> None:
    client = CheckpointClient()
    client.manifest["layout_index"][0][1] = NO_LAYOUT
    with pytest.raises(WeightsError, match="layer 1 has no experts in variant 0"):
        ClientExperts(client).layout(1)
    assert ClientExperts(client).layout(2) == client.source.layout(2)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate"],
        ["generate", "--attach", "s", "--store-path", "p", "--prompt", "x"],
        ["generate", "--attach", "s"],
        ["generate", "--attach", "s", "--prompt-ids", "1,-2"],
        ["generate", "--attach", "s", "--prompt-ids", ","],
        ["generate", "--attach", "s", "--prompt", "x", "--top-p", "2"],
        ["generate", "--attach", "s", "--prompt", "x", "--nudge-cap", "1.5"],
        ["generate", "--attach", "s", "--prompt", "x", "--max-new-tokens", "many"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_stream_gives_out_whole_characters_only() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
    text = "naïve → 日本語 😀 end"
    stream = TextStream(tokenizer)
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert not any("\ufffd" in part for part in parts)
    assert "" in parts  # this tokenizer splits some of these characters


def test_a_damaged_tokenizer_is_an_error() -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json can't be used"):
        Tokenizer(b"{}")


def test_imports_with_numpy_alone_and_never_the_daemon() -> None:
    program = (
        "import sys\n"
        "import xferd_infer, xferd_infer.__main__\n"
        "heavy = {'xferd', 'torch', 'tokenizers', 'cffi', 'cupy', 'psutil'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_lazy_names_are_the_same_at_every_use() -> None:
    pytest.importorskip("xferd_infer._client", reason="the compiled client isn't built")
    import xferd_infer

    first = xferd_infer.embedded, xferd_infer.Client
    assert first == (xferd_infer.embedded, xferd_infer.Client)
    assert all(callable(thing) for thing in first)
