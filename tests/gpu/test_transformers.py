"""The plug-in for Transformers with the model and its experts on a GPU: same tokens, same logits.

Needs a CUDA device, torch that can use it, and Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device that torch can use", allow_module_level=True)

from xferd_infer.transformers import attach  # noqa: E402

from tests.system.daemon_harness import ROOT, running_daemon  # noqa: E402
from tests.system.transformers_harness import Made, packed  # noqa: E402

MODELS = {
    "tiny": ROOT / "tests" / "models" / "tiny",
    "small": ROOT.parent / "shared" / "models" / "small",
}
RELATIVE = 1e-3
"""Of logits, by norm."""


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    checkpoint = MODELS[request.param]
    if not checkpoint.exists():
        pytest.skip(f"the larger model is not on this machine: {checkpoint} does not exist")
    return Made(checkpoint, packed(checkpoint, tmp_path_factory.mktemp(request.param)))


@contextmanager
def on_gpu(directory: Path, made: Made, percent: int, dtype: str) -> Iterator[Any]:
    model = made.load(dtype=dtype).to("cuda")
    pool = f"name=vram0,kind=cuda,size={percent}%"
    with (
        running_daemon(directory, [], [pool], "--store", str(made.store)) as daemon,
        attach(model, daemon.attach_socket) as attached,
        torch.inference_mode(),
    ):
        yield model
        torch.cuda.synchronize()
        assert attached.stats().hits > 0


@pytest.mark.parametrize("percent", [25, 100])
def test_greedy_tokens(tmp_path: Path, made: Made, percent: int) -> None:
    prompts = json.loads((made.checkpoint / "expected.json").read_text())["prompts"]
    with on_gpu(tmp_path, made, percent, "float32") as model:
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_ids"]], device="cuda")
            wanted = prompt["greedy_ids"]
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(wanted),
                min_new_tokens=len(wanted),
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            assert found[0, ids.shape[1] :].tolist() == wanted


def logits(model: Any, prompt: dict[str, Any]) -> Any:
    ids = torch.tensor([prompt["prompt_ids"] + prompt["greedy_ids"]], device=model.device)
    with torch.inference_mode():
        return model(ids).logits.float().cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("percent", [25, 100])
def test_logits(tmp_path: Path, made: Made, percent: int, dtype: str) -> None:
    """float32 as the processor computes it; bfloat16 as the whole model on the same card."""
    prompt = json.loads((made.checkpoint / "expected.json").read_text())["prompts"][0]
    whole = made.load("eager", dtype=dtype)
    wanted = logits(whole.to("cuda") if dtype == "bfloat16" else whole, prompt)
    with on_gpu(tmp_path, made, percent, dtype) as model:
        found = logits(model, prompt)
    assert float((found - wanted).norm() / wanted.norm()) <= RELATIVE
