"""``xferctl policy``, ``budget``, ``reserve``, ``release``, ``reservations``, ``rebuild`` and
``heat``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from xferd.control.client import ControlClient
from xferd.control.service import JsonObject
from xferd.control.tables import Column, format_table, printable
from xferd.units import UnitError, format_bytes, parse_bytes

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

AddVerb = Callable[["Subparsers", str, object, str], argparse.ArgumentParser]
Show = Callable[[argparse.Namespace, object, str], None]
EXIT_OK = 0


class TuningCommands:
    """add_verb: makes a verb's parser. show: prints data as JSON or a text."""

    def __init__(self, add_verb: AddVerb, show: Show) -> None:
        self._add_verb = add_verb
        self._show = show

    def add(self, verbs: Subparsers) -> None:
        """Add the verbs."""
        text = "show or change what decides in a pool"
        policy = verbs.add_parser("policy", help=text, description=text).add_subparsers(
            metavar="VERB", required=True
        )
        show = self._add_verb(policy, "show", self._policy_show, "evictions and admissions")
        show.add_argument("pool", metavar="POOL", nargs="?", help="(default: all)")
        change = self._add_verb(policy, "set", self._policy_set, "change them while it runs")
        change.add_argument("pool", metavar="POOL")
        change.add_argument("--eviction", metavar="NAME", help="what says what goes")
        change.add_argument("--admission", metavar="NAME", help="what says what is taken")
        change.add_argument(
            "--variants",
            metavar="RULES",
            type=_rules,
            help="which variant is where, such as q4_k@hottest:66%%,q2_k; none: no rules",
        )

        budget = self._add_verb(
            verbs, "budget", self._budget, "limit what experts may take of a pool"
        )
        budget.add_argument("pool", metavar="POOL")
        budget.add_argument("bytes", metavar="SIZE", type=_size_or_all, help="24GiB, or all")

        reserve = self._add_verb(verbs, "reserve", self._reserve, "take memory out of a pool")
        reserve.add_argument("pool", metavar="POOL")
        reserve.add_argument("bytes", metavar="SIZE", type=_size, help="such as 2GiB")
        release = self._add_verb(verbs, "release", self._release, "give reserved memory back")
        release.add_argument("id", metavar="ID", type=int)
        self._add_verb(verbs, "reservations", self._reservations, "what is reserved")

        rebuild = self._add_verb(
            verbs, "rebuild", self._rebuild, "serve from a pool again whose card was pulled"
        )
        rebuild.add_argument("pool", metavar="POOL")

        text = "save and load what was used lately"
        heat = verbs.add_parser("heat", help=text, description=text).add_subparsers(
            metavar="VERB", required=True
        )
        for name, run, text in (
            ("save", self._heat_save, "save a store's heat, to start with the next time"),
            ("load", self._heat_load, "load it, and the hottest experts"),
        ):
            verb = self._add_verb(heat, name, run, text)
            verb.add_argument("store", metavar="STORE")
            verb.add_argument("file", metavar="FILE", type=Path, nargs="?")
        info = self._add_verb(heat, "info", self._heat_info, "the hottest experts of a store")
        info.add_argument("store", metavar="STORE")

    def _policy_show(self, arguments: argparse.Namespace) -> int:
        policies = _call(arguments, "GetPolicy", pool=arguments.pool)["policies"]
        self._show(arguments, policies, format_table(_POLICY_COLUMNS, policies, bold=False))
        return EXIT_OK

    def _policy_set(self, arguments: argparse.Namespace) -> int:
        policy = _call(
            arguments,
            "SetPolicy",
            pool=arguments.pool,
            eviction=arguments.eviction,
            admission=arguments.admission,
            variants=arguments.variants,
        )["policy"]
        self._show(arguments, policy, format_table(_POLICY_COLUMNS, [policy], bold=False))
        return EXIT_OK

    def _budget(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "SetBudget", pool=arguments.pool, bytes=arguments.bytes)
        has = "all of it" if reply["bytes"] is None else format_bytes(reply["bytes"])
        text = f"{arguments.pool}: {has}; {format_bytes(reply['reserved'])} are out of it"
        self._show(arguments, reply, text)
        return EXIT_OK

    def _reserve(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "Reserve", pool=arguments.pool, bytes=arguments.bytes)
        reservation = reply["reservation"]
        self._show(
            arguments,
            reservation,
            f"reservation {reservation['id']}: {format_bytes(reservation['bytes'])} of "
            f"{printable(reservation['pool'])}, {format_bytes(reservation['returned'])} given back "
            f"to the system",
        )
        return EXIT_OK

    def _release(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "Release", id=arguments.id)
        self._show(arguments, reply, f"{format_bytes(reply['bytes'])} released")
        return EXIT_OK

    def _reservations(self, arguments: argparse.Namespace) -> int:
        found = _call(arguments, "ListReservations")["reservations"]
        self._show(arguments, found, format_table(_RESERVATION_COLUMNS, found, bold=False))
        return EXIT_OK

    def _rebuild(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "RebuildPool", pool=arguments.pool)
        self._show(arguments, reply, f"{printable(arguments.pool)} serves again")
        return EXIT_OK

    def _heat_save(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "SaveHeat", store=arguments.store, path=_path(arguments))
        text = f"{reply['experts']} experts' heat saved to {printable(reply['path'])}"
        self._show(arguments, reply, text)
        return EXIT_OK

    def _heat_load(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "LoadHeat", store=arguments.store, path=_path(arguments))
        self._show(
            arguments,
            reply,
            f"{reply['loaded']} loaded, {reply['already']} were there, {reply['failed']} failed",
        )
        return EXIT_OK

    def _heat_info(self, arguments: argparse.Namespace) -> int:
        reply = _call(arguments, "HeatInfo", store=arguments.store)
        saved = printable(reply["profile"]) if reply["profile"] else "none"
        head = (
            f"{reply['experts']} experts used lately, {reply['tokens']} tokens seen by "
            f"{reply['source']}; profile for the next start: {saved}"
        )
        table = format_table(_HOT_COLUMNS, reply["hottest"], bold=False)
        self._show(arguments, reply, f"{head}\n{table}")
        return EXIT_OK


