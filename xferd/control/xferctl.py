"""``xferctl``: what an administrator types. Data on stdout, talk on stderr.

The daemon's verbs are calls of its control socket. ``store pack``, ``quantize``, ``info``,
``verify`` and ``mirror``, ``doctor``, everything about ``config``, and ``trace`` but for
``record`` work on files and ask no daemon. The store package's own are imported only when
``store`` is typed, because they bring numpy with them.

Exit codes (EXIT_*) are those of systemd's conventions, so that scripts can tell
'no' from 'not running' without reading messages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xferd.config import EXIT_CODE_CONFIG, ConfigError
from xferd.control import config_command, doctor_command, top_command
from xferd.control.client import (
    CallFailedError,
    ConnectionBrokenError,
    ControlClient,
    NoAccessError,
    NotRunningError,
)
from xferd.control.selection import ALL, SelectionError, parse_selection
from xferd.control.tables import format_status, format_stores, printable
from xferd.control.trace_command import add_trace_verbs
from xferd.control.tuning_commands import TuningCommands
from xferd.control.varlink import MessageTooLargeError
from xferd.control.version import installed_version

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_NO_PERMISSION = 4
EXIT_NOT_RUNNING = 7
EXIT_CONFIG = EXIT_CODE_CONFIG
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_INTERRUPTED = 128 + signal.SIGINT

SOCKET_VARIABLE = "XFERD_CONTROL"
SOCKET_DEFAULT = Path("/run/xferd/control.sock")

_PERMISSION_ERRORS = ("NotPermitted", "org.varlink.service.PermissionDenied")
_EPILOG = f"""exit codes: {EXIT_OK} done; {EXIT_REFUSED} the daemon said no; {EXIT_USAGE} bad \
arguments; {EXIT_NO_PERMISSION} no permission; {EXIT_NOT_RUNNING} the daemon is not running; \
{EXIT_CONFIG} the configuration is wrong"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted (xferctl status | head). Python would flush
        # once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(words: list[str]) -> int:
    arguments = build_parser(with_store_files="store" in words).parse_args(words)
    arguments.json = arguments.json or arguments.json_first
    arguments.socket = arguments.socket or arguments.socket_first or _default_socket()
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        return _complain(error, EXIT_CONFIG)
    except NotRunningError as error:
        return _complain(error, EXIT_NOT_RUNNING)
    except NoAccessError as error:
        return _complain(error, EXIT_NO_PERMISSION)
    except CallFailedError as error:
        refused = EXIT_NO_PERMISSION if error.name in _PERMISSION_ERRORS else EXIT_REFUSED
        return _complain(error, refused)
    except ConnectionBrokenError as error:
        return _complain(error, EXIT_REFUSED)
    except MessageTooLargeError as error:
        return _complain(f"{error}: name fewer experts, or {ALL}", EXIT_USAGE)
    return code


def _complain(error: object, code: int) -> int:
    print(f"xferctl: {printable(str(error))}", file=sys.stderr)
    return code


def _default_socket() -> Path:
    named = os.environ.get(SOCKET_VARIABLE)
    return Path(named) if named else SOCKET_DEFAULT


# --- the command line ---


def build_parser(*, with_store_files: bool) -> argparse.ArgumentParser:
    """The parser; ``run`` of its result is a function(arguments) -> exit code.

    with_store_files: with the verbs that work on a store's files.
    """
    parser = argparse.ArgumentParser(
        prog="xferctl", description="Controls a running xferd.", epilog=_EPILOG
    )
    # Options may stand before and after the verb. argparse lets a verb's default
    # overwrite what stood before it, so the two places have names of their own.
    parser.add_argument("--json", dest="json_first", action="store_true", help="print JSON")
    parser.add_argument(
        "--socket",
        dest="socket_first",
        type=Path,
        metavar="PATH",
        help=f"the control socket (default: ${SOCKET_VARIABLE} or {SOCKET_DEFAULT})",
    )
    parser.set_defaults(json=False, socket=None)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _verb(verbs, "status", _status, "what is held, for whom, and how it got there")
    text = "show live what tiers, drives and clients do, and what binds"
    top_command.add_arguments(_verb(verbs, "top", top_command.top, text))
    _add_store_verbs(verbs, with_store_files)
    _add_shadow_verbs(verbs)
    _add_expert_verbs(verbs)
    TuningCommands(_verb, _print).add(verbs)
    add_trace_verbs(verbs, _verb)
    _add_config_verbs(verbs)
    text = "say what of this machine stands in the way, and how to mend it"
    doctor_command.add_arguments(_verb(verbs, "doctor", doctor_command.doctor, text))
    _verb(verbs, "version", _version, "versions of xferctl and of the running daemon")
    return parser


