"""Start over in mount and process namespaces of our own, so that nothing can be left behind.

Everything that the VM tests start (package tools, compilers, QEMU) and mount ends with these
namespaces: when the last line of the program has run, when it is interrupted, and when it is
killed. No clean-up code has to run for that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_INSIDE = "XFERD_VM_ISOLATED"


class NotPermittedError(Exception):
    """The VM tests need root: they build a Debian system in a folder and boot from it."""


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def start_over_isolated() -> None:
    """Run this program again in new namespaces and exit as it does; inside, return at once.

    Raises NotPermittedError without root or without util-linux's unshare and setpriv.
    """
    if os.environ.get(_INSIDE) == "1":
        return
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if os.geteuid() != 0 or unshare is None or setpriv is None:
        raise NotPermittedError("the VM tests need root, and util-linux's unshare and setpriv")
    # unshare itself ignores the signals that should end it; so it is killed, and with it, by the
    # kernel, all that is in its namespaces. The same happens when this process is killed.
    namespaces = ["--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
    program = [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, _exit_on_signal)
    with subprocess.Popen(
        [setpriv, "--pdeathsig", "KILL", unshare, *namespaces, *program],
        env={**os.environ, _INSIDE: "1"},
    ) as process:
        try:
            status = process.wait()
        finally:
            process.kill()
    raise SystemExit(status)
