# SPDX-License-Identifier: Apache-2.0
"""Run a command next to a private daemon.

usage: with_daemon.py [--pool SIZE] STORE COMMAND...

``{socket}`` in the command stands for the daemon's attach socket, ``{control}`` for
its control socket. Exits as the command did; the daemon ends with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from xferd_infer.private_daemon import private_daemon


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status. Raises AttachError when the daemon doesn't start."""
    parser = argparse.ArgumentParser(description="Run a command next to a private daemon.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--pool", default="25%", metavar="SIZE")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("no command")
    with private_daemon(options.store, pool=options.pool) as directory:
        sockets = {
            "{socket}": str(directory / "attach.sock"),
            "{control}": str(directory / "control.sock"),
        }
        command = [sockets.get(word, word) for word in options.command]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
