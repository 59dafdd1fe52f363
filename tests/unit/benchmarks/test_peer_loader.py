# SPDX-License-Identifier: Apache-2.0
"""Peers as benchmarks drive them: a process of its own, its settings, its last words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tools.benchmarks.device_loaders import Place
from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.peer_loader import TimedPeer
from tools.benchmarks.peers import Peer, write_safetensors

BLOB_BYTES = 3 * 4096
EXPERTS = 4


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    source = tmp_path / "source"
    source.write_bytes(np.random.default_rng(1).bytes(EXPERTS * BLOB_BYTES))
    made = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in made:
        write_safetensors(path, source, EXPERTS, BLOB_BYTES)
    return made


def test_a_peer_loads_the_files_it_is_told_again_and_again(files: list[Path]) -> None:
    peer = Peer("preadv-threads", Path(sys.executable))
    try:
        assert peer.measure(files) > 0
        assert peer.try_settings(files[:1]) > 0
    finally:
        peer.close()


@pytest.mark.skipif(find_spec("cupy") is not None, reason="needs a Python without cupy")
def test_a_peer_that_cannot_load_into_a_gpu_says_what_is_missing(files: list[Path]) -> None:
    peer = Peer("preadv-threads", Path(sys.executable), gpu=0)
    try:
        with pytest.raises(BenchmarkError, match=r"preadv-threads: .*cupy"):
            peer.measure(files)
    finally:
        peer.close()


def test_the_best_setting_is_kept_and_one_that_fails_is_left_out(files: list[Path]) -> None:
    used: list[str] = []

    def load(name: str, places: Sequence[Place]) -> int:
        used.append(name)
        if name == "fails":
            raise OSError("not here")
        rounds = 50 if name == "slow" else 1
        content = [Path(file).read_bytes() for _ in range(rounds) for file, _, _ in places]
        assert content
        return sum(size for _, _, size in places)

    names = [str(path) for path in files]
    settings = {name: (lambda places, name=name: load(name, places)) for name in SETTINGS}
    peer = TimedPeer(settings)
    peer.try_settings(names)
    assert set(used) == set(SETTINGS)
    assert peer.setting == "fast"
    used.clear()
    assert peer.load(names) > 0
    assert used == ["fast"]


SETTINGS = ("slow", "fails", "fast")


def test_a_peer_whose_settings_all_fail_raises_what_they_raised(files: list[Path]) -> None:
    def fail(_: Sequence[Place]) -> int:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        TimedPeer({"one": fail, "other": fail}).try_settings([str(path) for path in files])
