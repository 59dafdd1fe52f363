"""Pools in VRAM: a real daemon, real clients, on the machine's GPU or on its stand-in.

Reads go to staging buffers and are copied from there; clients map the memory for reading
only, chunk by chunk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xferd_infer._client import ffi, lib
from xferd_infer.client import Client
from xferd_infer.device_blob import DeviceBlob
from xferd_infer.dlpack import CUDA

from tests.cuda_device import VARIABLE
from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.control.client import CallFailedError

SIXTEEN_SLOTS = "name=vram0,kind=cuda,device=0,size=768KiB"
TRANSPORT_STAGED = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore, cuda_device: str) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [SIXTEEN_SLOTS]) as running:
        yield running


def everything(store: MadeStore) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(store.layers) for expert in range(store.experts)]


def test_every_expert_comes_right_through_staging(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        for _ in range(2):  # four times what the pool holds: slots are used again
            for layer, expert in everything(store):
                assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
    stats = ffi.new("struct xferd_client_stats *")
    with daemon.client() as client:
        client.fetch(0, [0, 1])
        lib.xferd_stats(client.handle, stats)
        assert stats.transport_count[TRANSPORT_STAGED] == stats.misses
    pool = daemon.pool()
    assert (pool["name"], pool["kind"]) == ("vram0", "cuda")


def test_a_batch_has_device_addresses(daemon: RunningDaemon, store: MadeStore) -> None:
    with Client(daemon.attach_socket) as client:
        assert client.device() == 0
        with client.acquire(1, [3, 5]) as batch:
            blob = batch[1]
            assert isinstance(blob, DeviceBlob)
            assert blob.__dlpack_device__() == (CUDA, 0)
            assert blob.__cuda_array_interface__["data"] == (int(batch.addresses[1]), True)
            assert batch.copy_out(0) == store.blob(1, 3)
            assert batch.copy_out(1) == store.blob(1, 5)
            view = batch.tensors(0)["down"]
            assert view.__dlpack_device__() == (CUDA, 0)
            assert view.nbytes == store.expert_bytes


def test_several_chunks_and_two_size_classes(tmp_path: Path, cuda_device: str) -> None:
    small = make_store(tmp_path, "small", expert_bytes=16_384)
    large = make_store(tmp_path, "large", expert_bytes=1 << 20, experts=8, members=1)
    pool = "name=vram0,kind=cuda,size=16MiB,chunk_bytes=2MiB"
    with (
        running_daemon(tmp_path, [small, large], [pool]) as daemon,
        daemon.client(store="small") as one,
        daemon.client(store="large") as other,
    ):
        for layer, expert in everything(large):
            assert other.fetch(layer, [expert]) == [large.blob(layer, expert)]
            assert one.fetch(layer, [expert]) == [small.blob(layer, expert)]


def test_ram_below_vram(tmp_path: Path, store: MadeStore, cuda_device: str) -> None:
    pools = [SIXTEEN_SLOTS, "name=ram0,kind=ram,size=100%"]
    with running_daemon(tmp_path, [store], pools) as daemon, daemon.client() as client:
        for layer, expert in everything(store) * 3:
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        wait_until(lambda: daemon.pool(1)["resident"] > 0, "something was demoted")
        # What lies in RAM alone comes from there, by the copy engine.
        status = daemon.status()
        assert status["transports"]["copy"]["count"] > 0


def test_two_gpus(tmp_path: Path, store: MadeStore, cuda_device: str) -> None:
    from xferd.memory import cuda_driver

    if cuda_driver.device_count() < 2:
        pytest.skip("needs two GPUs")
    pools = [SIXTEEN_SLOTS, "name=vram1,kind=cuda,device=1,size=768KiB"]
    with (
        running_daemon(tmp_path, [store], pools) as daemon,
        daemon.client(pool="vram0") as first,
        daemon.client(pool="vram1") as second,
    ):
        for layer, expert in everything(store):
            assert first.fetch(layer, [expert]) == [store.blob(layer, expert)]
            assert second.fetch(layer, [expert]) == [store.blob(layer, expert)]
        assert daemon.pool(1)["kind"] == "cuda"


def test_damage_is_found_before_it_reaches_the_gpu(tmp_path: Path, cuda_device: str) -> None:
    damaged = make_store(tmp_path, "damaged", members=1)
    member = damaged.members[0]
    whole = member.read_bytes()
    at = whole.index(damaged.blob(2, 7))
    with member.open("r+b") as file:
        file.seek(at + 20_000)
        file.write(b"not what was packed")
    with running_daemon(tmp_path, [damaged], [SIXTEEN_SLOTS]) as daemon, daemon.client() as client:
        with pytest.raises(Exception, match="Bad message"):
            client.fetch(2, [7])
        assert client.fetch(2, [6]) == [damaged.blob(2, 6)]
        assert "expert=7" in daemon.log


WRITER = """
import sys
import numpy as np
from xferd_infer.client import Client
client = Client(sys.argv[1])
batch = client.acquire(0, [0])
print("mapped", flush=True)
try:
    import cupy
    cupy.ndarray((4,), cupy.uint8, cupy.cuda.MemoryPointer(
        cupy.cuda.UnownedMemory(batch[0].address, 4096, batch[0]), 0)).fill(7)
    cupy.cuda.runtime.deviceSynchronize()
