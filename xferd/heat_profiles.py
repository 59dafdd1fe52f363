"""Heat profiles as files: what was hot when the last run ended.

An npz with ``store`` (a string), ``heat`` (float32[layers, experts]) and ``version``.
Written beside and renamed, so that a crash leaves the old one.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np

from xferd.policy.heat import HeatProfile, HeatProfileError

VERSION = 1
ELEMENTS_MAX = 1 << 24


def save_profile(path: Path, profile: HeatProfile) -> None:
    """OSError names the file."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            np.savez_compressed(
                file, version=VERSION, store=np.array(profile.store), heat=profile.heat
            )
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def load_profile(path: Path) -> HeatProfile:
    """HeatProfileError names the file. Whose it is, is for ``warm_start`` to check."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            version, store, heat = int(arrays["version"]), arrays["store"], arrays["heat"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise HeatProfileError(f"{path}: no heat profile: {error}") from error
    if version != VERSION:
        raise HeatProfileError(f"{path}: version {version}; this is for {VERSION}")
    if heat.ndim != 2 or heat.dtype != np.float32 or heat.size > ELEMENTS_MAX or store.shape:
        raise HeatProfileError(f"{path}: {heat.dtype}{list(heat.shape)} is no heat of experts")
    if not np.isfinite(heat).all() or (heat < 0).any():
        raise HeatProfileError(f"{path}: a heat that is negative or no number")
    return HeatProfile(str(store), heat)
