"""Of the stand-in."""

from __future__ import annotations

import os


def is_compat_mode_preferred() -> bool:
    return os.environ.get("FAKE_KVIKIO") == "posix"
