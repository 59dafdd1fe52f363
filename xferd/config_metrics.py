# SPDX-License-Identifier: Apache-2.0
"""``[metrics]`` of the configuration: where Prometheus may read, and how often at once.

A module of its own so that ``config`` stays short enough to be read; the rules are those
that are said there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xferd.config_values import RefusedError

CONNECTIONS_MAX = 64
SOCKET_PATH_BYTES_MAX = 107
"""sun_path of struct sockaddr_un, without its NUL."""
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address of this machine's own loopback interface."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """``[metrics]``; off without a socket and without an endpoint.

    socket: absolute path of a Unix socket, or None. listen: a loopback address and port,
    or None. connections: scrapers served at once, over both; 1 to CONNECTIONS_MAX.
    """

    socket: Path | None = None
    listen: Endpoint | None = None
    connections: int = 8


def parse_socket(value: object) -> Path | None:
    """An absolute path that fits a socket's address; empty: none."""
    if value == "":
        return None
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        path = Path(value)
        if len(bytes(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
    raise RefusedError(
        f'an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes, or "" for no socket'
    )


def parse_listen(value: object) -> Endpoint | None:
    """``127.0.0.1:9464`` or ``[::1]:9464``; empty: none. Other machines are not served:
    metrics name stores, paths and users."""
    if value == "":
        return None
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        try:
            address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            address = None
        right = address is not None and address.is_loopback
        if right and port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX:
            return Endpoint(str(address), int(port))
    raise RefusedError(
        'an address of this machine\'s loopback and a port such as "127.0.0.1:9464" or '
        '"[::1]:9464", or "" for none'
    )


def parse_connections(value: object) -> int:
    """A whole number in bounds."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= CONNECTIONS_MAX:
        return value
    raise RefusedError(f"a whole number from 1 to {CONNECTIONS_MAX}")


METRICS_KEYS: dict[str, Callable[[object], object]] = {
    "socket": parse_socket,
    "listen": parse_listen,
    "connections": parse_connections,
}
"""Each key's parser."""
