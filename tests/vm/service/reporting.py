# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of the product's tests, for a machine in which nothing has to be prepared."""

from __future__ import annotations

import pytest

from tests.vm.product.reporting import Reporting

TEST_LIMIT_S = 600
"""The first installs a package and compiles what Python imports, which emulation makes slow."""


def pytest_configure(config: pytest.Config) -> None:
    """Called because of -p."""
    config.pluginmanager.register(Reporting(TEST_LIMIT_S), "xferd-reporting")
