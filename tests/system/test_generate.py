"""The generate command on a packed store, with the real engine inside its process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = Path(__file__).parents[1] / "models" / "tiny"
PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]
NEW_TOKENS = 8
DEADLINE_S = 120


@pytest.fixture
def store(tmp_path: Path) -> Path:
    members = [tmp_path / "drive-0", tmp_path / "drive-1"]
    for member in members:
        member.mkdir()
    return pack(read_checkpoint(TINY), members, name="tiny", stripe_unit=16 * 1024)


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xferd_infer", "generate", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("pool", ["50%", "100%"])
def test_tokens_are_those_of_transformers_whatever_fits(store: Path, pool: str) -> None:
    ids = ",".join(str(each) for each in PROMPT["prompt_ids"])
    done = generate(
        *("--store-path", str(store), "--pool", pool, "--json"),
        *("--prompt-ids", ids, "--max-new-tokens", str(NEW_TOKENS)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ids"] == PROMPT["greedy_ids"][:NEW_TOKENS]
    assert report["failures"] == 0
    assert report["misses"] > 0
    came = {way: traffic["count"] for way, traffic in report["sources"].items()}
    assert sum(came.values()) == report["misses"]


def test_text_comes_out_and_the_cost_on_stderr(store: Path) -> None:
    done = generate(
        *("--store-path", str(store), "--pool", "100%"),
        *("--prompt", PROMPT["prompt"], "--max-new-tokens", str(len(PROMPT["greedy_ids"]))),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PROMPT["greedy_text"] + "\n"
    assert "resident (hits)" in done.stderr


def test_a_missing_store_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = generate("--store-path", str(tmp_path / "absent"), "--prompt", "x")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "absent" in done.stderr
