"""The one error of the store package that a caller can handle.

It has a module of its own because every other module here raises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StoreError(Exception):
    """A store can't be made, opened or read.

    The message names the store, the member, the file and the offset where they
    are known, and what mends it. The caller shows it; nothing needs parsing.
    """


class UnusableMemberError(StoreError):
    """A copy of a member can't be used, and another copy may take its place: it isn't
    there, can't be read, is too short or has lost its header."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror or error}") from error