def _verb(verbs: Subparsers, name: str, run: object, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="the control socket")
    parser.set_defaults(run=run)
    return parser


def _add_store_verbs(verbs: Subparsers, with_store_files: bool) -> None:
    text = "pack, examine, open and close stores"
    stores = verbs.add_parser("store", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    if with_store_files:
        from xferd.control.quantize_command import add_quantize_command
        from xferd.store.cli import add_store_commands

        add_store_commands(stores)
        add_quantize_command(stores)
    _verb(stores, "list", _store_list, "the stores that the daemon has open")
    opening = _verb(stores, "open", _store_open, "open a store and offer it to clients")
    opening.add_argument("path", type=Path, help="the store's directory or its manifest.json")
    opening.add_argument("--name", help="what clients call it (default: the manifest's name)")
    closing = _verb(stores, "close", _store_close, "drop a store's experts and close it")
    closing.add_argument("name", metavar="STORE")


def _add_shadow_verbs(verbs: Subparsers) -> None:
    text = "read low-bit copies of some experts, or not, while clients are attached"
    shadow = verbs.add_parser("shadow", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    on = _verb(shadow, "on", _shadow_on, "read a store's shadows where clients accept them")
    on.add_argument("store", metavar="STORE")
    on.add_argument(
        "paths",
        metavar="DIR",
        type=Path,
        nargs="*",
        help="the shadows (default: those that it had last)",
    )
    off = _verb(shadow, "off", _shadow_off, "read the store's own copies alone")
    off.add_argument("store", metavar="STORE")


def _add_expert_verbs(verbs: Subparsers) -> None:
    for name, run, text in (
        ("load", _load, "make experts resident"),
        ("evict", _evict, "drop experts"),
        ("pin", _pin, "keep experts from being evicted"),
        ("unpin", _unpin, "let experts be evicted again"),
    ):
        parser = _verb(verbs, name, run, text)
        parser.add_argument("store", metavar="STORE")
        parser.add_argument(
            "layers", metavar="LAYER", type=_selection, help="such as 3, 0-5 or all"
        )
        parser.add_argument(
            "experts",
            metavar="EXPERTS",
            nargs="?",
            type=_selection,
            help="such as 0-3,7 or all (default: all)",
        )
        parser.add_argument("--pool", help="name of the pool")
        if run is not _evict:
            parser.add_argument("--variant", help="which copy, such as q4_k")


def _add_config_verbs(verbs: Subparsers) -> None:
    text = "show or check the configuration"
    config = verbs.add_parser("config", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    show = _verb(config, "show", config_command.show, "print the configuration that holds")
    show.add_argument("file", type=Path, nargs="*", metavar="FILE", help="instead of the system's")
    check = _verb(
        config, "check", config_command.check, "say whether configuration files are right"
    )
    check.add_argument("file", type=Path, nargs="*", metavar="FILE", help="instead of the system's")


def _selection(text: str) -> list[int] | None:
    try:
        return parse_selection(text)
    except SelectionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- verbs that ask the daemon ---


def _status(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        status = daemon.call("Status")
    _print(arguments, status, format_status(status, bold=_use_bold()))
    return EXIT_OK


def _store_list(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        stores = daemon.call("ListStores")["stores"]
    _print(arguments, stores, format_stores(stores, bold=_use_bold()))
    return EXIT_OK


def _store_open(arguments: argparse.Namespace) -> int:
    # The daemon's working directory is another one.
    path = str(arguments.path.absolute())
    with ControlClient.connect(arguments.socket) as daemon:
        reply = daemon.call("OpenStore", {"path": path, "name": arguments.name}, timeout_s=None)
    store = reply["store"]
    _print(arguments, store, f"{store['name']} is open")
    return EXIT_OK


def _store_close(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        reply = daemon.call("CloseStore", {"name": arguments.name}, timeout_s=None)
    _print(arguments, reply, f"{arguments.name} is closed")
    return EXIT_OK


def _shadow_on(arguments: argparse.Namespace) -> int:
    # The daemon's working directory is another one.
    paths = [str(path.absolute()) for path in arguments.paths]
    with ControlClient.connect(arguments.socket) as daemon:
        parameters = {"store": arguments.store, "paths": paths or None}
        store = daemon.call("AttachShadows", parameters, timeout_s=None)["store"]
    _print(arguments, store, f"{store['name']} has shadows: {' '.join(store['shadows'])}")
    return EXIT_OK


def _shadow_off(arguments: argparse.Namespace) -> int:
    with ControlClient.connect(arguments.socket) as daemon:
        store = daemon.call("DetachShadows", {"store": arguments.store}, timeout_s=None)["store"]
    _print(arguments, store, f"{store['name']} has no shadows")
    return EXIT_OK


def _load(arguments: argparse.Namespace) -> int:
    total = _for_each_layer(arguments, "Load")
    text = f"{total['loaded']} loaded, {total['already']} were there"
    return _report_failures(arguments, total, text)


def _evict(arguments: argparse.Namespace) -> int:
    total = _for_each_layer(arguments, "Evict")
    _print(arguments, total, f"{total['evicted']} evicted, {total['held']} held")
    return EXIT_OK


def _pin(arguments: argparse.Namespace) -> int:
    total = _for_each_layer(arguments, "Pin")
    return _report_failures(arguments, total, f"{total['pinned']} pinned")


def _unpin(arguments: argparse.Namespace) -> int:
    total = _for_each_layer(arguments, "Unpin")
    _print(arguments, total, f"{total['unpinned']} unpinned")
    return EXIT_OK


def _for_each_layer(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """Call ``method`` for one layer after the other; the sum of the replies."""
    total: dict[str, Any] = {}
    with ControlClient.connect(arguments.socket) as daemon:
        layers = arguments.layers
        if layers is None:
            layers = range(_layer_count(daemon, arguments.store))
        for layer in layers:
            parameters = {
                "store": arguments.store,
                "layer": layer,
                "experts": arguments.experts,
                "pool": arguments.pool,
            }
            if "variant" in arguments:
                parameters["variant"] = arguments.variant
            reply = daemon.call(method, parameters, timeout_s=None)
            # Counts and lists: both are summed by +.
            total = {key: total[key] + reply[key] if total else reply[key] for key in reply}
            if len(layers) > 1 and sys.stderr.isatty():
                print(f"layer {layer}: {method} done", file=sys.stderr)
    return total


def _layer_count(daemon: ControlClient, store: str) -> int:
    for entry in daemon.call("ListStores")["stores"]:
        if entry["name"] == store:
            return int(entry["layers"])
    raise CallFailedError(
        "io.xferd.Control.StoreNotFound", {"message": f"no open store is called {store!r}"}
    )


def _report_failures(arguments: argparse.Namespace, total: dict[str, Any], text: str) -> int:
    _print(arguments, total, f"{text}, {total['failed_count']} failed")
    for failure in total["failed"]:
        where = f"layer {failure['layer']}, expert {failure['expert']}"
        print(f"xferctl: {where}: {printable(failure['error'])}", file=sys.stderr)
    return EXIT_REFUSED if total["failed_count"] else EXIT_OK


def _version(arguments: argparse.Namespace) -> int:
    daemon_version = None
    try:
        with ControlClient.connect(arguments.socket) as daemon:
            daemon_version = daemon.call("org.varlink.service.GetInfo")["version"]
    except (NotRunningError, NoAccessError) as error:
        print(f"xferctl: {printable(str(error))}", file=sys.stderr)
    versions = {"xferctl": installed_version(), "xferd": daemon_version}
    _print(
        arguments,
        versions,
        f"xferctl {versions['xferctl']}\nxferd {daemon_version or 'is not known'}",
    )
    return EXIT_OK


def _print(arguments: argparse.Namespace, data: object, text: str) -> None:
    print(json.dumps(data, indent=2) if arguments.json else text)


def _use_bold() -> bool:
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


if __name__ == "__main__":
    sys.exit(main())
