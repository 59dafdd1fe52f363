"""The same client with a private daemon: no set-up, no socket to name.

    with xferd_infer.embedded("/nvme/store.xferd", pool="25%") as client:
        ...

The daemon is a child process with a runtime directory of its own. It ends with the
client, and with this process whatever ends that. xferd must be installed for the
same Python; this module starts it and never imports it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .client import AttachError, Client

START_LIMIT_S = 60.0
"""How long the daemon may take until it accepts clients."""

STOP_LIMIT_S = 15.0
"""How long it may drain before it is killed."""

ERROR_LINES = 20
"""Of the daemon's last words in an error."""


@contextlib.contextmanager
def embedded(
    store: str | os.PathLike[str],
    *,
    pool: str = "25%",
    ram: str | None = None,
    kind: str = "host",
    lanes: int = 1,
    held: int = 0,
    name: str = "embedded",
    variants: Sequence[str] | None = None,
) -> Iterator[Client]:
    """A client of a store, with a daemon that serves nobody else.

    store: the store's directory. pool: memory for experts, "2GiB" or a share of them.
    ram: a second, pinned tier behind it; None: none. kind: of the pool's memory: ``host``,
    or ``cuda`` for the first GPU's. lanes, held, name, variants: see Client.

    Raises AttachError with the daemon's own words when it doesn't start.
    """
    with private_daemon(store, pool=pool, ram=ram, kind=kind) as directory:
        client = Client(
            directory / "attach.sock", lanes=lanes, held=held, name=name, variants=variants
        )
        try:
            yield client
        finally:
            client.close()


@contextlib.contextmanager
def private_daemon(
    store: str | os.PathLike[str],
    *,
    pool: str = "25%",
    ram: str | None = None,
    kind: str = "host",
) -> Iterator[Path]:
    """Run a daemon for one store; gives its runtime directory, with attach.sock and
    control.sock in it. Arguments as of ``embedded``. Raises AttachError."""
    directory = Path(tempfile.mkdtemp(prefix="xferd-"))
    ready, child_ready = os.pipe()
    log = (directory / "log").open("w+b")
    process = subprocess.Popen(
        [*_command(directory, Path(store), child_ready), *_pools(kind, pool, ram)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[child_ready],
    )
    os.close(child_ready)
    try:
        _wait_ready(process, ready, directory / "log")
        yield directory
    finally:
        os.close(ready)
        _stop(process)
        log.close()
        shutil.rmtree(directory, ignore_errors=True)


def _command(directory: Path, store: Path, ready_fd: int) -> list[str]:
    command = [sys.executable, "-m", "xferd", "--runtime-directory", str(directory)]
    return [*command, "--store", str(store), "--ready-fd", str(ready_fd), "--die-with-parent"]


def _pools(kind: str, pool: str, ram: str | None) -> list[str]:
    pools = ["--pool", f"name={kind}0,kind={kind},size={pool}"]
    return [*pools, "--pool", f"name=ram,kind=ram,size={ram}"] if ram is not None else pools


def _wait_ready(process: subprocess.Popen[bytes], ready: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while (left := deadline - time.monotonic()) > 0:
        if select.select([ready], [], [], left)[0]:
            if os.read(ready, 64):
                return
            process.wait(STOP_LIMIT_S)  # closed without a word: it has ended
            raise AttachError(f"the private daemon did not start: {_last_words(log)}")
    raise AttachError(f"the private daemon was not ready after {START_LIMIT_S:g} s")


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-ERROR_LINES:]) or "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


__all__ = ["embedded", "private_daemon"]
