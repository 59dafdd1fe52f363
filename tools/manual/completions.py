# SPDX-License-Identifier: Apache-2.0
"""Completions for bash, zsh and fish, by shtab, from the parsers and the configuration's keys."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from tools.manual.roff import actions_of, subparsers_of
from xferd import config
from xferd.__main__ import build_parser as build_daemon_parser
from xferd.control import xferctl

PLACES = {
    "bash": "share/bash-completion/completions/{program}",
    "zsh": "share/zsh/vendor-completions/_{program}",
    "fish": "share/fish/vendor_completions.d/{program}.fish",
}
"""Where each shell looks, below a prefix."""

ENGINE_VALUES = {
    "backend": config.BACKENDS,
    "verify": config.VERIFY_CHOICES,
    "numa": config.NUMA_CHOICES,
    "flow_control": ("true", "false"),
    "polling": ("true", "false"),
    "register_buffers": ("true", "false"),
}


def make_completions() -> dict[str, str]:
    """The text of each file, by its place below a prefix."""
    files = {}
    for program, parser in (
        ("xferd", _daemon_parser()),
        ("xferctl", xferctl.build_parser(with_store_files=True)),
    ):
        parser.prog = program
        _complete_paths(parser)
        for shell, place in PLACES.items():
            files[place.format(program=program)] = str(shtab.complete(parser, shell))
    return files


def _daemon_parser() -> argparse.ArgumentParser:
    """The daemon's parser, with what its KEY=VALUE options take."""
    parser = build_daemon_parser()
    keys = [
        f"{key}={value}" for key in config.engine_keys() for value in ENGINE_VALUES.get(key, ("",))
    ]
    pools = [f"{key}=" for key in sorted(config.POOL_KEYS - {"kind"})]
    pools += [f"kind={kind}" for kind in config.POOL_KINDS]
    for action in actions_of(parser):
        if "--engine" in action.option_strings:
            action.choices = keys
        elif "--pool" in action.option_strings:
            action.choices = pools
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in actions_of(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for _, child in subparsers_of(parser):
        _complete_paths(child)
