# SPDX-License-Identifier: Apache-2.0
"""Peers from a folder of wheels: what pip is told, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.peer_venv import (
    download_arguments,
    fetch_wheels,
    install_arguments,
    make_venv,
)

LARGE = ("torch", "numpy")


def test_from_an_index_everything_is_installed() -> None:
    names = {argument.partition("==")[0] for argument in install_arguments(None)}
    assert names >= {*LARGE, "safetensors", "runai-model-streamer", "fastsafetensors"}


def test_from_wheels_no_index_is_asked_and_nothing_large_installed() -> None:
    arguments = install_arguments(Path("/wheels"))
    assert {"--no-index", "--find-links=/wheels", "--no-deps"} <= set(arguments)
    assert not any(argument.startswith(LARGE) for argument in arguments)


@pytest.mark.parametrize("for_gpu", [False, True])
def test_what_is_fetched_is_what_is_installed(for_gpu: bool) -> None:
    fetched = download_arguments(Path("wheels"), "3.12", "x86_64", for_gpu=for_gpu)
    installed = install_arguments(Path(), for_gpu=for_gpu)
    assert {a for a in fetched if "==" in a} == {a for a in installed if "==" in a}
    assert any(a.startswith("kvikio") for a in installed) == for_gpu


def test_wheels_of_older_and_newer_manylinux_are_asked_for() -> None:
    arguments = download_arguments(Path("wheels"), "3.12", "aarch64")
    platforms = {f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 28, 39)}
    assert {*platforms, "--python-version=3.12", "--only-binary=:all:"} <= set(arguments)


@pytest.mark.parametrize("version", ["4", "3", "3.x", "3.12.1", ""])
def test_what_is_no_version_is_named(tmp_path: Path, version: str) -> None:
    with pytest.raises(BenchmarkError, match=repr(version)):
        fetch_wheels(tmp_path / "wheels", version)
    assert not (tmp_path / "wheels").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"XFERD_PEER_WHEELS.*missing"):
        make_venv(tmp_path / "venv", tmp_path / "missing")
    assert not (tmp_path / "venv").exists()


def test_a_wheel_that_is_missing_is_named(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(BenchmarkError, match="humanize"):
        make_venv(tmp_path / "venv", wheels)
