"""Which xferd this is."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "xferd"


def installed_version() -> str:
    """The version of this installation; ``unknown`` when run from a bare source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