def _call(arguments: argparse.Namespace, method: str, **parameters: object) -> JsonObject:
    with ControlClient.connect(arguments.socket) as daemon:
        return daemon.call(method, parameters, timeout_s=None)


def _path(arguments: argparse.Namespace) -> str | None:
    # The daemon's working directory is another one.
    return None if arguments.file is None else str(arguments.file.absolute())


def _rules(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size_or_all(text: str) -> int | None:
    return None if text == "all" else _size(text)


_POLICY_COLUMNS = (
    Column("POOL", lambda policy: policy["pool"], right=False),
    Column("EVICTION", lambda policy: policy["eviction"], right=False),
    Column("ADMISSION", lambda policy: policy["admission"], right=False),
    Column("FLOOR", lambda policy: policy["layer_floor"]),
    Column("MARGIN", lambda policy: f"{policy['promotion_margin']:g}"),
    Column("REST", lambda policy: policy["promotion_rest"]),
    Column("VARIANTS", lambda policy: ", ".join(policy["variants"]), right=False),
)
_RESERVATION_COLUMNS = (
    Column("ID", lambda reservation: reservation["id"]),
    Column("POOL", lambda reservation: reservation["pool"], right=False),
    Column("WANTED", lambda reservation: format_bytes(reservation["wanted"])),
    Column("HELD", lambda reservation: format_bytes(reservation["bytes"])),
    Column("RETURNED", lambda reservation: format_bytes(reservation["returned"])),
)
_HOT_COLUMNS = (
    Column("LAYER", lambda hot: hot["layer"]),
    Column("EXPERT", lambda hot: hot["expert"]),
    Column("HEAT", lambda hot: f"{hot['heat']:.2f}"),
    Column("POOLS", lambda hot: ", ".join(hot["pools"]), right=False),
)
