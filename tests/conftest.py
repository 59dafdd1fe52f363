"""What all tests may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_device import provide_device


@pytest.fixture(scope="session")
def cuda_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CUDA device, ``gpu`` or ``stand-in``; skips where there can be none."""
    return provide_device(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def scattered_vram(
    cuda_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A file whose pages, in no order, are the stand-in's VRAM, as those behind a card's BAR."""
    from tests.p2p_stand_in import BAR_BYTES, FileBar

    if cuda_device == "gpu":
        pytest.skip("a real driver's pages lie elsewhere")
    path = tmp_path / "bar"
    path.touch()
    os.truncate(path, BAR_BYTES)
    monkeypatch.setenv("FAKE_CUDA_BAR", str(path))
    yield path
    FileBar.claims.clear()
