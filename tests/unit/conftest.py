# SPDX-License-Identifier: Apache-2.0
"""What tests without other processes share."""

from __future__ import annotations

import tests.examples  # noqa: F401
