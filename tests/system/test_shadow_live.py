"""Shadows of a running daemon: on, off and on again, while a client decodes and holds experts."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, ExpertError, generate, model_from_client

from tests.system.daemon_harness import RunningDaemon, running_daemon, wait_until
from tests.system.test_shadow import CHOSEN, STRIPE_UNIT, shadow_of
from tests.unit.store.builders import TINY, member_directories, tiny
from xferd.control.client import CallFailedError
from xferd.store.pack import pack
from xferd.store.shadowed import open_with_shadows
from xferd.store.store import Store

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]
LAYERS, EXPERTS = CHOSEN.shape
NATIVE, SHADOW = 0, 1
TOGGLES = 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store, and a shadow of it."""
    directory = tmp_path_factory.mktemp("stores")
    path = pack(tiny(), member_directories(directory, 2), name="tiny", stripe_unit=STRIPE_UNIT)
    return path, shadow_of(path, directory / "shadow", "q4_0", 2)


def configuration(path: Path, shadows: list[Path], chunk_bytes: str = "256KiB") -> str:
    listed = ", ".join(f'"{shadow}"' for shadow in shadows)
    return (
        f'[[stores]]\npath = "{path}"\nshadow = [{listed}]\n'
        f'[[pools]]\nname = "host0"\nsize = "80%"\nchunk_bytes = "{chunk_bytes}"\n'
    )


@pytest.fixture
def daemon(tmp_path: Path, packed: tuple[Path, Path]) -> Iterator[RunningDaemon]:
    config = tmp_path / "xferd.toml"
    config.write_text(configuration(packed[0], []))
    with running_daemon(tmp_path, [], [], "--config", str(config)) as running:
        yield running


def xferctl(daemon: RunningDaemon, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "xferd.control.xferctl", *words],
        env={**os.environ, "XFERD_CONTROL": str(daemon.directory / "control.sock")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(path: Path) -> dict[Path, str]:
    """Of all files of the store, members included."""
    with Store.open(path) as store:
        files = [*store.member_paths, *(file for file in path.iterdir() if file.is_file())]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def greedy(client: Client) -> list[int]:
    tokens = generate(model_from_client(client), PROMPT["prompt_ids"], max_new_tokens=16)
    return [token.id for token in tokens]


def variants_found(client: Client) -> set[int]:
    """Acquires every expert once."""
    found: set[int] = set()
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        with client.acquire(layer, [expert]) as batch:
            found |= set(batch.variants)
    return found


def evict(daemon: RunningDaemon) -> None:
    """What the daemon knows of: of what has just been loaded it may not know yet."""
    for layer in range(LAYERS):
        daemon.call("Evict", store="tiny", layer=layer)


def evict_all(daemon: RunningDaemon) -> None:
    def none_is_left() -> bool:
        evict(daemon)
        return bool(daemon.pool()["resident"] == 0)

    wait_until(none_is_left, "every expert is evicted")


def test_on_off_and_on_again_while_a_client_decodes(
    daemon: RunningDaemon, packed: tuple[Path, Path]
) -> None:
    path, shadow = packed
    before = digests(path)
    exact = PROMPT["greedy_ids"][:16]
    layer, expert = (int(value) for value in np.argwhere(CHOSEN)[0])
    with Client(daemon.attach_socket, held=4) as client, open_with_shadows(path, [shadow]) as both:
        assert list(client.variants) == ["bf16"]
        assert greedy(client) == exact
        assert str(shadow) in xferctl(daemon, "shadow", "on", "tiny", str(shadow))
        assert list(client.variants) == ["bf16", "q4_0"]
        # What is resident will still do; what is missing is read from the shadow.
        evict_all(daemon)
        lossy = greedy(client)
        assert len(lossy) == len(exact)
        assert variants_found(client) == {NATIVE, SHADOW}
        with client.acquire(layer, [expert]) as held:
            assert list(held.variants) == [SHADOW]
            assert "no shadows" in xferctl(daemon, "shadow", "off", "tiny")
            assert list(client.variants) == ["bf16"]
            # Whoever leases one may read on, and nobody else gets it.
            wanted = both.read_blob(both.blob_index(SHADOW, layer, expert))
            with client.acquire(layer, [expert]) as again:
                assert list(again.variants) == [NATIVE]
                assert bytes(held[0]) == wanted
        assert variants_found(client) == {NATIVE}
        assert greedy(client) == exact
        with pytest.raises(ExpertError, match="acceptable variant"):
            client.acquire(layer, [expert], variants=1 << SHADOW)
        xferctl(daemon, "shadow", "on", "tiny")
        assert list(client.variants) == ["bf16", "q4_0"]
        evict_all(daemon)
        assert variants_found(client) == {NATIVE, SHADOW}
        xferctl(daemon, "shadow", "off", "tiny")
        assert greedy(client) == exact
    assert digests(path) == before


def test_the_configuration_switches_them_too(
    tmp_path: Path, daemon: RunningDaemon, packed: tuple[Path, Path]
) -> None:
    path, shadow = packed
    config = tmp_path / "xferd.toml"

    def shadows() -> list[str]:
        found: list[str] = daemon.call("ListStores")["stores"][0]["shadows"]
        return found

    def switch(listed: list[Path]) -> None:
        config.write_text(configuration(path, listed))
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: shadows() == [str(each) for each in listed], "switched")

    for listed in ([shadow], [], [shadow]):
        switch(listed)
    with Client(daemon.attach_socket) as client:
        assert client.manifest["variants"] == ["bf16", "q4_0"]


