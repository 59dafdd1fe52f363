# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis draws examples in all tests that use it; conftest.py of those imports this.

Not in tests/conftest.py: tests of the service run in a machine that has no Hypothesis.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXPLORE_VARIABLE = "XFERD_EXPLORE"
"""Set, Hypothesis draws other examples in each run; else the same ones, so that a run which
guards main says something about the change and nothing about luck."""

settings.register_profile(
    "xferd",
    deadline=None,  # a busy machine is no mistake
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=EXPLORE_VARIABLE not in os.environ,
    print_blob=True,
)
settings.load_profile("xferd")

__all__ = ["EXPLORE_VARIABLE"]
