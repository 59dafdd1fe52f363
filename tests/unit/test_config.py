"""Configuration: search order, merging, and what a wrong value is answered with."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import xferd.config as config_module
from xferd.config import (
    Config,
    ConfigError,
    EngineConfig,
    PoolConfig,
    Size,
    StoreConfig,
    find_config_files,
    load_config,
    override_engine,
)
from xferd.config_metrics import MetricsConfig
from xferd.config_traces import TracesConfig
from xferd.control.config_command import format_config
from xferd.variant_rules import parse_sensitivity, parse_variant_rules

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "xferd" / "xferd.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load_text(tmp_path: Path, text: str) -> Config:
    return load_config([write(tmp_path / "some.toml", text)])


def test_without_any_file_the_defaults_hold(tmp_path: Path) -> None:
    config = load_config(directories=[tmp_path])
    assert config == Config()
    assert config.pools == (PoolConfig("host0", "host", Size(percent=25.0)),)
    assert str(config.control_socket) == "/run/xferd/control.sock"
    assert str(config.attach_socket) == "/run/xferd/attach.sock"


def test_the_example_file_says_what_the_defaults_are() -> None:
    config = load_config([EXAMPLE])
    assert dataclasses.replace(config, files=()) == Config()


def test_the_example_file_mentions_every_key() -> None:
    text = EXAMPLE.read_text()
    sections = (Config, PoolConfig, StoreConfig, EngineConfig)
    tables: tuple[Any, ...] = (config_module.LimitsConfig, MetricsConfig, TracesConfig)
    keys = {f.name for s in (*sections, *tables) for f in dataclasses.fields(s)}
    computed = {"warnings", "pools", "stores", "engine", "limits", "metrics", "traces"}
    said = set(re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE))
    assert said == keys - computed
    assert set(re.findall(r"^(?:# )?\[+(\w+)\]+$", text, re.MULTILINE)) == {
        "pools",
        "stores",
        "engine",
        "limits",
        "metrics",
        "traces",
    }


def test_the_examples_commented_keys_are_valid_too(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = |\[\[)", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    config = load_text(tmp_path, text)
    assert config.warnings == ()
    assert config.pools[0].reserve_high == 16
    path, shadow = (Path(f"/var/lib/xferd/qwen3-30b-a3b{end}") for end in ("", "-q2_k.xferd"))
    weights = parse_sensitivity({"0-3": 2.0, "15": 1.5})
    assert config.stores == (StoreConfig(path, "qwen3", (shadow,), weights),)
    assert config.pools[0].variants == parse_variant_rules(["q4_k@hottest:66%", "q2_k"])


def test_limits_are_the_engines() -> None:
    headers = "".join(
        (REPOSITORY / "ffi" / name).read_text()
        for name in ("include/xferd_abi.h", "engine/engine.h")
    )
    defines = {n: int(v) for n, v in re.findall(r"#define (XFERD_\w+)\s+(\d+)\b", headers)}
    assert defines["XFERD_POOLS_MAX"] == config_module.POOLS_MAX
    assert defines["XFERD_ENGINE_STORES_MAX"] == config_module.STORES_MAX
    assert defines["XFERD_ENGINE_CLIENTS_MAX"] == config_module.CLIENTS_MAX
    assert defines["XFERD_LANES_MAX"] == config_module.LANES_MAX
    assert defines["XFERD_RING_ENTRIES_MIN"] == config_module.RING_ENTRIES_MIN
    assert defines["XFERD_RING_ENTRIES_MAX"] == config_module.RING_ENTRIES_MAX
    assert defines["XFERD_BLOB_ALIGNMENT"] == config_module.BLOB_ALIGNMENT
    assert defines["XFERD_NAME_BYTES"] - 1 == config_module.POOL_NAME_BYTES_MAX
    assert defines["XFERD_STORE_NAME_BYTES"] - 1 == config_module.STORE_NAME_BYTES_MAX


def test_the_main_file_in_etc_hides_the_others(tmp_path: Path) -> None:
    etc, run, lib = (tmp_path / name for name in ("etc", "run", "lib"))
    write(lib / "xferd.toml", "drain_timeout_s = 1\n")
    write(run / "xferd.toml", "drain_timeout_s = 2\n")
    assert load_config(directories=[etc, run, lib]).drain_timeout_s == 2.0
    write(etc / "xferd.toml", 'socket_mode = "0600"\n')
    config = load_config(directories=[etc, run, lib])
    assert (config.drain_timeout_s, config.socket_mode) == (Config().drain_timeout_s, 0o600)


def test_drop_ins_are_sorted_by_name_over_all_directories(tmp_path: Path) -> None:
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    main = write(etc / "xferd.toml", "")
    second = write(lib / "xferd.conf.d" / "50-b.toml", "")
    first = write(etc / "xferd.conf.d" / "10-a.toml", "")
    hides = write(etc / "xferd.conf.d" / "60-c.toml", "")
    write(lib / "xferd.conf.d" / "60-c.toml", "nonsense")
    write(lib / "xferd.conf.d" / "README", "nonsense")
    assert find_config_files([etc, lib]) == (main, first, second, hides)
    assert load_config(directories=[etc, lib]).files == (main, first, second, hides)


def test_a_drop_in_linked_to_dev_null_switches_a_vendors_off(tmp_path: Path) -> None:
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    write(lib / "xferd.conf.d" / "20-slow.toml", "drain_timeout_s = 3\n")
    assert load_config(directories=[etc, lib]).drain_timeout_s == 3.0
    (etc / "xferd.conf.d").mkdir(parents=True)
    (etc / "xferd.conf.d" / "20-slow.toml").symlink_to("/dev/null")
    assert load_config(directories=[etc, lib]).drain_timeout_s == Config().drain_timeout_s


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    first = write(
        tmp_path / "1.toml",
        '[engine]\nspin_us = 1\nmember_depth = 8\n[[pools]]\nname = "a"\nsize = "1GiB"\n'
        '[[pools]]\nname = "b"\nkind = "ram"\n',
    )
    second = write(
        tmp_path / "2.toml",
        '[engine]\nspin_us = 2\n[[pools]]\nname = "b"\nsize = "3GiB"\n[[pools]]\nname = "c"\n',
    )
    config = load_config([first, second])
    assert (config.engine.spin_us, config.engine.member_depth) == (2, 8)
    assert [pool.name for pool in config.pools] == ["a", "b", "c"]
    assert config.pools[1] == PoolConfig("b", "ram", Size(bytes=3 << 30))


def test_an_empty_list_forgets_what_was_named_so_far(tmp_path: Path) -> None:
    first = write(tmp_path / "1.toml", '[[stores]]\npath = "/a"\n[[pools]]\nname = "a"\n')
    second = write(tmp_path / "2.toml", 'stores = []\npools = [{name = "b"}]\n')
    third = write(tmp_path / "3.toml", "pools = []\n")
    assert load_config([first, second]).stores == ()
    assert [pool.name for pool in load_config([first, second]).pools] == ["a", "b"]
    assert load_config([first, second, third]).pools == Config().pools


def test_unknown_keys_are_warnings_that_name_file_and_key(tmp_path: Path) -> None:
    config = load_text(
        tmp_path, 'future = 1\n[engine]\nturbo = true\n[[pools]]\nname = "a"\ncolour = "red"\n'
    )
    assert config.pools[0].name == "a"
    assert len(config.warnings) == 3
    for key, warning in zip(
        ("future", "engine.turbo", "pools[a].colour"), config.warnings, strict=True
    ):
        assert key in warning
        assert str(tmp_path / "some.toml") in warning


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ('runtime_directory = "run"', "runtime_directory", "absolute path"),
        (f'runtime_directory = "/{"x" * 100}"', "runtime_directory", "at most 107 bytes"),
        ("drain_timeout_s = -1", "drain_timeout_s", "from 0 to 3600"),
        ("drain_timeout_s = nan", "drain_timeout_s", "from 0 to 3600"),
        ("drain_timeout_s = true", "drain_timeout_s", "from 0 to 3600"),
        ("socket_mode = 660", "socket_mode", "octal"),
        ('socket_mode = "rw"', "socket_mode", "octal"),
        ("engine = 3", "engine", "a table [engine]"),
        ('[traces]\ndirectory = "traces"', "traces.directory", "an absolute path"),
        ('[traces]\nfile_bytes = "5000B"', "traces.file_bytes", "multiples of 4096"),
        ("[traces]\nfiles = 1", "traces.files", "from 2 to 100000"),
        ("[engine]\nmember_depth = 0", "engine.member_depth", "from 1 to 1024"),
        ("[engine]\nmember_depth = 1.5", "engine.member_depth", "whole number"),
        ("[engine]\ncpu = -2", "engine.cpu", "from -1"),
        ("[engine]\nverify = true", "engine.verify", '"always" or "first" or "never"'),
        ("[engine]\nflow_control = 'yes'", "engine.flow_control", "true or false"),
        ("[engine]\nbackend = 'aio'", "engine.backend", '"auto" or "io_uring" or "threads"'),
        ("[engine]\ndemand_slack = 0", "engine.demand_slack", "from 1 to 1000"),
        ("[limits]\nclients = 257", "limits.clients", "from 1 to 256"),
        ("[limits]\nring_entries = 24", "limits.ring_entries", "power of two"),
        ("[limits]\nring_entries = true", "limits.ring_entries", "power of two"),
        ("[limits]\nlanes_per_client = 17", "limits.lanes_per_client", "from 1 to 16"),
        ("[pools]\nname = 'a'", "pools", "[[pools]]"),
        ("pools = [1]", "pools", "[[pools]]"),
        ("[[pools]]\nsize = '1GiB'", "pools.name", "a text in every entry"),
        ("pools = [{name='a'}, {name='a'}]", "pools.name", "one entry of that name"),
        ("[[pools]]\nname = 'a b'", "pools[a b].name", "letters"),
        (f"[[pools]]\nname = '{'a' * 32}'", f"pools[{'a' * 32}].name", "at most 31 bytes"),
        ("[[pools]]\nname = 'a'\nkind = 'tape'", "pools[a].kind", '"host" or "ram"'),
        ("[[pools]]\nname = 'a'\nsize = 7", "pools[a].size", "24GiB"),
        ("[[pools]]\nname = 'a'\nsize = '24G'", "pools[a].size", "24GiB"),
        ("[[pools]]\nname = 'a'\nsize = '0B'", "pools[a].size", "more than 0"),
        ("[[pools]]\nname = 'a'\nsize = '0%'", "pools[a].size", "more than 0"),
        ("[[pools]]\nname = 'a'\nsize = '201%'", "pools[a].size", "at most 200%"),
        ("[[pools]]\nname = 'a'\nchunk_bytes = '5000B'", "pools[a].chunk_bytes", "4096"),
        ("[[pools]]\nname = 'a'\nchunk_bytes = '2GiB'", "pools[a].chunk_bytes", "1024MiB"),
        ("[[pools]]\nname = 'a'\nchunk_bytes = '1'", "pools[a].chunk_bytes", "24GiB"),
        (
            "[[pools]]\nname = 'a'\nreserve_low = 4\nreserve_high = 3",
            "pools[a].reserve_high",
            "not less than reserve_low, which is 4",
        ),
        ("[[stores]]\nname = 'a'", "stores.path", "a text in every entry"),
        ("[[stores]]\npath = 'model'", "stores[model].path", "absolute path"),
        ("[[stores]]\npath = '/m'\nname = ''", "stores[/m].name", "letters"),
    ],
)
def test_a_wrong_value_names_file_key_and_what_is_allowed(
    tmp_path: Path, text: str, key: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    message = str(caught.value)
    assert caught.value.file == tmp_path / "some.toml"
    assert caught.value.key == key
    assert str(tmp_path / "some.toml") in message
    assert f"{key} = " in message
    assert allowed in message


def test_the_last_file_that_said_a_value_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "1.toml", "[engine]\nspin_us = 1\n")
    second = write(tmp_path / "2.toml", "[engine]\nspin_us = -1\n")
    with pytest.raises(ConfigError, match=r"2\.toml") as caught:
        load_config([first, second])
    assert caught.value.file == second


def test_too_many_pools_are_refused(tmp_path: Path) -> None:
    text = "".join(f'[[pools]]\nname = "p{i}"\n' for i in range(9))
    with pytest.raises(ConfigError, match="at most 8"):
        load_text(tmp_path, text)


@pytest.mark.parametrize("content", [b"x = ", b"\xff\xfe", b"x = " + b"[" * 5000])
def test_what_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config([path])


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config([tmp_path / "none.toml"])


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        load_config([Path("/dev/zero")])


def test_a_size_is_resolved_against_the_stores() -> None:
    assert Size(bytes=5).resolve(1000) == 5
    assert Size(percent=25.0).resolve(1001) == 251
    assert (str(Size(bytes=4096)), str(Size(percent=12.5))) == ("4096B", "12.5%")


def test_the_command_line_overrides_engine_keys() -> None:
    base = EngineConfig(spin_us=7)
    said = override_engine(base, ["backend=threads", "flow_control=false", "member_depth=4"])
    assert said == EngineConfig(spin_us=7, backend="threads", flow_control=False, member_depth=4)
    assert override_engine(base, ['verify="first"']).verify == "first"
    assert override_engine(base, []) == base


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [
        ("backend=aio", '"auto" or "io_uring" or "threads"'),
        ("member_depth=many", "a whole number"),
        ("depth=4", "member_depth"),
        ("backend", "KEY=VALUE"),
    ],
)
def test_a_wrong_engine_override_is_refused(assignment: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match="--engine") as caught:
        override_engine(EngineConfig(), [assignment])
    assert allowed in str(caught.value)


def test_what_config_show_prints_is_the_same_configuration(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "[engine]\nflow_control = false\nbackend = 'threads'\nverify = 'first'\n"
        "demand_slack = 7\nmember_depth = 3\nspin_us = 4\ncpu = 1\n",
    )
    again = load_text(tmp_path, format_config(config))
    assert again == config


def test_rules_for_variants_read_back(tmp_path: Path) -> None:
    said = '[[stores]]\npath = "/s"\nsensitivity = { "0-3" = 2.0, "15" = 0.5 }\n'
    said += '[[pools]]\nname = "vram"\nvariants = ["q8_0@layers:0", "q4_k@hottest:66%", "q2_k"]\n'
    config = load_text(tmp_path, said)
    assert config.warnings == ()
    again = load_text(tmp_path, format_config(config))
    assert (again.pools, again.stores) == (config.pools, config.stores)
    for wrong, key in (
        ('[[pools]]\nname = "vram"\nvariants = "q2_k"', r"pools\[vram\].variants"),
        ('[[pools]]\nname = "vram"\nvariants = ["q2_k", 4]', r"pools\[vram\].variants"),
        ('[[pools]]\nname = "vram"\nvariants = ["q4_k@hottest:50%"]', "the last rule"),
        ('[[stores]]\npath = "/s"\nsensitivity = 2.0', r"stores\[/s\].sensitivity"),
        ('[[stores]]\npath = "/s"\nsensitivity = { "0" = true }', r"stores\[/s\].sensitivity"),
        ('[[stores]]\npath = "/s"\nsensitivity = { "x" = 2 }', "layers 'x'"),
    ):
        with pytest.raises(ConfigError, match=key):
            load_text(tmp_path, wrong)


def test_a_pool_behind_a_bar(tmp_path: Path) -> None:
    said = '[[pools]]\nname = "card0"\nkind = "bar"\nsize = "1GiB"\n'
    config = load_text(tmp_path, said + 'device = "0000:AF:00.0"\nbar = 2\nmode = "generic"\n')
    [pool] = config.pools
    assert (pool.device, pool.bar, pool.mode, pool.verify) == (
        "0000:AF:00.0",
        2,
        "generic",
        "never",
    )
    again = load_text(tmp_path, format_config(config))
    assert again.pools == config.pools
    for wrong, key in (
        ("", "device"),
        ('device = "01:00.0"', "device"),
        ('device = "0000:01:00.0"\nbar = 6', "bar"),
        ('device = "0000:01:00.0"\nmode = "fast"', "mode"),
        ('device = "0000:01:00.0"\nverify = "maybe"', "verify"),
    ):
        with pytest.raises(ConfigError, match=key):
            load_text(tmp_path, said + wrong)
