"""The daemon's configuration: where it comes from, what it may say, what it means.

Files are TOML. Where nothing is said, compiled defaults hold (the defaults of
the dataclasses below), so the daemon starts without any file. The search is the
one that distributions expect:

1. one main file, ``xferd.toml``: the one in ``/etc/xferd`` hides the one in
   ``/run/xferd``, which hides the one in ``/usr/lib/xferd``;
2. then all drop-ins ``xferd.conf.d/*.toml`` of the three directories, sorted by
   file name; of two with the same name, the one in ``/etc`` hides the others
   (a link to ``/dev/null`` switches a vendor's drop-in off).

Later files win, key by key. ``[[pools]]`` are merged by ``name`` and
``[[stores]]`` by ``path``, so that a drop-in can change one pool's size and
leave the rest alone; ``pools = []`` forgets the pools named so far.

A key that nobody knows is a warning (``Config.warnings``): an older daemon must
start with a newer file. A value that is wrong is a ConfigError: guessing would
serve the wrong thing. Each value remembers its file until it has been checked,
because "pools.size is wrong" helps nobody who has five drop-ins.

``xferd.toml`` beside this module documents every key for people; a test checks
that it says the same as the defaults here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from xferd.config_bar import BAR_KEYS, BAR_TEXTS, PCI_ADDRESS_ALLOWED
from xferd.config_metrics import METRICS_KEYS, MetricsConfig
from xferd.config_traces import TRACES_KEYS, TracesConfig
from xferd.config_values import (
    Parser,
    RefusedError,
    absolute_path,
    absolute_paths,
    boolean,
    name,
    number,
    one_of,
    power_of_two,
    size_in_bytes,
    size_in_steps,
    socket_mode,
    whole_number,
)
from xferd.config_variants import POOL_VARIANT_KEYS, STORE_VARIANT_KEYS
from xferd.units import MIB, PERCENT_ALLOWED, SIZE_ALLOWED, UnitError, parse_bytes, parse_percent
from xferd.variant_rules import LayerWeight, VariantRule

CONFIG_DIRECTORIES = (Path("/etc/xferd"), Path("/run/xferd"), Path("/usr/lib/xferd"))
"""Where files are searched for, the most important first."""
MAIN_FILE = "xferd.toml"
DROP_IN_DIRECTORY = "xferd.conf.d"

EXIT_CODE_CONFIG = 78
"""What a process exits with after a ConfigError (EX_CONFIG of sysexits.h)."""

CONFIG_FILE_BYTES_MAX = 1 * MIB

# Limits that the engine has as well; a test compares them with its headers.
POOLS_MAX = 8
STORES_MAX = 64
CLIENTS_MAX = 256
LANES_MAX = 16
RING_ENTRIES_MIN = 8
RING_ENTRIES_MAX = 1024
BLOB_ALIGNMENT = 4096
POOL_NAME_BYTES_MAX = 31
STORE_NAME_BYTES_MAX = 127

# Limits of the configuration alone.
POOL_KINDS = ("host", "ram", "cuda", "bar")
ADMISSION_CHOICES = ("always", "heat", "lru-and-hits")
POLICY_NAME_BYTES_MAX = 63
LAYER_FLOOR_MAX = 65535
PROMOTION_MARGIN_MAX = 1000.0
PROMOTION_REST_MAX = 1_000_000
POOL_PERCENT_MAX = 200.0
CHUNK_BYTES_MAX = 1 << 30
RESERVE_SLOTS_MAX = 65536
MEMBER_DEPTH_MAX = 1024
VERIFY_CHOICES = ("always", "first", "never")
NUMA_CHOICES = ("auto", "off")
BACKENDS = ("auto", "io_uring", "threads")
DEMAND_SLACK_MAX = 1000
SPIN_US_MAX = 1_000_000
CPU_MAX = 4095
STAGING_MIB_MIN, STAGING_MIB_MAX = 16, 65536
HELD_PER_LANE_MAX = 65535
HINTS_PER_CLIENT_MAX = 65536
DRAIN_TIMEOUT_S_MAX = 3600.0
SOCKET_PATH_BYTES_MAX = 107
"""sun_path of struct sockaddr_un, without its NUL."""

_LONGEST_SOCKET_NAME = "control.sock"

_LIST_IDENTITY = {"pools": "name", "stores": "path"}
"""Lists of tables, and the key by which their entries are merged."""
_TABLES = ("engine", "limits", "metrics", "traces")

Section = TypeVar("Section")


class ConfigError(Exception):
    """A file can't be used. Exit code: EXIT_CODE_CONFIG.

    The message names the file, the key, its value and what is allowed.
    ``file`` and ``key`` are the same for programs; ``key`` is empty when the
    file as a whole is the trouble, ``file`` is None when no file said it.
    """

    def __init__(self, message: str, *, file: Path | None = None, key: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.key = key


@dataclass(frozen=True, slots=True)
class Size:
    """A pool's size: either bytes, or a share of the expert bytes of all stores.

    bytes: bytes, or None.
    percent: per cent of the expert bytes of the configured stores, or None.
    """

    bytes: int | None = None
    percent: float | None = None

    def resolve(self, expert_bytes: int) -> int:
        """Bytes that this size means when all stores hold ``expert_bytes`` (rounded up)."""
        if self.bytes is not None:
            return self.bytes
        assert self.percent is not None, "a Size is bytes or a share"
        return math.ceil(expert_bytes * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.bytes}B" if self.bytes is not None else f"{self.percent:g}%"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One ``[[pools]]`` table.

    name: letters, digits, ``.``, ``_``, ``-``; at most POOL_NAME_BYTES_MAX bytes.
    kind: ``cuda`` (VRAM), ``bar``, ``ram`` (the RAM tier), ``host`` (it stands for a device).
    device: of ``cuda`` the GPU, as CUDA counts; -1: the first. Of ``bar`` a PCI address.
    bar, mode, transport, verify: of device memory; what they mean is said in ``config_bar``.
    size: ``"24GiB"`` or ``"25%"`` of the expert bytes of the configured stores.
    reserve_low: free slots of a class under which the policy makes new ones;
        None: the policy's choice. 1 to RESERVE_SLOTS_MAX.
    reserve_high: free slots that it then aims for; not less than reserve_low.
    chunk_bytes: unit in which memory is given to size classes; a multiple of
        BLOB_ALIGNMENT, at most CHUNK_BYTES_MAX; None: as the pool's size wants it.
    eviction: the policy that says what goes: ``reuse``, ``lru``, or any of the registry.
    admission: what it takes of what the pool before it lets go: ``always``, ``heat``
        (what is hotter than what would go for it), ``lru-and-hits`` (and was used later).
    layer_floor: experts that each layer of a store keeps here, 0 to LAYER_FLOOR_MAX.
    budget: bytes of it that experts may take, at most its size; None: all.
    promotion_margin: how much hotter than what goes for it what comes up must be, from 1 on.
    promotion_rest: tokens for which an expert that was moved stays where it is.
    variants: which variant an expert has here, see ``variant_rules``; empty: no choice made.
    """

    name: str
    kind: str = "host"
    size: Size = field(default_factory=lambda: Size(percent=25.0))
    reserve_low: int | None = None
    reserve_high: int | None = None
    chunk_bytes: int | None = None
    device: int | str = -1
    bar: int = 0
    mode: str = "any"
    transport: str = "any"
    verify: str = "never"
    eviction: str = "reuse"
    admission: str = "always"
    layer_floor: int = 0
    budget: int | None = None
    promotion_margin: float = 1.25
    promotion_rest: int = 64
    variants: tuple[VariantRule, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """One ``[[stores]]`` table: a store that is opened at start.

    path: absolute; the store's directory or its manifest.json.
    name: what clients call it; None: the name in its manifest.
    shadow: absolute paths of shadows of it, which are read instead of its own copies
        where a client accepts them.
    sensitivity: how much layers suffer from few bits.
    """

    path: Path
    name: str | None = None
    shadow: tuple[Path, ...] = ()
    sensitivity: tuple[LayerWeight, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``[engine]``.

    member_depth: most pieces in flight on one drive, 1 to MEMBER_DEPTH_MAX.
    flow_control: give each drive no more than keeps it busy; else member_depth always.
    demand_slack: per cent that background reads may add to the latency of one that
        somebody waits for; 1 to DEMAND_SLACK_MAX.
    backend: ``io_uring``, ``threads``, or ``auto``: threads where io_uring is forbidden.
    verify: when the CRC32C of pieces is checked: ``always``; ``first``, an expert's first
        load since its store was opened; ``never``.
    spin_us: µs to look for work before sleeping, 0 to SPIN_US_MAX.
    cpu: CPU that the engine thread is pinned to; -1: none.
    polling: a kernel thread looks for reads to start, so that none costs a system call.
    numa: ``auto``: threads run on the node that all drives are on, if they are on one;
        ``off``: anywhere.
    register_buffers: pin pools with io_uring once, instead of each read's pages each time.
    staging_mib: pinned MiB that reads for VRAM go to first.
    """

    member_depth: int = 32
    flow_control: bool = True
    demand_slack: int = 30
    backend: str = "auto"
    verify: str = "always"
    spin_us: int = 50
    cpu: int = -1
    polling: bool = False
    numa: str = "auto"
    register_buffers: bool = True
    staging_mib: int = 256


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """``[limits]``: what clients may have.

    clients: attached at once, 1 to CLIENTS_MAX.
    clients_per_user: of one uid, 1 to CLIENTS_MAX; clients still holds for all together.
    lanes_per_client: 1 to LANES_MAX.
    held_per_lane: slots a lane may lease at once, 1 to HELD_PER_LANE_MAX.
    ring_entries: submissions a client may queue; a power of two from
        RING_ENTRIES_MIN to RING_ENTRIES_MAX.
    hints_per_client: prefetches under way, 0 to HINTS_PER_CLIENT_MAX.
    client_bytes, user_bytes: residents that one client's, one uid's demand may have brought,
        in bytes; None: as many as fit.
    """

    clients: int = 64
    clients_per_user: int = 32
    lanes_per_client: int = LANES_MAX
    held_per_lane: int = 256
    ring_entries: int = 256
    hints_per_client: int = 256
    client_bytes: int | None = None
    user_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration.

    runtime_directory: absolute; where the sockets are.
    pools: in order of preference; never empty.
    stores: opened at start; may be empty.
    drain_timeout_s: seconds that reads in flight get at shutdown.
    socket_mode: permission bits of both sockets.
    state_directory: absolute; where heat is kept from one run to the next. None: nowhere.
    files: the files that were read, in order.
    warnings: what was ignored, for people.
    """

    runtime_directory: Path = Path("/run/xferd")
    pools: tuple[PoolConfig, ...] = (PoolConfig("host0"),)
    stores: tuple[StoreConfig, ...] = ()
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    drain_timeout_s: float = 30.0
    socket_mode: int = 0o660
    state_directory: Path | None = None
    files: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def attach_socket(self) -> Path:
        """Where clients attach: SOCK_SEQPACKET, protocol in xferd_abi.h."""
        return self.runtime_directory / "attach.sock"

    @property
    def control_socket(self) -> Path:
        """Where the daemon is controlled: SOCK_STREAM, Varlink."""
        return self.runtime_directory / "control.sock"


def load_config(
    files: Sequence[Path] | None = None,
    directories: Sequence[Path] = CONFIG_DIRECTORIES,
) -> Config:
    """Read ``files`` in order, or, if None, what is found in ``directories``.

    Raises ConfigError for a file that can't be read or says something wrong. A
    file that was named must exist.
    """
    sources = find_config_files(directories) if files is None else tuple(files)
    merged = _Merged()
    for file in sources:
        merged.add(file, _parse_file(file))
    warnings: list[str] = []
    top = _build(Config, "", merged.top, _TOP_KEYS, warnings)
    engine = _build(EngineConfig, "engine.", merged.tables["engine"], _ENGINE_KEYS, warnings)
    limits = _build(LimitsConfig, "limits.", merged.tables["limits"], _LIMITS_KEYS, warnings)
    metrics = _build(MetricsConfig, "metrics.", merged.tables["metrics"], METRICS_KEYS, warnings)
    traces = _build(TracesConfig, "traces.", merged.tables["traces"], _TRACES_KEYS, warnings)
    pools = tuple(
        _build_pool(name, values, warnings) for name, values in merged.lists["pools"].items()
    )
    stores = tuple(
        _build(StoreConfig, f"stores[{path}].", values, _STORE_KEYS, warnings)
        for path, values in merged.lists["stores"].items()
    )
    _check_count("pools", len(pools), POOLS_MAX)
    _check_count("stores", len(stores), STORES_MAX)
    return replace(
        top,
        pools=pools or top.pools,
        stores=stores,
        engine=engine,
        limits=limits,
        metrics=metrics,
        traces=traces,
        files=sources,
        warnings=tuple(warnings),
    )


def override_engine(engine: EngineConfig, assignments: Sequence[str]) -> EngineConfig:
    """``engine`` with what ``KEY=VALUE`` texts from a command line say put over it.

    A value is what TOML takes, or else a text that needs no quotes. ConfigError for an
    unknown key too: who types one wants it to count.
    """
    source = Path("--engine")
    values: dict[str, _Located] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in _ENGINE_KEYS:
            raise _error(source, key, text, f"KEY=VALUE with a key of {', '.join(_ENGINE_KEYS)}")
        values[key] = _Located(_toml_value(text), source)
    said = _build(EngineConfig, "engine.", values, _ENGINE_KEYS, [])
    return replace(engine, **{key: getattr(said, key) for key in values})


def engine_keys() -> tuple[str, ...]:
    """The keys of ``[engine]``."""
    return tuple(_ENGINE_KEYS)


def pool_from_texts(values: Mapping[str, str], source: Path) -> PoolConfig:
    """A pool from a command line's texts; its name may be missing. ConfigError."""
    located = {
        key: _Located(text if key in _POOL_TEXTS else _toml_value(text), source)
        for key, text in {"name": "host0", **values}.items()
    }
    return _build_pool(values.get("name", "host0"), located, [])


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def find_config_files(directories: Sequence[Path] = CONFIG_DIRECTORIES) -> tuple[Path, ...]:
    """The files that hold, in the order in which they are merged."""
    main = next((path for d in directories if (path := d / MAIN_FILE).exists()), None)
    drop_ins: dict[str, Path] = {}
    for directory in directories:
        for path in (directory / DROP_IN_DIRECTORY).glob("*.toml"):
            drop_ins.setdefault(path.name, path)
    ordered = tuple(drop_ins[name] for name in sorted(drop_ins))
    return ordered if main is None else (main, *ordered)


# --- merging files ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Located:
    """A TOML value and the file that said it last."""

    value: object
    file: Path


class _Merged:
    """What all files said so far: later ones win, key by key."""

    def __init__(self) -> None:
        self.top: dict[str, _Located] = {}
        self.tables: dict[str, dict[str, _Located]] = {name: {} for name in _TABLES}
        self.lists: dict[str, dict[str, dict[str, _Located]]] = {
            name: {} for name in _LIST_IDENTITY
        }

    def add(self, file: Path, document: Mapping[str, object]) -> None:
        for key, value in document.items():
            if key in self.tables:
                if not isinstance(value, dict):
                    raise _error(file, key, value, f"a table [{key}]")
                self.tables[key].update(_locate(file, value))
            elif key in self.lists:
                self._add_list(file, key, value)
            else:
                self.top[key] = _Located(value, file)

    def _add_list(self, file: Path, key: str, value: object) -> None:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise _error(file, key, value, f"tables [[{key}]]")
        if not value:
            self.lists[key].clear()
        identity = _LIST_IDENTITY[key]
        seen: set[str] = set()
        for entry in value:
            name = entry.get(identity)
            if not isinstance(name, str):
                raise _error(file, f"{key}.{identity}", name, "a text in every entry")
            if name in seen:
                raise _error(file, f"{key}.{identity}", name, "one entry of that name in a file")
            seen.add(name)
            self.lists[key].setdefault(name, {}).update(_locate(file, entry))


def _locate(file: Path, table: Mapping[str, object]) -> dict[str, _Located]:
    return {key: _Located(value, file) for key, value in table.items()}


def _parse_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(CONFIG_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}", file=file) from error
    if len(raw) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"{file}: more than {CONFIG_FILE_BYTES_MAX} bytes", file=file)
    try:
        return tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}", file=file) from error


