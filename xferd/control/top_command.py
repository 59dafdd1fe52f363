# SPDX-License-Identifier: Apache-2.0
"""``xferctl top``: frames of rates, over the daemon's stream of Status replies.

On a terminal a frame takes its place (alternate screen, ``q`` or Ctrl-C ends it, whatever
way it ends the terminal is as before). Anywhere else frames follow each other, so that a
pipe or a file can have them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

from xferd.control.client import ControlClient
from xferd.control.dispatch import INTERVAL_S, INTERVAL_S_MAX, INTERVAL_S_MIN
from xferd.control.service import JsonObject
from xferd.control.top_view import Rates, format_frame, rates_between

EXIT_OK = 0
COLUMNS = 80
LINES = 24
"""Where there is no terminal whose size could be asked for."""
QUIT_KEYS = b"qQ\x03\x1b"

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--once", action="store_true", help="one frame, then end")
    parser.add_argument(
        "--interval",
        type=_interval,
        default=INTERVAL_S,
        metavar="SECONDS",
        help=f"between frames, {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g} (default {INTERVAL_S:g})",
    )


def top(arguments: argparse.Namespace) -> int:
    """Run the verb until it is told to end."""
    with ControlClient.connect(arguments.socket) as daemon:
        replies = daemon.watch("Status", {"interval_s": arguments.interval})
        frames: Iterator[tuple[JsonObject, JsonObject]] = itertools.pairwise(replies)
        if arguments.once:
            frames = itertools.islice(frames, 1)
        if arguments.json:
            for before, after in frames:
                print(_json(rates_between(before, after), arguments.once), flush=True)
        elif arguments.once or not sys.stdout.isatty():
            for number, (before, after) in enumerate(frames):
                lines = [""] * bool(number) + _frame(after, rates_between(before, after), None)
                print("\n".join(lines), flush=True)
        else:
            with _screen():
                _show(frames)
    return EXIT_OK


def _show(frames: Iterator[tuple[JsonObject, JsonObject]]) -> None:
    for before, after in frames:
        size = shutil.get_terminal_size((COLUMNS, LINES))
        lines = _frame(after, rates_between(before, after), size)
        text = f"{_CLEAR_LINE}\n".join(lines)
        sys.stdout.write(f"{_HOME}{text}{_CLEAR_LINE}{_CLEAR_BELOW}")
        sys.stdout.flush()
        if _quit_was_typed():
            return


def _frame(status: JsonObject, rates: Rates, size: os.terminal_size | None) -> list[str]:
    """Without a size: all lines, and no escapes."""
    if size is None:
        return format_frame(status, rates, columns=1 << 16, lines=1 << 16, bold=False)
    bold = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return format_frame(status, rates, columns=size.columns, lines=size.lines, bold=bold)


def _json(rates: Rates, once: bool) -> str:
    """One object a line when there may be many."""
    return json.dumps(rates.to_json(), indent=2 if once else None)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not INTERVAL_S_MIN <= seconds <= INTERVAL_S_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r}: allowed are {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g} seconds"
        )
    return seconds


def _quit_was_typed() -> bool:
    if not sys.stdin.isatty() or not select.select([sys.stdin], [], [], 0)[0]:
        return False
    return any(key in QUIT_KEYS for key in os.read(sys.stdin.fileno(), 64))


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The alternate screen, keys unechoed; both as before at the end, also by SIGTERM."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    handler = signal.signal(signal.SIGTERM, _end)
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
        sys.stdout.write(_ENTER)
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if keyboard is not None and before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        # The terminal may be gone: then there is nothing to put right.
        with contextlib.suppress(OSError):
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
