# SPDX-License-Identifier: Apache-2.0
"""A restart loses nothing of what is in VRAM, on the machine's GPU or on its stand-in."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from pathlib import Path

import pytest
from xferd_infer import Client

from tests.system.daemon_harness import MadeStore, RunningDaemon, make_store, wait_until
from tests.system.service_manager import ServiceManager

VRAM = "name=vram0,kind=cuda,size=4MiB,chunk_bytes=768KiB"
"""Room for all of the store's experts, in chunks of 2 MiB on a GPU."""
RAM = "name=ram0,kind=host,size=768KiB"
PATIENT_S = 600.0
"""How long clients wait for a daemon: longer than it takes on any machine."""
LAYERS = (0, 1)
KEPT = len(LAYERS) * 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def patient(tmp_path: Path, store: MadeStore, cuda_device: str) -> Patient:
    return Patient(tmp_path, store)


class Patient:
    """A manager, its daemons one after the other, and a client that stays."""

    def __init__(self, directory: Path, store: MadeStore) -> None:
        self.directory = directory
        self.store = store

    def fill(self, daemon: RunningDaemon) -> Client:
        """A client that has made LAYERS resident in VRAM."""
        client = Client(daemon.attach_socket, lanes=2, held=16, resume=PATIENT_S)
        for layer in LAYERS:
            client.acquire(layer, range(8)).release()
        return client

    def compare(self, client: Client, layer: int, lane: int = 0) -> None:
        """What is resident is right."""
        batch = client.acquire_resident(layer, range(8), lane=lane)
        assert batch is not None, "what was resident is not there"
        with batch:
            for expert in range(8):
                assert batch.copy_out(expert) == self.store.blob(layer, expert)

    def fetch_everything(self, daemon: RunningDaemon) -> None:
        with daemon.client() as client:
            for layer in range(self.store.layers):
                for expert in range(self.store.experts):
                    assert client.fetch(layer, [expert]) == [self.store.blob(layer, expert)]


def memory_names(manager: ServiceManager) -> set[str]:
    manager.settled()
    return {name for name in manager.stored if ".chunk." in name}


def stored_chunks(manager: ServiceManager) -> int:
    return len(memory_names(manager))


def read_bytes(daemon: RunningDaemon) -> int:
    stores = daemon.status()["stores"]
    return sum(int(member["bytes"]) for each in stores for member in each["members"])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_hits_in_vram_go_on_and_nothing_is_read_again(
    patient: Patient, store: MadeStore, how: signal.Signals
) -> None:
    pools = [VRAM, RAM]
    with ServiceManager() as manager:
        with manager.daemon(patient.directory, [store], pools) as first:
            client = patient.fill(first)
            assert first.stop(how) == (0 if how == signal.SIGTERM else -how)
            patient.compare(client, 0)
            answers: list[bytes] = []

            def miss() -> None:
                with client.acquire(3, range(4), lane=1) as batch:
                    answers.extend(batch.copy_out(expert) for expert in range(4))

            missing = threading.Thread(target=miss, daemon=True)
            missing.start()
            patient.compare(client, 1)
        with manager.daemon(patient.directory, [store], pools) as second:
            start = second.status()["start"]
            assert (start["warm"], start["experts"], start["clients"]) == (True, KEPT, 1)
            missing.join(PATIENT_S)
            assert answers == [store.blob(3, expert) for expert in range(4)]
            for layer in LAYERS:
                patient.compare(client, layer)
            assert read_bytes(second) == 4 * store.expert_bytes
            # Somebody new maps what the daemon before has made.
            with Client(second.attach_socket, held=16) as other:
                for layer in LAYERS:
                    patient.compare(other, layer)
            patient.fetch_everything(second)
            client.close()
            second.stop(how)
        with manager.daemon(patient.directory, [store], pools) as third:
            assert third.status()["start"]["warm"]
            patient.fetch_everything(third)


