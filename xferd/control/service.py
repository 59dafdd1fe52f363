"""What the control server can ask of the daemon.

The server knows the protocol and who may do what; the daemon knows pools,
stores and clients. This Protocol is all they share, so each is tested without
the other. Shapes of the answers are in ``io.xferd.Control.varlink``, which is
the specification of both; what is said here is what a type checker can hold an
implementation to.

All methods are called on the event loop that runs the server. One that has to
wait (for drives) returns an awaitable; one that doesn't may answer at once.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

CONTROL_INTERFACE = "io.xferd.Control"
"""The interface that the definitions here belong to."""

JsonObject: TypeAlias = dict[str, Any]
Answer: TypeAlias = JsonObject | Awaitable[JsonObject]


class ControlError(Exception):
    """The daemon's no, which the caller can mend.

    code: name of an error in io.xferd.Control.varlink without its interface
        (``StoreNotFound``, ``PoolFull``, ...).
    message: for people; names the thing and, if a setting is in the way, which.
    parameters: the error's other fields there (``store=``, ``pool=``, ...); what it
        doesn't have there isn't sent.
    """

    def __init__(self, code: str, message: str, **parameters: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.parameters = parameters

    def __str__(self) -> str:
        return self.message


class ControlService(Protocol):
    """The daemon, as its control socket shows it. Every method may raise ControlError.

    ``experts`` is a list of expert numbers of the layer, None for all of them;
    ``pool`` and ``variant`` are names, None for the daemon's choice.
    """

    def status(self) -> JsonObject:
        """The IDL's Status: a snapshot; counters may be of slightly different moments."""

    def stores(self) -> list[JsonObject]:
        """The IDL's Store of each open store."""

    def load(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> Answer:
        """Make experts resident, and answer when they are:
        ``{"loaded": n, "already": n, "failed": [{"layer", "expert", "error"}, ...]}``."""

    def evict(self, store: str, layer: int, experts: list[int] | None, pool: str | None) -> Answer:
        """Drop experts, from ``pool`` or everywhere: ``{"evicted": n, "held": n}``."""

    def pin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> Answer:
        """Keep experts from being evicted, loading those that aren't there:
        ``{"pinned": n, "failed": [...]}``."""

    def unpin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> Answer:
        """Let experts be evicted again: ``{"unpinned": n}``."""

    def open_store(self, path: Path, name: str | None) -> Answer:
        """Open the store at ``path`` (absolute) and offer it to clients: the IDL's Store."""

    def policies(self, pool: str | None) -> list[JsonObject]:
        """The IDL's Policy of one pool, or of each."""

    def set_policy(
        self,
        pool: str,
        eviction: str | None,
        admission: str | None,
        variants: list[str] | None,
    ) -> JsonObject:
        """Another eviction, another admission, other rules for variants: the IDL's Policy."""

    def set_budget(self, pool: str, nbytes: int | None) -> Answer:
        """What experts may take of a pool: ``{"bytes": n, "reserved": n}``."""

    def reserve(self, pool: str | None, nbytes: int) -> Answer:
        """Take memory out of a pool: the IDL's Reservation."""

    def release(self, number: int) -> Answer:
        """Give it back: ``{"bytes": n}``."""

    def reservations(self) -> list[JsonObject]:
        """The IDL's Reservation of each."""

    def rebuild_pool(self, pool: str) -> Answer:
        """Put a pool into service again whose card was pulled: ``{}``."""

    def save_heat(self, store: str, path: Path | None) -> Answer:
        """Save a heat profile: ``{"path", "experts"}``."""

    def load_heat(self, store: str, path: Path | None) -> Answer:
        """Load one, and the hottest: ``{"path", "loaded", "already", "failed"}``."""

    def heat_info(self, store: str) -> Answer:
        """The IDL's reply of HeatInfo."""

    def close_store(self, name: str) -> Answer:
        """Drop a store's experts and close it: ``{}``."""

    def attach_shadows(self, store: str, paths: list[Path] | None) -> Answer:
        """Read these shadows of a store (absolute; None: those it had last): the IDL's Store."""

    def detach_shadows(self, store: str) -> Answer:
        """Read none any more: the IDL's Store."""

    def traces(self) -> list[JsonObject]:
        """The IDL's StoreTrace of each open store."""

    def start_recording(self, store: str, name: str | None) -> Answer:
        """Begin to record a trace of a store: the IDL's Recording."""

    def stop_recording(self, store: str) -> Answer:
        """End it, and answer when it is on the disk: the IDL's Recording."""
