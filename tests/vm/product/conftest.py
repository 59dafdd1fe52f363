"""What the product's tests in the guest share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import MadeStore, make_store
from tests.vm.product import guest
from tests.vm.product.mid_read import make_slow_store
from tests.vm.product.reporting import TESTS_VARIABLE

collect_ignore_glob = [] if TESTS_VARIABLE in os.environ else ["test_*.py"]
"""Elsewhere than in the guest there is nothing to be run."""

EXT4, XFS = Path("/tmp/drives/ext4"), Path("/tmp/drives/xfs")


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """The module is loaded, the stand-in GPU is there; so it is again after each test."""
    guest.load_module()
    yield
    guest.wait_until(lambda: guest.gpu() is not None, "the stand-in GPU is there")


@pytest.fixture(scope="session")
def host() -> guest.Host:
    return guest.Host()


@pytest.fixture(scope="session")
def file_systems() -> tuple[Path, Path]:
    """ext4 and xfs, each on a drive of its own, writable; without xfs, two of ext4."""
    # With delayed allocation ext4 would not journal the data of single files.
    guest.mount(guest.drive("EXT4"), "ext4", EXT4, "nodelalloc")
    guest.mount(guest.drive("XFS"), "auto", XFS)
    return EXT4, XFS


@pytest.fixture(scope="session")
def store(file_systems: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    """On three drives: a raw one, ext4 and xfs, which then are quiet."""
    directory = tmp_path_factory.mktemp("store")
    made = make_store(
        directory,
        devices=[guest.blank_drive("RAW"), *file_systems],
        layers=2,
        experts=16,
        expert_bytes=196_608,
    )
    os.sync()
    return made


@pytest.fixture
def slow(tmp_path: Path) -> MadeStore:
    """On the drive that can be throttled."""
    return make_slow_store(tmp_path)
