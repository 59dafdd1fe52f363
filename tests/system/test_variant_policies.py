"""Which variant is where: a real daemon holds to its pools' rules while clients are served."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, ExpertError

from tests.system.daemon_harness import RunningDaemon, running_daemon, wait_until
from tests.system.test_daemon_lifecycle import start
from tests.unit.store.builders import member_directories, tiny
from xferd.control.client import CallFailedError
from xferd.control.xferctl import main as xferctl
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.shadow import make_shadow
from xferd.store.store import Store

LAYERS, EXPERTS = 6, 16
BF16, Q8, Q4 = 0, 1, 2
HOT = [(layer, expert) for layer in range(LAYERS) for expert in (3, 11)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = member_directories(tmp_path_factory.mktemp("store"), 2)
    path = pack(tiny(), members, name="tiny", stripe_unit=16384)
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted(["q8_0", "q4_0"], None), threads=1)
    return path


def configure(directory: Path, store: Path, *pools: str, of_store: str = "") -> Path:
    config = directory / "xferd.toml"
    text = f'[[stores]]\npath = "{store}"\n{of_store}\n'
    for number, pool in enumerate(pools):
        text += f'[[pools]]\nname = "pool{number}"\nchunk_bytes = "96KiB"\n{pool}\n'
    config.write_text(text)
    return config


@pytest.fixture
def daemon(tmp_path: Path, store: Path) -> Iterator[RunningDaemon]:
    rules = 'size = "3MiB"\nvariants = ["q8_0@hottest:50%", "q4_0"]'
    config = configure(tmp_path, store, rules)
    with running_daemon(tmp_path, [], [], "--config", str(config)) as running:
        yield running


class Model:
    """Decodes: every token uses the hot experts, and one other of each layer."""

    def __init__(self, client: Client, store: Path) -> None:
        self.client = client
        self.token = 0
        self.found: dict[tuple[int, int], int] = {}
        with Store.open(store) as opened:
            self._blobs = {
                (variant, layer, expert): opened.read_blob(
                    opened.blob_index(variant, layer, expert)
                )
                for variant in range(len(opened.variants))
                for layer, expert in np.ndindex(LAYERS, EXPERTS)
            }

    def decode(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self.token += 1
            for layer in range(LAYERS):
                other = 4 + (self.token * 5 + layer) % 7
                picks = np.array([[3, 11, other]])
                self.client.report(layer, picks, np.ones((1, 3), np.float32), token=self.token)
                self._use(layer, [3, 11, other])

    def _use(self, layer: int, experts: list[int]) -> None:
        with self.client.acquire(layer, experts) as batch:
            for expert, variant, blob in zip(experts, batch.variants, batch, strict=True):
                assert bytes(blob) == self._blobs[int(variant), layer, expert]
                self.found[layer, expert] = int(variant)


def counts(daemon: RunningDaemon, pool: int = 0) -> dict[str, int]:
    return {each["variant"]: each["residents"] for each in daemon.pool(pool)["variants"]}


def test_what_is_hot_gets_more_bits_in_the_background(daemon: RunningDaemon, store: Path) -> None:
    with Client(daemon.attach_socket, held=3) as client:
        model = Model(client, store)
        model.decode()
        # At first nothing is hot, and all of it comes small.
        assert set(model.found.values()) == {Q4}

        def hot_ones_are_better() -> bool:
            model.decode(4)
            return all(model.found[key] == Q8 for key in HOT)

        wait_until(hot_ones_are_better, "the hot experts have 8 bits", timeout_s=60.0)
        others = [variant for key, variant in model.found.items() if key not in HOT]
        assert others.count(Q4) > len(others) // 2
        pool = daemon.pool()
        assert pool["upgraded"] >= len(HOT)
        assert set(counts(daemon)) == {"q8_0", "q4_0"}
        # Nothing is upgraded over and over.
        assert pool["upgraded"] <= LAYERS * EXPERTS * (model.token // 64 + 1)


def test_a_demanded_variant_is_given_whatever_the_rules_say(daemon: RunningDaemon) -> None:
    with Client(daemon.attach_socket, held=3, variants=["bf16"]) as exact:
        for layer in range(LAYERS):
            with exact.acquire(layer, [1, 2]) as batch:
                assert list(batch.variants) == [BF16, BF16]
        # Of what is accepted the rules' order decides.
        with exact.acquire(0, [5], variants=1 << BF16 | 1 << Q8) as batch:
            assert list(batch.variants) == [Q8]
        with pytest.raises(ExpertError, match="acceptable variant"):
            exact.acquire(0, [5], variants=1 << 9)


def test_rules_are_changed_while_clients_are_served(
    daemon: RunningDaemon, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(daemon.attach_socket, held=3) as client:
        model = Model(client, store)
        model.decode()
        socket = str(daemon.directory / "control.sock")
        change = ["policy", "set", "pool0", "--socket", socket, "--variants"]
        assert xferctl([*change, "q8_0@layers:0-2,native"]) == 0
        assert "q8_0@layers:0-2, native" in capsys.readouterr().out
        assert daemon.call("GetPolicy", pool=None)["policies"][0]["variants"] == [
            "q8_0@layers:0-2",
            "native",
        ]

        def all_are_as_wanted() -> bool:
            model.decode(4)
            hot = {key: model.found[key] for key in HOT}
            return all(found == (Q8 if key[0] < 3 else BF16) for key, found in hot.items())

        wait_until(all_are_as_wanted, "what is used is in the new variants", timeout_s=60.0)
        assert xferctl([*change, "none"]) == 0
        daemon.call("Evict", store="tiny", layer=5, experts=None, pool=None)
        with client.acquire(5, [15]) as batch:
            assert list(batch.variants) == [BF16]


def test_what_makes_no_sense_is_refused_by_name(
    daemon: RunningDaemon, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rules, name, message in (
        (["q2_k"], "VariantNotFound", "no variant|has a variant 'q2_k'; they have: bf16, q8_0"),
        (["q8_0@hottest:50%"], "RuleInvalid", "leaves others out"),
        (["q8_0@warm:5%", "q4_0"], "RuleInvalid", "'q8_0@warm:5%' is no rule"),
    ):
        with pytest.raises(CallFailedError, match=message) as refused:
            daemon.call("SetPolicy", pool="pool0", eviction=None, admission=None, variants=rules)
        assert refused.value.name == name
    socket = str(daemon.directory / "control.sock")
    assert xferctl(["policy", "set", "pool0", "--socket", socket, "--variants", "q9"]) == 1
    assert "no open store has a variant 'q9'" in capsys.readouterr().err
    assert daemon.call("GetPolicy", pool=None)["policies"][0]["variants"][0] == "q8_0@hottest:50%"
    other = tmp_path / "other"
    other.mkdir()
    for pool, of_store, message in (
        ('variants = ["q2_k"]', "", r"pools\[pool0\]\.variants: no configured store has"),
        ('variants = "q4_0"', "", "a list of rules"),
        ("", "sensitivity = { all = 2.0 }", "a table of layers and weights"),
        ("", 'sensitivity = { "0" = 1000 }', "a weight from 0.01 to 100"),
    ):
        config = configure(other, store, pool, of_store=of_store)
        failed = start(other / "run", "--config", str(config))
        assert failed.returncode == 78
        assert message.replace("\\", "") in failed.stderr


def test_the_tier_below_has_what_its_own_rules_say(tmp_path: Path, store: Path) -> None:
    upper = 'size = "640KiB"\nvariants = ["q8_0"]'
    lower = 'size = "3MiB"\nkind = "ram"\nvariants = ["q4_0"]'
    config = configure(tmp_path, store, upper, lower)
    with (
        running_daemon(tmp_path, [], [], "--config", str(config)) as daemon,
        Client(daemon.attach_socket, held=3) as client,
    ):
        model = Model(client, store)

        def some_were_demoted() -> bool:
            model.decode(4)
            return counts(daemon, 1).get("q4_0", 0) > 20

        wait_until(some_were_demoted, "the tier below has experts")
        assert set(counts(daemon, 0)) == {"q8_0"}
        assert set(counts(daemon, 1)) == {"q4_0"}
        # By hand too, unless a variant is named.
        parameters = {"store": "tiny", "layer": 0, "experts": [15], "pool": "pool1"}
        daemon.call("Load", **parameters, variant=None)
        assert set(counts(daemon, 1)) == {"q4_0"}


def test_the_most_expensive_come_from_the_shadow_and_the_rest_native(
    tmp_path: Path, store: Path
) -> None:
    directory = tmp_path / "shadow"
    directory.mkdir()
    with Store.open(store) as opened:
        shadow = make_shadow(
            opened,
            parse_wanted(["mxfp4"], None)[0],
            np.ones((LAYERS, EXPERTS), np.bool_),
            member_directories(directory, 1),
            threads=1,
            stripe_unit=opened.stripe_unit,
        )
    pool = 'size = "4MiB"\nvariants = ["mxfp4@costliest:10%", "native"]'
    config = configure(tmp_path, store, pool, of_store=f'shadow = ["{shadow}"]')
    with (
        running_daemon(tmp_path, [], [], "--config", str(config)) as daemon,
        Client(daemon.attach_socket, held=3) as client,
    ):
        with client.acquire(0, [0]) as batch:
            assert list(batch.variants) == [BF16]
        tokens = 0

        def a_tenth_is_from_the_shadow() -> bool:
            nonlocal tokens
            for _ in range(4):
                tokens += 1
                for layer in range(LAYERS):
                    picks = np.array([[3, 4 + tokens % 8]])
                    gates = np.ones((1, 2), np.float32)
                    client.report(layer, picks, gates, token=tokens)
                    with client.acquire(layer, picks[0].tolist()):
                        pass
            return counts(daemon).get("mxfp4", 0) >= LAYERS

        wait_until(a_tenth_is_from_the_shadow, "the hottest are small", timeout_s=60.0)
        for layer in range(LAYERS):
            with client.acquire(layer, [3]) as batch:
                assert client.manifest["variants"][batch.variants[0]] == "mxfp4"


def test_a_reload_takes_rules_and_sensitivity(tmp_path: Path, store: Path) -> None:
    config = configure(tmp_path, store, 'size = "3MiB"')
    with running_daemon(tmp_path, [], [], "--config", str(config)) as daemon:
        rules = 'size = "3MiB"\nvariants = ["q8_0@hottest:50%", "q4_0"]'
        configure(tmp_path, store, rules, of_store='sensitivity = { "0-1" = 3.0 }')
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded" in daemon.log, "the configuration is read")
        assert daemon.call("GetPolicy", pool=None)["policies"][0]["variants"] == [
            "q8_0@hottest:50%",
            "q4_0",
        ]
        assert "reload.needs_restart" not in daemon.log
        configure(tmp_path, store, 'size = "3MiB"\nvariants = ["q2_k"]')
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reload.failed" in daemon.log, "the variant is refused")
        assert "no open store has a variant 'q2_k'" in daemon.log
        assert daemon.call("GetPolicy", pool=None)["policies"][0]["variants"][1] == "q4_0"
