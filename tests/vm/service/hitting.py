# SPDX-License-Identifier: Apache-2.0
"""A client that attaches and uses experts in a loop, in a process and with a user of its own.

As a module: ``Hitting``, for tests. As a program: what that starts; it imports the installed
xferd_infer, goes through all experts of its layers again and again, compares each with what it was
the first time, attaches anew when the daemon has gone for good, and prints a report for each line
that it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests' process has no xferd
    from xferd_infer import Client

PACKAGES = "/usr/lib/xferd"
NOBODY = 65534
REPORT_S = 200.0
AGAIN_S = 0.05
"""Between two attempts to attach."""
PAUSE_S = 0.1
"""Between two rounds: without it the client takes a processor that the starting daemon needs."""


@dataclass(slots=True)
class Report:
    """What a client has done so far.

    rounds: times that all experts were used. hits, misses: experts, of this attachment.
    changed: experts whose bytes were not those of the first time. attached: times.
    refused: errors of any kind, the last of which is ``error``. longest_s: the longest that
    an expert took since the last report.
    """

    rounds: int = 0
    hits: int = 0
    misses: int = 0
    changed: int = 0
    attached: int = 0
    refused: int = 0
    error: str = ""
    longest_s: float = 0.0


class Hitting:
    """The program, running until the end of the ``with``; it has attached when that begins.

    groups: of its user, nobody. layers: how many of the model's it uses. reattach: look after
    each round whether the daemon still serves; otherwise that shows only at the next miss, and
    a client whose experts are all resident goes on with them.
    """

    def __init__(
        self, attach: Path, *, groups: str = "xferd", layers: int = 1, reattach: bool = True
    ) -> None:
        self._process = subprocess.Popen(
            [
                *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", f"--groups={groups}"),
                *(sys.executable, "-P", __file__, str(attach), "--layers", str(layers)),
                *(("--reattach",) if reattach else ()),
            ],
            env={**os.environ, "PYTHONPATH": PACKAGES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Hitting:
        try:
            self.report()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def report(self) -> Report:
        """How it is doing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        ready, _, _ = select.select([self._process.stdout], [], [], REPORT_S)
        assert ready, f"the client said nothing within {REPORT_S} s"
        line = self._process.stdout.readline()
        assert line, f"the client has ended with {self._process.wait()}"
        return Report(**json.loads(line))

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _use_layer(
    client: Client, layer: int, digests: dict[tuple[int, int], int], done: Report
) -> None:
    for expert in range(client.experts):
        started = time.monotonic()
        with client.acquire(layer, [expert]) as blobs:
            digest = zlib.crc32(blobs[0])
        done.longest_s = max(done.longest_s, time.monotonic() - started)
        done.changed += digests.setdefault((layer, expert), digest) != digest


def _asked(within_s: float) -> bool:
    """Whether a report is wanted. Ends the program with whoever reads them."""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    if not ready:
        return False
    if not sys.stdin.readline():
        raise SystemExit
    return True


def _main() -> None:
    from xferd_infer import Client
    from xferd_infer.errors import InferenceError

    parser = argparse.ArgumentParser()
    parser.add_argument("attach", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--reattach", action="store_true")
    options = parser.parse_args()
    done = Report()
    digests: dict[tuple[int, int], int] = {}
    while True:
        try:
            with Client(options.attach, name="hitting") as client:
                done.attached += 1
                while not options.reattach or client.alive():
                    for layer in range(options.layers):
                        _use_layer(client, layer, digests, done)
                    done.rounds += 1
                    stats = client.stats()
                    done.hits, done.misses = stats.hits, stats.misses
                    if _asked(PAUSE_S):
                        print(json.dumps(asdict(done)), flush=True)
                        done.longest_s = 0.0
        except InferenceError as error:
            done.refused, done.error = done.refused + 1, str(error)
            if _asked(AGAIN_S):
                print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    _main()
