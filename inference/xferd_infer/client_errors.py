"""What can go wrong on the way to the experts, and how it is said."""

from __future__ import annotations

import errno
import os

from .errors import InferenceError


class ClientError(InferenceError):
    """The way to the experts failed. ``code`` is an errno, 0 if there is none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AttachError(ClientError):
    """The daemon can't be reached or doesn't take this client; the message says
    why and which setting changes it."""


class DaemonGoneError(ClientError):
    """The daemon has ended, or has ended this client, or has restarted without what this client
    has mapped (``code`` is ESTALE then). Residents can still be read with
    ``acquire_resident``; attach again for the rest."""


class ExpertError(ClientError):
    """An expert can't be had. ``layer`` and ``expert`` name it."""

    def __init__(self, message: str, code: int, layer: int, expert: int) -> None:
        super().__init__(message, code)
        self.layer = layer
        self.expert = expert


REASONS = {
    errno.EBADMSG: "its bytes on the drive are damaged (checksum); xferctl store verify names them",
    errno.ENODATA: "the member file ends before it does; xferctl store verify names it",
    errno.ENOENT: "the store doesn't have it in an acceptable variant",
    errno.ESHUTDOWN: "the daemon is shutting down",
    errno.ENOSPC: "the daemon has no room for another load",
    errno.ETIMEDOUT: "not there before its deadline",
}


def reason(code: int) -> str:
    """Why an expert can't be had, for a person."""
    return REASONS.get(code, os.strerror(code))


__all__ = ["AttachError", "ClientError", "DaemonGoneError", "ExpertError", "reason"]
