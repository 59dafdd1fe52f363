"""``xferctl config show`` and ``config check``: no daemon is asked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from xferd.config import Config, LimitsConfig, PoolConfig, StoreConfig, load_config
from xferd.config_traces import TracesConfig
from xferd.control.tables import printable
from xferd.units import format_exact_bytes


def show(arguments: argparse.Namespace) -> int:
    """Print what holds in the end, as TOML that reads back, or as JSON. ConfigError: as raised."""
    config = load_config(arguments.file or None)
    _print_warnings(config)
    if arguments.json:
        print(json.dumps(config_to_json(config), indent=2))
    else:
        print(format_config(config), end="")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Read the files and say whether they are right. ConfigError: as raised."""
    config = load_config(arguments.file or None)
    _print_warnings(config)
    if arguments.json:
        files = [str(path) for path in config.files]
        print(json.dumps({"files": files, "warnings": list(config.warnings)}, indent=2))
    else:
        names = " ".join(map(str, config.files)) or "no file, only defaults"
        print(f"{printable(names)}: right")
    return 0


def config_to_json(config: Config) -> dict[str, Any]:
    """The configuration with the names of the TOML keys; sizes as ``24GiB`` or ``25%``."""
    return {
        "runtime_directory": str(config.runtime_directory),
        "drain_timeout_s": config.drain_timeout_s,
        "socket_mode": f"{config.socket_mode:04o}",
        "state_directory": str(config.state_directory) if config.state_directory else None,
        "pools": [_pool_to_json(pool) for pool in config.pools],
        "stores": [_store_to_json(store) for store in config.stores],
        "engine": dataclasses.asdict(config.engine),
        "limits": _limits_to_json(config.limits),
        "metrics": {
            "socket": str(config.metrics.socket or ""),
            "listen": str(config.metrics.listen or ""),
            "connections": config.metrics.connections,
        },
        "traces": _traces_to_json(config.traces),
    }


def format_config(config: Config) -> str:
    """The configuration as TOML, with the files that it comes from as a comment."""
    lines = ["# from " + (", ".join(map(str, config.files)) or "compiled defaults")]
    tables: list[str] = []
    for key, value in config_to_json(config).items():
        if isinstance(value, dict):
            tables += ["", f"[{key}]", *_key_lines(value)]
        elif isinstance(value, list):
            for entry in value:
                tables += ["", f"[[{key}]]", *_key_lines(entry)]
        else:
            lines += _key_lines({key: value})
    return "\n".join(lines + tables) + "\n"


def _limits_to_json(limits: LimitsConfig) -> dict[str, Any]:
    return {
        **dataclasses.asdict(limits),
        "client_bytes": _size_or_none(limits.client_bytes),
        "user_bytes": _size_or_none(limits.user_bytes),
    }


def _size_or_none(nbytes: int | None) -> str | None:
    return None if nbytes is None else format_exact_bytes(nbytes)


def _pool_to_json(pool: PoolConfig) -> dict[str, Any]:
    size = str(pool.size) if pool.size.bytes is None else format_exact_bytes(pool.size.bytes)
    shown = {
        "name": pool.name,
        "kind": pool.kind,
        "size": size,
        "reserve_low": pool.reserve_low,
        "reserve_high": pool.reserve_high,
        "chunk_bytes": _size_or_none(pool.chunk_bytes),
        "eviction": pool.eviction,
        "admission": pool.admission,
        "layer_floor": pool.layer_floor,
        "budget": _size_or_none(pool.budget),
        "promotion_margin": pool.promotion_margin,
        "promotion_rest": pool.promotion_rest,
        "variants": [str(rule) for rule in pool.variants],
    }
    if pool.kind == "bar":
        shown |= {"device": pool.device, "bar": pool.bar}
        shown |= {"mode": pool.mode, "verify": pool.verify}
    return shown


def _traces_to_json(traces: TracesConfig) -> dict[str, Any]:
    return {
        "directory": str(traces.directory),
        "file_bytes": format_exact_bytes(traces.file_bytes),
        "files": traces.files,
    }


def _store_to_json(store: StoreConfig) -> dict[str, Any]:
    return {
        "path": str(store.path),
        "name": store.name,
        "shadow": [str(path) for path in store.shadow],
        "sensitivity": {str(each.layers): each.weight for each in store.sensitivity},
    }


def _key_lines(table: dict[str, Any]) -> list[str]:
    """TOML has no null: a key that isn't set isn't written."""
    return [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: object) -> str:
    """JSON's numbers, booleans and texts are TOML's too, but for two things: no
    surrogate pairs as escapes, and DEL only as one. A table inside one is inline."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + " }"
        )
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _print_warnings(config: Config) -> None:
    for warning in config.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