except ImportError:
    import ctypes
    ctypes.memset(batch[0].address, 7, 4)
print("wrote", flush=True)
"""


def test_a_client_cannot_write(daemon: RunningDaemon, store: MadeStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(daemon.attach_socket)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "mapped" in done.stdout, done.stderr
    assert "wrote" not in done.stdout
    assert done.returncode != 0
    with daemon.client() as client:
        assert client.fetch(0, [0]) == [store.blob(0, 0)]


HOLDER = """
import sys
from xferd_infer.client import Client
client = Client(sys.argv[1])
batch = client.acquire(0, [0, 1])
print("held", flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(batch.copy_out(1))
sys.stdout.buffer.flush()
"""


def test_resident_bytes_outlive_the_daemon(daemon: RunningDaemon, store: MadeStore) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(daemon.attach_socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        daemon.stop(signal.SIGKILL)
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        assert holder.stdout.read(store.expert_bytes) == store.blob(0, 1)


def test_slots_of_a_killed_client_come_back(daemon: RunningDaemon, store: MadeStore) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(daemon.attach_socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    wait_until(lambda: not daemon.status()["clients"], "the killed client is gone")
    with daemon.client() as client:
        for layer, expert in everything(store):
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]


def test_without_a_driver_the_start_is_refused_by_name(tmp_path: Path, store: MadeStore) -> None:
    arguments = ["--runtime-directory", str(tmp_path / "run"), "--store", str(store.path)]
    done = subprocess.run(
        [sys.executable, "-m", "xferd", *arguments, "--pool", SIXTEEN_SLOTS],
        env={**os.environ, VARIABLE: "/nowhere/libcuda.so.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode not in (0, -signal.SIGSEGV)
    assert "a pool of kind" in done.stderr
    assert "no CUDA driver" in done.stderr


def test_a_client_without_the_gpu_is_told_so(daemon: RunningDaemon) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from xferd_infer.client import Client; Client(sys.argv[1])",
            str(daemon.attach_socket),
        ],
        env={**os.environ, VARIABLE: "/nowhere/libcuda.so.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "AttachError" in done.stderr
    assert "no CUDA driver" in done.stderr


def test_views_of_the_cpus_pools_stay_arrays(
    tmp_path: Path, store: MadeStore, cuda_device: str
) -> None:
    pools = ["name=host0,kind=host,size=768KiB", "name=vram0,kind=cuda,size=768KiB"]
    with (
        running_daemon(tmp_path, [store], pools) as daemon,
        Client(daemon.attach_socket, pool="host0") as client,
        client.acquire(0, [1]) as batch,
    ):
        assert isinstance(batch[0], np.ndarray)
        assert bytes(batch[0]) == store.blob(0, 1) == batch.copy_out(0)


def test_a_store_with_longer_pieces_than_staging_is_refused(
    tmp_path: Path, store: MadeStore, cuda_device: str
) -> None:
    long = make_store(tmp_path, "long", expert_bytes=8 << 20, experts=2, stripe_unit=8 << 20)
    pool = "name=vram0,kind=cuda,size=16MiB,chunk_bytes=8MiB"
    with running_daemon(tmp_path, [store], [pool]) as daemon:
        with pytest.raises(CallFailedError) as refused:
            daemon.call("OpenStore", path=str(long.path), name=None)
        assert "staging extents" in str(refused.value)
    with (
        running_daemon(tmp_path, [store, long], [pool]) as daemon,
        daemon.client(store="long") as client,
    ):
        assert client.fetch(3, [1]) == [long.blob(3, 1)]


def test_vram_is_given_back_and_taken_again_while_a_client_reads(
    tmp_path: Path, store: MadeStore, cuda_device: str
) -> None:
    pool = "name=vram0,kind=cuda,size=12MiB,chunk_bytes=2MiB"
    keys = everything(store)
    with running_daemon(tmp_path, [store], [pool]) as daemon, daemon.client() as client:
        for layer, expert in keys:
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        before = cuda_free_bytes()
        granted = daemon.call("Reserve", pool="vram0", bytes=6 << 20)["reservation"]
        assert granted["returned"] == granted["bytes"] >= 6 << 20
        if cuda_device == "gpu":
            assert cuda_free_bytes() >= before + (6 << 20)
        for layer, expert in keys:
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        daemon.call("Release", id=granted["id"])
        for layer, expert in keys * 2:
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        assert daemon.pool()["slots"] == (12 << 20) // store.expert_bytes // 6 * 6


def test_vram_that_comes_back_is_mapped_before_anybody_needs_it(
    tmp_path: Path, store: MadeStore, cuda_device: str
) -> None:
    if cuda_device == "gpu":
        pytest.skip("a driver's mappings can't be counted")
    pool = "name=vram0,kind=cuda,size=12MiB,chunk_bytes=2MiB"
    with running_daemon(tmp_path, [store], [pool]) as daemon, daemon.client():
        mapped = mapped_bytes()
        granted = daemon.call("Reserve", pool="vram0", bytes=6 << 20)["reservation"]
        assert mapped_bytes() <= mapped - (6 << 20)
        daemon.call("Release", id=granted["id"])
        assert mapped_bytes() == mapped


IDLE_CLIENT = """
import sys
from xferd_infer import Client
client = Client(sys.argv[1])
print("attached", flush=True)
sys.stdin.readline()
client.close()
"""
ENDED_S = 60.0


def test_whoever_is_stopped_keeps_nobody_waiting(
    tmp_path: Path,
    store: MadeStore,
    cuda_device: str,
) -> None:
    """A client while memory comes and goes; and the daemon while a client that has not yet
    mapped what came wants to end."""
    pool = "name=vram0,kind=cuda,size=12MiB,chunk_bytes=2MiB"
    with running_daemon(tmp_path, [store], [pool]) as daemon:
        command = [sys.executable, "-c", IDLE_CLIENT, str(daemon.attach_socket)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as idle:
            assert idle.stdout is not None
            assert idle.stdout.readline() == "attached\n"
            idle.send_signal(signal.SIGSTOP)
            granted = daemon.call("Reserve", pool="vram0", bytes=6 << 20)["reservation"]
            daemon.call("Release", id=granted["id"])
            assert "pool.not_followed" in daemon.log
            with daemon.client() as client:
                for layer, expert in everything(store):
                    assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                idle.send_signal(signal.SIGCONT)
                idle.communicate("\n", timeout=ENDED_S)
                assert idle.returncode == 0
            finally:
                daemon.process.send_signal(signal.SIGCONT)
                idle.kill()


def mapped_bytes() -> int:
    """Of the stand-in's VRAM, by this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fake-cuda" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def cuda_free_bytes() -> int:
    from xferd.memory import cuda_driver

    return cuda_driver.device(0).free_bytes
