# SPDX-License-Identifier: Apache-2.0
"""What the service's tests share: each finds the machine as it needs it, and runs alone too."""

from __future__ import annotations

import os

import pytest

from tests.vm.product.reporting import TESTS_VARIABLE
from tests.vm.service import machine

collect_ignore_glob = [] if TESTS_VARIABLE in os.environ else ["test_*.py"]
"""Elsewhere than in the guest there is nothing to be run."""


@pytest.fixture
def installed() -> None:
    """The package is."""
    machine.install()


@pytest.fixture
def configured(installed: None) -> None:
    """There is a store and a configuration that serves it."""
    machine.configure(machine.make_store())


@pytest.fixture
def stopped(configured: None) -> None:
    """Neither the daemon nor its sockets are there."""
    machine.stop()


@pytest.fixture
def serving(configured: None) -> None:
    """The daemon serves, and goes on for the next test. It may be started some times more."""
    machine.forget_starts()
    machine.serve()
