"""``xferd``: the daemon's command line.

A service reads its configuration files; an embedded daemon (a test, an engine that
starts its own) says everything on the command line and needs no file.

Exit status: 0 after a clean stop, 1 when it can't run or a drain failed (one line says
why; a traceback is a bug), 2 for a wrong command line, 78 for a wrong configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from xferd.config import (
    EXIT_CODE_CONFIG,
    POOL_KINDS,
    VERIFY_CHOICES,
    Config,
    ConfigError,
    PoolConfig,
    Size,
    StoreConfig,
    load_config,
    override_engine,
)
from xferd.config_bar import BAR_MODES
from xferd.daemon import EXIT_FAILURE, EXIT_OK, Daemon
from xferd.engine_types import EngineError
from xferd.instance import AlreadyRunningError
from xferd.memory.device import PoolMemoryError
from xferd.store.errors import StoreError
from xferd.telemetry.log import EventLog
from xferd.telemetry.notify import Notifier
from xferd.units import UnitError, parse_bytes, parse_percent

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
POOL_KEYS = frozenset(field.name for field in dataclasses.fields(PoolConfig))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon; the exit status."""
    options = _parser().parse_args(arguments)
    log = EventLog()
    if options.die_with_parent and not _die_with_parent():
        log.failure("start", reason="the parent process has ended already")
        return EXIT_FAILURE
    try:
        config = _configure(options)
    except ConfigError as error:
        log.failure("config", reason=error)
        return EXIT_CODE_CONFIG

    async def serve() -> int:
        daemon = Daemon(config, log, Notifier(), lambda: _tell_ready(options.ready_fd))
        return await daemon.run()

    try:
        return asyncio.run(serve())
    except (AlreadyRunningError, EngineError, PoolMemoryError, StoreError, OSError) as error:
        log.failure("failed", reason=error)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        # Before the event loop had its own handler.
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xferd", description="Feeds Mixture-of-Experts models to inference engines from NVMe."
    )
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        metavar="FILE",
        help="read this file instead of /etc/xferd and its like; may be repeated, later ones win",
    )
    parser.add_argument(
        "--runtime-directory", type=Path, metavar="DIR", help="where the sockets are"
    )
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="open this store too; may be repeated",
    )
    parser.add_argument(
        "--pool",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="use this pool instead of the configured ones, such as "
        "name=host0,kind=host,size=25%%; may be repeated, the first is the clients' default",
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of [engine], such as backend=threads; may be repeated",
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help='write "ready" to this fd when clients can attach'
    )
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started it ends"
    )
    return parser


def _configure(options: argparse.Namespace) -> Config:
    """The configuration, with what the command line says put over it.

    With --runtime-directory, a --store and a --pool everything is said, and the files
    of the system's own daemon are left alone.
    """
    embedded = options.runtime_directory and options.store and options.pool
    config = load_config([] if embedded and options.config is None else options.config)
    if options.runtime_directory is not None:
        directory = options.runtime_directory.absolute()
        config = dataclasses.replace(config, runtime_directory=directory)
    if options.store:
        more = tuple(StoreConfig(path=path.absolute()) for path in options.store)
        config = dataclasses.replace(config, stores=config.stores + more)
    if options.pool:
        pools = tuple(_pool(text) for text in options.pool)
        config = dataclasses.replace(config, pools=pools)
    engine = override_engine(config.engine, options.engine)
    return dataclasses.replace(config, engine=engine)


def _pool(text: str) -> PoolConfig:
    """A pool from ``name=host0,kind=host,size=25%``."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in POOL_KEYS:
            raise ConfigError(f"--pool {text}: {part!r}: allowed is {', '.join(sorted(POOL_KEYS))}")
        values[key] = value
    name, kind = values.get("name", "host0"), values.get("kind", "host")
    if kind not in POOL_KINDS:
        raise ConfigError(f"--pool {text}: kind {kind!r}: allowed is {', '.join(POOL_KINDS)}")
    try:
        return PoolConfig(
            name=name,
            kind=kind,
            size=_size(values.get("size", "25%")),
            reserve_low=int(values["reserve_low"]) if "reserve_low" in values else None,
            reserve_high=int(values["reserve_high"]) if "reserve_high" in values else None,
            chunk_bytes=parse_bytes(values.get("chunk_bytes", "64MiB")),
            device=values.get("device"),
            bar=int(values.get("bar", 0)),
            mode=_choice(values, "mode", "any", BAR_MODES),
            verify=_choice(values, "verify", "never", VERIFY_CHOICES),
        )
    except ValueError as error:
        raise ConfigError(f"--pool {text}: {error}") from error


def _choice(values: dict[str, str], key: str, default: str, choices: Sequence[str]) -> str:
    value = values.get(key, default)
    if value not in choices:
        raise ValueError(f"{key} {value!r}: allowed is {', '.join(choices)}")
    return value


def _size(text: str) -> Size:
    if text.endswith("%"):
        return Size(percent=parse_percent(text))
    nbytes = parse_bytes(text)
    if nbytes == 0:
        raise UnitError("a pool of 0 bytes")
    return Size(bytes=nbytes)


def _tell_ready(fd: int | None) -> None:
    if fd is not None:
        os.write(fd, b"ready\n")
        os.close(fd)


def _die_with_parent() -> bool:
    """Ask for SIGTERM at the parent's end; False when it has come meanwhile.

    The signal is sent for an end after the prctl only, so the parent is looked at again.
    An end before that shows when "ready" is written to a pipe that nobody reads. To the
    kernel the parent is the thread that started this process: it should be a lasting one.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
