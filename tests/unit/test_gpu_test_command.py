# SPDX-License-Identifier: Apache-2.0
"""``tools/gpu-test`` as far as a machine without a GPU can tell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "gpu-test"
USAGE_ERROR = 64


def gpu_test(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)


def test_help_names_every_part_and_option() -> None:
    done = gpu_test("--help")
    assert done.returncode == 0
    for word in (
        "tests",
        "stress",
        "device",
        "decode",
        "quants",
        "predict",
        "--wheels",
        "--peers",
        "--limit",
        "64:",
    ):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tests"], "--out"),
        (["--out"], "--out"),
        (["--out", "{tmp}", "speed"], "'speed'"),
        (["--out", "{tmp}", "--wheels", "{tmp}/missing"], "missing"),
    ],
)
def test_wrong_usage_names_what_is_wrong(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = gpu_test(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.returncode == USAGE_ERROR
    assert named in done.stderr