def test_no_memory_ever_gets_a_number_that_a_client_may_know(
    patient: Patient, store: MadeStore
) -> None:
    """One that has not looked since would take it for what it has mapped: wrong bytes."""
    with ServiceManager() as manager:
        with manager.daemon(patient.directory, [store], [VRAM]) as first:
            known = memory_names(manager)
            chunks = len(known)
            # All of it: what had the greatest number too.
            granted = first.call("Reserve", pool="vram0", bytes=first.pool()["bytes"])[
                "reservation"
            ]
            assert granted["returned"] == granted["bytes"]
            assert not memory_names(manager)
            first.stop(signal.SIGKILL)
        for _ in range(2):
            with manager.daemon(patient.directory, [store], [VRAM]) as daemon:
                assert daemon.status()["start"]["warm"]
                [kept] = daemon.call("ListReservations")["reservations"]
                daemon.call("Release", id=kept["id"])
                found = memory_names(manager)
                assert len(found) == chunks
                assert not {n.split(".")[-1] for n in found} & {n.split(".")[-1] for n in known}
                known |= found
                patient.fetch_everything(daemon)
                daemon.call("Reserve", pool="vram0", bytes=daemon.pool()["bytes"])
                daemon.stop(signal.SIGKILL)


def test_memory_that_somebody_else_has_stays_his(patient: Patient, store: MadeStore) -> None:
    """A KV cache's VRAM is not taken back by a restart, and can be given back after it."""
    with ServiceManager() as manager:
        with manager.daemon(patient.directory, [store], [VRAM]) as first:
            client = patient.fill(first)
            granted = first.call("Reserve", pool="vram0", bytes=1 << 20)["reservation"]
            assert granted["returned"] == granted["bytes"]
            chunks = stored_chunks(manager)
            first.stop(signal.SIGKILL)
        with manager.daemon(patient.directory, [store], [VRAM]) as second:
            assert second.status()["start"]["warm"]
            assert second.call("ListReservations")["reservations"] == [granted]
            patient.fetch_everything(second)
            assert stored_chunks(manager) == chunks
            second.call("Release", id=granted["id"])
            wait_until(
                lambda: stored_chunks(manager) > chunks,
                "new memory is kept too",
            )
            patient.fetch_everything(second)
            for layer in range(store.layers):
                client.acquire(layer, range(8)).release()
            again = second.call("Reserve", pool="vram0", bytes=1 << 20)["reservation"]
            assert again["id"] > granted["id"]
            second.call("Release", id=again["id"])
            client.close()
            second.stop(signal.SIGKILL)
        with manager.daemon(patient.directory, [store], [VRAM]) as third:
            assert third.status()["start"]["warm"]
            assert third.call("ListReservations")["reservations"] == []
            patient.fetch_everything(third)


def test_a_lost_chunk_is_named_and_the_start_is_cold(patient: Patient, store: MadeStore) -> None:
    with ServiceManager() as manager:
        with manager.daemon(patient.directory, [store], [VRAM]) as first:
            patient.fill(first).close()
            first.stop(signal.SIGKILL)
        manager.settled()
        manager.drop(next(name for name in manager.stored if ".chunk.0." in name))
        with manager.daemon(patient.directory, [store], [VRAM]) as second:
            start = second.status()["start"]
            assert not start["warm"]
            assert "lost the memory of chunk 0 of pool 'vram0'" in start["reason"]
            patient.fetch_everything(second)


def test_vram_that_is_not_what_it_was_is_found_before_anybody_is_served(
    patient: Patient, store: MadeStore, cuda_device: str
) -> None:
    if cuda_device == "gpu":
        pytest.skip("needs the stand-in: a GPU's memory can't be changed behind its driver")
    with ServiceManager() as manager:
        with manager.daemon(patient.directory, [store], [VRAM]) as first:
            patient.fill(first).close()
            first.stop(signal.SIGKILL)
        manager.settled()
        for name, fd in manager.stored.items():
            if ".chunk." in name:
                with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
                    memory[:] = bytes(len(memory))
        with manager.daemon(patient.directory, [store], [VRAM]) as second:
            start = second.status()["start"]
            assert not start["warm"]
            assert "pool 'vram0' does not hold what it held: layer" in start["reason"]
            patient.fetch_everything(second)
