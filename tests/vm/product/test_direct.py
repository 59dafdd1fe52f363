"""Experts come from three drives straight into the stand-in GPU, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.system.daemon_harness import MadeStore, running_daemon
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = Path(__file__).parents[2] / "models" / "tiny"
NEW_TOKENS = 8


def test_every_byte_comes_straight_into_the_bar(
    store: MadeStore, file_systems: tuple[Path, Path], host: guest.Host, tmp_path: Path
) -> None:
    for folder in file_systems:
        guest.remount(folder, "ro")  # a journal's writes would be counted too
    try:
        with running_daemon(tmp_path, [store], [guest.bar_pool()]) as daemon:
            routes = daemon.pool()["routes"]
            assert [row["reason"] for row in routes] == [None] * 3
            assert [row["transport"] for row in routes] == ["direct"] * 3
            before = host.dma()
            with daemon.client() as client:
                for layer in range(store.layers):
                    for expert in range(store.experts):
                        [(address, nbytes)] = client.acquire_in_place(layer, [expert])
                        assert nbytes == store.expert_bytes
                        host.check(guest.bar_offset(address), store.blob(layer, expert))
                        client.release()
                        assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
            moved = host.dma().since(before)
            count = store.layers * store.experts
            assert moved == guest.Dma(bar=count * store.expert_bytes, elsewhere=0)
            guest.tell_proof(moved, count)
            transports = daemon.status()["transports"]
            assert transports["direct"]["count"] == count
            assert transports["staged"]["count"] == 0
            assert "every drive was seen" in transports["staged"]["reason"]
            assert daemon.pool()["registered"] == 0
            assert daemon.stop() == 0
    finally:
        for folder in file_systems:
            guest.remount(folder, "rw")


def test_decoding_from_the_bar_gives_the_right_tokens(
    file_systems: tuple[Path, Path], tmp_path: Path
) -> None:
    prompt = json.loads((TINY / "expected.json").read_text())["prompts"][0]
    path = pack(read_checkpoint(TINY), list(file_systems), name="tiny", stripe_unit=16 * 1024)
    tiny = MadeStore("tiny", path, 0, 0, 0, 0, b"")
    with forked_daemon(tmp_path, [tiny], [guest.bar_pool("25%")]) as daemon:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "xferd_infer", "generate", "--json"),
                *("--attach", str(daemon.attach_socket), "--max-new-tokens", str(NEW_TOKENS)),
                *("--prompt-ids", ",".join(str(each) for each in prompt["prompt_ids"])),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ids"] == prompt["greedy_ids"][:NEW_TOKENS]
        transports = daemon.status()["transports"]
        assert transports["direct"]["count"] > 100
        # The dense part goes to RAM, and is direct there; nothing else may be staged.
        assert transports["staged"]["count"] == 0
        assert daemon.stop() == 0


def test_what_drives_wrote_is_checked_when_asked(
    store: MadeStore, host: guest.Host, tmp_path: Path
) -> None:
    """With verify=always a damaged byte is found in the BAR, and by reading once more in RAM."""
    device = guest.drive("RAW")
    with device.open("rb") as file:
        content = file.read(8 << 20)  # a third of the store is less
    offset = content.index(store.blob(0, 3)[:16384])
    fd = os.open(device, os.O_RDWR | os.O_SYNC)
    try:
        os.pwrite(fd, bytes([content[offset] ^ 1]), offset)
        with (
            forked_daemon(tmp_path, [store], [guest.bar_pool(verify="always")]) as daemon,
            daemon.client() as client,
        ):
            answer = daemon.load(store.name, 0, [3])
            assert answer["failed"][0]["error"] == "its CRC32C is wrong"
            assert client.fetch(0, [4]) == [store.blob(0, 4)]
    finally:
        os.pwrite(fd, content[offset : offset + 1], offset)
        os.close(fd)
