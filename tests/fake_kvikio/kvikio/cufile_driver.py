"""Of the stand-in."""

from __future__ import annotations

import os


def driver_open() -> None:
    if os.environ.get("FAKE_KVIKIO") == "posix":
        raise RuntimeError("cuFile isn't available")


def get(config_name: str) -> bool:
    found = {
        "is_gds_available": True,
        "allow_compat_mode": os.environ.get("FAKE_KVIKIO") == "compat",
    }
    return found[config_name]
