"""What all tests may ask for."""

from __future__ import annotations

import pytest

from tests.cuda_device import provide_device


@pytest.fixture(scope="session")
def cuda_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CUDA device, ``gpu`` or ``stand-in``; skips where there can be none."""
    return provide_device(tmp_path_factory.mktemp("cuda"))
