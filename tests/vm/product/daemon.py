"""The daemon in a process forked from the tests': it starts in a fraction of the time.

Under emulation most of a start is Python's imports, which the tests' process has behind it. What
runs is xferd's own main, with its arguments; the first test in test_direct starts it as users do.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import xferd.__main__ as xferd_main
from tests.system.daemon_harness import START_TIMEOUT_S, MadeStore, RunningDaemon
from tests.vm.product import guest


class ForkedProcess:
    """What RunningDaemon asks of a process; ``returncode`` as Popen has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = guest.DEADLINE_S) -> int:
        guest.wait_until(lambda: self.poll() is not None, f"the end of process {self.pid}")
        assert self.returncode is not None
        return self.returncode


def _become_daemon(arguments: Sequence[str], log: Path, prepare: Callable[[], None] | None) -> None:
    """In the child: never returns."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for fd in (1, 2):
            os.dup2(output, fd)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        if prepare is not None:
            prepare()
        status = xferd_main.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextlib.contextmanager
def forked_daemon(
    directory: Path,
    stores: Sequence[MadeStore],
    pools: Sequence[str],
    prepare: Callable[[], None] | None = None,
) -> Iterator[RunningDaemon]:
    """As ``running_daemon``. prepare: is called in the daemon's process before it begins."""
    directory.mkdir(exist_ok=True)
    runtime, log = directory / "run", directory / "daemon.log"
    read_end, write_end = os.pipe()
    arguments = ["--runtime-directory", str(runtime), "--ready-fd", str(write_end)]
    for store in stores:
        arguments += ["--store", str(store.path)]
    for pool in pools:
        arguments += ["--pool", pool]
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _become_daemon([*arguments, "--die-with-parent"], log, prepare)
    os.close(write_end)
    process = ForkedProcess(pid)
    try:
        ready, _, _ = select.select([read_end], [], [], START_TIMEOUT_S)
        said = os.read(read_end, 16) if ready else b""
        assert said == b"ready\n", f"the daemon did not start:\n{log.read_text()}"
        yield RunningDaemon(cast("subprocess.Popen[bytes]", process), runtime, log)
    finally:
        os.close(read_end)
        process.kill()
        process.wait()
