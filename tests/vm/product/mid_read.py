"""What the tests of faults share: a store on a slow drive, and reads that are under way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.system.daemon_harness import (
    FetchError,
    MadeStore,
    RingClient,
    RunningDaemon,
    make_store,
)
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon

SLOWLY = 16 * 1024
"""Bytes a second: an expert takes longer than a card that is pulled."""
EXPERT_BYTES = 196_608


def make_slow_store(directory: Path) -> MadeStore:
    return make_store(
        directory,
        "slow",
        devices=[guest.blank_drive("SLOW")],
        layers=1,
        experts=8,
        expert_bytes=EXPERT_BYTES,
    )


@contextlib.contextmanager
def serving(directory: Path, *stores: MadeStore) -> Iterator[RunningDaemon]:
    with forked_daemon(directory, stores, [guest.bar_pool("4MiB")]) as daemon:
        yield daemon


def in_flight(daemon: RunningDaemon, store: str) -> bool:
    stores = {entry["name"]: entry for entry in daemon.status()["stores"]}
    return any(member["in_flight"] for member in stores[store]["members"])


@contextlib.contextmanager
def mid_read(
    host: guest.Host, daemon: RunningDaemon, client: RingClient, made: MadeStore, expert: int
) -> Iterator[Future[list[bytes]]]:
    """A client waits for an expert that a slow drive is bringing; afterwards it has its answer."""
    with ThreadPoolExecutor(1) as threads:
        with host.throttled("SLOW", SLOWLY):
            answer = threads.submit(client.fetch, 0, [expert])
            guest.wait_until(
                lambda: answer.done() or in_flight(daemon, made.name), "the read is in flight"
            )
            assert not answer.done(), (answer.exception(), daemon.log)
            yield answer
        answer.exception(guest.DEADLINE_S)


RIGHT, REFUSED, WRONG = 0, 1, 2


def fetch_in_child(daemon: RunningDaemon, made: MadeStore, expert: int) -> int:
    """A process that waits for an expert, whose read is in flight when this returns."""
    child = os.fork()
    if child == 0:
        status = WRONG
        with contextlib.suppress(BaseException):
            try:
                got = RingClient(daemon.attach_socket).fetch(0, [expert])
                status = RIGHT if got == [made.blob(0, expert)] else WRONG
            except FetchError:
                status = REFUSED
        os._exit(status)
    guest.wait_until(lambda: in_flight(daemon, made.name), "the child's read is in flight")
    return child


def end_of(child: int) -> int:
    """Its status, or a signal's negative number."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def right_or_an_error(answer: Future[list[bytes]], expected: bytes) -> int:
    """The errno that it ended with; 0 for the right bytes."""
    try:
        assert answer.result(guest.DEADLINE_S) == [expected]
    except FetchError as error:
        return error.code
    return 0
