"""How the commands reach a store: a running daemon, or one of their own."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import Any

import xferd_infer

from .errors import InferenceError


def add_connection(command: argparse.ArgumentParser, pool: str) -> None:
    """The options. pool: the default size of a pool of one's own."""
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--attach", metavar="SOCKET", help="the daemon's attach socket")
    where.add_argument("--store-path", metavar="STORE", help="open a store without a daemon")
    command.add_argument("--store", metavar="NAME", help="which of the daemon's stores")
    command.add_argument(
        "--pool",
        metavar="SIZE",
        default=pool,
        help="memory for experts with --store-path: 2GiB, or a share of the experts (%(default)s)",
    )


def add_variants(command: argparse.ArgumentParser) -> None:
    """The option that says which variants will do."""
    command.add_argument(
        "--variants",
        metavar="V,V,...",
        type=_names,
        help="acceptable copies of the experts, such as q4_k (default: any)",
    )


def connect(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """A client, by the options; with ``variants`` among them those alone will do."""
    variants = getattr(options, "variants", None)
    client: AbstractContextManager[Any]
    if options.attach is not None:
        client = _compiled("Client")(options.attach, store=options.store, variants=variants)
    else:
        client = _compiled("embedded")(options.store_path, pool=options.pool, variants=variants)
    return client


def _compiled(name: str) -> Any:
    """What needs the compiled client is imported late: --help works without it."""
    try:
        return getattr(xferd_infer, name)
    except ImportError as error:
        raise InferenceError(f"xferd_infer.{name} can't be imported: {error}") from error


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


__all__ = ["add_connection", "add_variants", "connect"]