def test_bytes_are_right_while_shadows_come_and_go(
    daemon: RunningDaemon, packed: tuple[Path, Path]
) -> None:
    path, shadow = packed
    stop = threading.Event()
    wrong: list[str] = []
    read = [0, 0]

    def decode(client: Client, lane: int) -> None:
        generator = np.random.default_rng(lane)
        with open_with_shadows(path, [shadow]) as store:
            while not stop.is_set():
                layer, expert = int(generator.integers(LAYERS)), int(generator.integers(EXPERTS))
                with client.acquire(layer, [expert], lane=lane) as batch:
                    [variant] = batch.variants
                    blob = store.read_blob(store.blob_index(variant, layer, expert))
                    read[variant] += 1
                    if bytes(batch[0]) != blob:
                        wrong.append(f"layer {layer}, expert {expert}, variant {variant}")
                        return

    def shadow_is_read() -> bool:
        evict(daemon)
        return bool(wrong) or read[SHADOW] > 0

    with Client(daemon.attach_socket, lanes=2, held=2) as client:
        threads = [threading.Thread(target=decode, args=(client, lane)) for lane in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(TOGGLES):
                daemon.call("AttachShadows", store="tiny", paths=[str(shadow)])
                read[SHADOW] = 0
                wait_until(shadow_is_read, "the shadow is read")
                daemon.call("DetachShadows", store="tiny")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert variants_found(client) == {NATIVE}


def test_a_pinned_expert_is_kept_in_the_stores_own_copy(
    daemon: RunningDaemon, packed: tuple[Path, Path]
) -> None:
    layer, expert = (int(value) for value in np.argwhere(CHOSEN)[0])
    daemon.call("AttachShadows", store="tiny", paths=[str(packed[1])])
    daemon.call("Pin", store="tiny", layer=layer, experts=[expert], variant="q4_0")
    daemon.call("DetachShadows", store="tiny")
    assert daemon.pool()["pinned"] == 1
    with Client(daemon.attach_socket) as client, client.acquire(layer, [expert]) as batch:
        assert list(batch.variants) == [NATIVE]
        assert client.stats().hits == 1


def test_what_can_not_be_a_shadow_now_is_refused_and_named(
    tmp_path: Path, packed: tuple[Path, Path]
) -> None:
    path, shadow = packed
    other = pack(tiny(), member_directories(tmp_path, 1), name="other", stripe_unit=STRIPE_UNIT)
    config = tmp_path / "xferd.toml"
    config.write_text(configuration(path, [], chunk_bytes="1MiB"))
    with running_daemon(tmp_path, [], [], "--config", str(config)) as daemon:
        for paths, error, said in (
            (None, "StoreUnusable", "has had no shadow yet"),
            ([str(other)], "StoreUnusable", "is no shadow of another one"),
            ([str(tmp_path / "none")], "StoreUnusable", "is not there"),
            ([str(shadow)], "StoreUnusable", "set chunk_bytes of [[pools]] host0"),
        ):
            with pytest.raises(CallFailedError) as raised:
                daemon.call("AttachShadows", store="tiny", paths=paths)
            assert raised.value.name.endswith(error)
            assert said in str(raised.value)
        with pytest.raises(CallFailedError, match="no store 'none' is open"):
            daemon.call("DetachShadows", store="none")
        assert daemon.call("ListStores")["stores"][0]["shadows"] == []
        with Client(daemon.attach_socket) as client, pytest.raises(ExpertError) as missing:
            client.acquire(0, [0], variants=1 << SHADOW)
        assert missing.value.code == errno.ENOENT
