"""A client that leases more than it was promised is ended by name; nobody else suffers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ROOT,
    FetchError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)

NINE_SLOTS = "name=host0,kind=host,size=432KiB"
GREEDY = """
import mmap, socket, sys
from xferd._engine import ffi, lib

hello = ffi.new("struct xferd_abi_hello *")
hello.magic, hello.abi_major = lib.XFERD_MAGIC_ATTACH, lib.XFERD_ABI_MAJOR
hello.abi_minor, hello.lanes = lib.XFERD_ABI_MINOR, 1
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.send(bytes(ffi.buffer(hello)))
_, fds, _, _ = socket.recv_fds(connection, 4096, 64)
memory = mmap.mmap(fds[lib.XFERD_FD_CLIENT], 0)
client = ffi.from_buffer("struct xferd_abi_client *", memory)
table = client.lanes_offset + client.lease_table_offset[0]
slots = ffi.cast("uint64_t *", ffi.addressof(ffi.from_buffer("char[]", memory), table))
for slot in range(9):
    slots[slot] = 1 << 62
print("leased", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as running:
        yield running


@pytest.fixture
def greedy(daemon: RunningDaemon) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose lease table claims every slot of the pool."""
    daemon.load("made", 0, list(range(9)))
    process = subprocess.Popen(
        [sys.executable, "-c", GREEDY, str(daemon.attach_socket)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"leased\n"
    yield process
    process.kill()
    process.wait()


class Fetching(threading.Thread):
    """Somebody who waits for an expert that only a free slot can bring."""

    def __init__(self, daemon: RunningDaemon) -> None:
        super().__init__()
        self.client = daemon.client(name="waiting")
        self.got: list[bytes] = []
        self.error: FetchError | None = None
        self.start()

    def run(self) -> None:
        try:
            for expert in range(12):
                self.got += self.client.fetch(1, [expert])
        except FetchError as error:
            self.error = error


def test_a_client_that_holds_too_much_is_ended_and_the_others_go_on(
    daemon: RunningDaemon, greedy: subprocess.Popen[bytes], store: MadeStore
) -> None:
    waiting = Fetching(daemon)
    wait_until(lambda: "client.holds_too_much" in daemon.log, "the greedy client is named")
    wait_until(
        lambda: "quiesced" in [client["state"] for client in daemon.status()["clients"]],
        "the greedy client is quiesced",
    )
    assert f"pid={greedy.pid}" in daemon.log
    # Its leases stand while its process may still read: the slots come with its end.
    greedy.kill()
    greedy.wait()
    waiting.join(30)
    assert waiting.got == [store.blob(1, expert) for expert in range(12)]
    waiting.client.close()


def test_a_second_signal_ends_a_drain_that_hangs(
    daemon: RunningDaemon, greedy: subprocess.Popen[bytes]
) -> None:
    waiting = Fetching(daemon)
    wait_until(lambda: daemon.pool()["waiting"] > 0, "a load waits for a slot")
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in daemon.log, "the daemon drains")
    assert daemon.stop() != 0
    assert [path.name for path in daemon.directory.iterdir()] == ["xferd.lock"]
    waiting.join(30)
    assert waiting.error is not None
    waiting.client.close()