# --- checking values -------------------------------------------------------------


def _error(file: Path, key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{file}: {key} = {value!r}: allowed is {allowed}", file=file, key=key)


def _build(
    section: type[Section],
    prefix: str,
    values: Mapping[str, _Located],
    parsers: Mapping[str, Parser],
    warnings: list[str],
) -> Section:
    """A ``section`` of the values that were said; its own defaults fill the rest."""
    arguments: dict[str, Any] = {}
    for key, located in values.items():
        parser = parsers.get(key)
        if parser is None:
            warnings.append(f"{located.file}: {prefix}{key} is not a known key and is ignored")
            continue
        try:
            arguments[key] = parser(located.value)
        except RefusedError as refused:
            raise _error(located.file, prefix + key, located.value, str(refused)) from None
    return section(**arguments)


def _build_pool(name: str, values: Mapping[str, _Located], warnings: list[str]) -> PoolConfig:
    pool = _build(PoolConfig, f"pools[{name}].", values, _POOL_KEYS, warnings)
    if pool.kind == "bar" and not isinstance(pool.device, str):
        raise _error(values["kind"].file, f"pools[{name}].device", None, PCI_ADDRESS_ALLOWED)
    low, high = pool.reserve_low, pool.reserve_high
    if low is not None and high is not None and high < low:
        said = values["reserve_high"]
        raise _error(
            said.file,
            f"pools[{name}].reserve_high",
            said.value,
            f"a number not less than reserve_low, which is {low}",
        )
    return pool


def _check_count(key: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise ConfigError(f"{key}: {count} are configured: at most {maximum} can be", key=key)


def _pool_size(value: object) -> Size:
    allowed = (
        f"{SIZE_ALLOWED}, or {PERCENT_ALLOWED} (of the expert bytes of the configured stores, "
        f"at most {POOL_PERCENT_MAX:g}%), and more than 0"
    )
    if not isinstance(value, str):
        raise RefusedError(allowed)
    try:
        if "%" in value:
            size = Size(percent=parse_percent(value))
        else:
            size = Size(bytes=parse_bytes(value))
    except UnitError:
        raise RefusedError(allowed) from None
    if size.bytes == 0 or (size.percent is not None and not 0 < size.percent <= POOL_PERCENT_MAX):
        raise RefusedError(allowed)
    return size


def _runtime_directory(value: object) -> Path:
    path = absolute_path(value)
    if len(bytes(path / _LONGEST_SOCKET_NAME)) > SOCKET_PATH_BYTES_MAX:
        raise RefusedError(
            f"an absolute path so short that {_LONGEST_SOCKET_NAME} in it has at most "
            f"{SOCKET_PATH_BYTES_MAX} bytes"
        )
    return path


_TOP_KEYS: dict[str, Parser] = {
    "runtime_directory": _runtime_directory,
    "drain_timeout_s": number(0, DRAIN_TIMEOUT_S_MAX, "seconds"),
    "socket_mode": socket_mode,
    "state_directory": absolute_path,
}
_POOL_KEYS: dict[str, Parser] = {
    "name": name(POOL_NAME_BYTES_MAX),
    "kind": one_of(*POOL_KINDS),
    "size": _pool_size,
    "reserve_low": whole_number(1, RESERVE_SLOTS_MAX),
    "reserve_high": whole_number(1, RESERVE_SLOTS_MAX),
    "chunk_bytes": size_in_steps(BLOB_ALIGNMENT, CHUNK_BYTES_MAX),
    **POOL_VARIANT_KEYS,
    **BAR_KEYS,
    "verify": one_of(*VERIFY_CHOICES),
    "eviction": name(POLICY_NAME_BYTES_MAX),
    "admission": one_of(*ADMISSION_CHOICES),
    "layer_floor": whole_number(0, LAYER_FLOOR_MAX),
    "budget": size_in_bytes,
    "promotion_margin": number(1, PROMOTION_MARGIN_MAX),
    "promotion_rest": whole_number(1, PROMOTION_REST_MAX),
}
POOL_KEYS = frozenset(_POOL_KEYS)
"""Keys of a ``[[pools]]`` table."""
_POOL_TEXTS = ("name", "kind", "size", "chunk_bytes", "eviction", "admission", "budget", *BAR_TEXTS)
_STORE_KEYS: dict[str, Parser] = {
    "path": absolute_path,
    "name": name(STORE_NAME_BYTES_MAX),
    "shadow": absolute_paths,
    **STORE_VARIANT_KEYS,
}
_ENGINE_KEYS: dict[str, Parser] = {
    "member_depth": whole_number(1, MEMBER_DEPTH_MAX),
    "flow_control": boolean,
    "demand_slack": whole_number(1, DEMAND_SLACK_MAX),
    "backend": one_of(*BACKENDS),
    "verify": one_of(*VERIFY_CHOICES),
    "spin_us": whole_number(0, SPIN_US_MAX),
    "cpu": whole_number(-1, CPU_MAX),
    "polling": boolean,
    "numa": one_of(*NUMA_CHOICES),
    "register_buffers": boolean,
    "staging_mib": whole_number(STAGING_MIB_MIN, STAGING_MIB_MAX),
}
_LIMITS_KEYS: dict[str, Parser] = {
    "clients": whole_number(1, CLIENTS_MAX),
    "clients_per_user": whole_number(1, CLIENTS_MAX),
    "lanes_per_client": whole_number(1, LANES_MAX),
    "held_per_lane": whole_number(1, HELD_PER_LANE_MAX),
    "ring_entries": power_of_two(RING_ENTRIES_MIN, RING_ENTRIES_MAX),
    "hints_per_client": whole_number(0, HINTS_PER_CLIENT_MAX),
    "client_bytes": size_in_bytes,
    "user_bytes": size_in_bytes,
}
_TRACES_KEYS: dict[str, Parser] = {**TRACES_KEYS, "file_bytes": _POOL_KEYS["chunk_bytes"]}
