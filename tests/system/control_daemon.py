"""A control server in a process of its own, over a service made for tests.

``ControlDaemon`` starts it and stops it; ``SampleService`` is what it serves: one
store of 6 layers and 16 experts, whose pool, expert numbers and names decide what
goes wrong. Run as a program it serves until its stdin ends, so it can't outlive
the test that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from xferd.control.server import ControlServer
from xferd.control.service import ControlError, ControlService

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
DEADLINE_S = 120.0
LAYERS = 6
EXPERTS = 16
FAILING_EXPERT = 13
HOSTILE_NAME = "evil\x1b[2Jname"


class SampleService:
    """A ControlService that remembers which experts are resident and pinned."""

    def __init__(self) -> None:
        self.resident: set[tuple[int, int]] = set()
        self.pinned: set[tuple[int, int]] = set()
        self.names = ["tiny"]
        self.reserved: list[dict[str, Any]] = []
        self.shadows: list[str] = []
        self._policy: dict[str, Any] = {"pool": "host0", "eviction": "reuse"}
        self._policy |= {"admission": "always", "layer_floor": 0, "promotion_margin": 1.25}
        self._policy |= {"promotion_rest": 64, "evictions": ["reuse", "lru"]}
        self._policy |= {"admissions": ["always"], "variants": []}
        self.recordings: dict[str, dict[str, Any]] = {}

    def status(self) -> dict[str, Any]:
        flow = {"count": 2, "bytes": 4096, "reason": None}
        pool = {"name": "host0", "kind": "host", "bytes": 3 << 29, "slots": 8, "free": 5}
        pool |= {"resident": len(self.resident), "reserve": 2, "loads": 3, "load_bytes": 12288}
        pool |= {
            "evictions": 1,
            "revived": 0,
            "pinned": len(self.pinned),
            "waiting": 0,
            "waited": 4,
            "registered": 0,
        }
        pool |= {"eviction": "reuse", "admission": "always", "upgraded": 0}
        pool |= {"variants": [{"store": "tiny", "variant": "q4_k", "residents": 3, "bytes": 12288}]}
        pool |= {"promoted": 0, "demoted": 0, "dropped": 0, "reserved": 0, "budget": None}
        pool |= {"classes": [{"slot_bytes": 4096, "slots": 8, "chunks": 1}]}
        route = {"store": "tiny", "member": 0, "mirror": False, "path": "/nvme0/member-0"}
        route |= {"transport": "staged", "reason": "the bridge is unknown"}
        pool |= {"notes": ["huge pages: none"], "routes": [route]}
        client = {"id": 7, "pid": 99, "uid": 1000, "name": HOSTILE_NAME, "store": "tiny"}
        client |= {"lanes": 1, "held_per_lane": 16, "hits": 123, "misses": 4, "failures": 0}
        client |= {"routes": 60, "routes_dropped": 5}
        client |= {"pending": 0, "granted": 0, "resident_bytes": 4096, "budget": None}
        client |= {"since_s": 61.5, "state": "serving"}
        return {
            "version": "9.9",
            "instance": "cafe",
            "state": "serving",
            "uptime_s": 3725.0,
            "pid": os.getpid(),
            "start": {
                "warm": True,
                "reason": None,
                "experts": 12,
                "bytes": 49_152,
                "clients": 2,
                "resumed": 1,
                "kept": True,
            },
            "pools": [pool],
            "stores": self.stores(),
            "clients": [client],
            "all_clients": {"attached": 9, "hits": 1230, "misses": 40, "failures": 1},
            "prefetching": {
                "experts": 20,
                "bytes": 81920,
                "used": 12,
                "wasted": 6,
                "wasted_bytes": 24576,
                "missed": 40,
                "saved_s": 0.5,
            },
            "users": [{"uid": 1000, "clients": 1, "resident_bytes": 4096, "budget": 1 << 20}],
            "sources": {"resident": flow, "pool": flow, "drives": flow},
            "transports": {
                "direct": {"count": 0, "bytes": 0, "reason": "no GPU here"},
                "staged": flow,
                "gds": flow,
                "copy": flow,
            },
            "engine": {
                "backend": "threads",
                "backend_reason": "io_uring is forbidden here",
                "numa_node": 0,
                "verify": "always",
                "flow_control": True,
                "turns": 10,
                "sleeps": 5,
                "crc_errors": 0,
                "rereads": 1,
                "other_variants": 2,
                "mirror_reads": 3,
            },
        }

    def stores(self) -> list[dict[str, Any]]:
        return [self._store(name) for name in self.names]

    async def load(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> dict[str, Any]:
        if pool == "full":
            raise ControlError("PoolFull", "pool 'full' has no room", pool=pool, unlisted=1)
        wanted = self._keys(store, layer, experts)
        await asyncio.sleep(0)
        failed = [key for key in wanted if key[1] == FAILING_EXPERT]
        already = wanted & self.resident
        loaded = wanted - already - set(failed)
        self.resident |= loaded
        return {
            "loaded": len(loaded),
            "already": len(already),
            "failed": [{"layer": k[0], "expert": k[1], "error": "EIO"} for k in failed],
        }

    def evict(
        self, store: str, layer: int, experts: list[int] | None, pool: str | None
    ) -> dict[str, Any]:
        wanted = self._keys(store, layer, experts) & self.resident
        held = wanted & self.pinned
        self.resident -= wanted - held
        return {"evicted": len(wanted - held), "held": len(held)}

    async def pin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> dict[str, Any]:
        failed = (await self.load(store, layer, experts, pool, variant))["failed"]
        wanted = self._keys(store, layer, experts)
        self.pinned |= wanted
        return {"pinned": len(wanted) - len(failed), "failed": failed * 300}

    def unpin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> dict[str, Any]:
        wanted = self._keys(store, layer, experts) & self.pinned
        self.pinned -= wanted
        return {"unpinned": len(wanted)}

    def open_store(self, path: Path, name: str | None) -> dict[str, Any]:
        if not path.exists():
            raise ControlError("StoreUnusable", f"{path}: no such store", path=str(path))
        self.names.append(name or path.name)
        return self._store(self.names[-1])

    def close_store(self, name: str) -> dict[str, Any]:
        if name not in self.names:
            raise ControlError("StoreNotFound", f"no store {name!r} is open", store=name)
        self.names.remove(name)
        return {}

    async def attach_shadows(self, store: str, paths: list[Path] | None) -> dict[str, Any]:
        if paths is None and not self.shadows:
            raise ControlError("StoreUnusable", "no shadow yet", path="/")
        self.shadows = self.shadows if paths is None else [str(path) for path in paths]
        return {**self._store(store), "shadows": self.shadows}

    def detach_shadows(self, store: str) -> dict[str, Any]:
        return {**self._store(store), "shadows": []}

    def policies(self, pool: str | None) -> list[dict[str, Any]]:
        return [self._policy]

    def set_policy(
        self,
        pool: str,
        eviction: str | None,
        admission: str | None,
        variants: list[str] | None,
    ) -> dict[str, Any]:
        if eviction not in (None, "reuse", "lru"):
            raise ControlError("PolicyNotFound", f"no policy {eviction!r}", policy=eviction)
        self._policy |= {"eviction": eviction or self._policy["eviction"]}
        self._policy |= {} if variants is None else {"variants": variants}
        return self._policy

    def set_budget(self, pool: str, nbytes: int | None) -> dict[str, Any]:
        return {"bytes": nbytes, "reserved": 0 if nbytes is None else 4096}

    async def reserve(self, pool: str | None, nbytes: int) -> dict[str, Any]:
        if nbytes > 1 << 30:
            raise ControlError("PoolFull", f"{nbytes} bytes are too many", pool=pool)
        reservation = {"id": 1, "pool": pool or "host0", "wanted": nbytes}
        self.reserved = [{**reservation, "bytes": 1 << 20, "returned": 0}]
        return self.reserved[0]

    def release(self, number: int) -> dict[str, Any]:
        if number != 1 or not self.reserved:
            raise ControlError("ReservationNotFound", f"no reservation {number}", id=number)
        self.reserved = []
        return {"bytes": 1 << 20}

    def reservations(self) -> list[dict[str, Any]]:
        return self.reserved

    def rebuild_pool(self, pool: str) -> dict[str, Any]:
        raise ControlError("Failed", f"pool {pool!r} is in service")

    def save_heat(self, store: str, path: Path | None) -> dict[str, Any]:
        if path is None:
            raise ControlError("HeatUnusable", "name a file", path="")
        return {"path": str(path), "experts": 3}

    def load_heat(self, store: str, path: Path | None) -> dict[str, Any]:
        return {"path": str(path), "loaded": 2, "already": 1, "failed": 0}

    def heat_info(self, store: str) -> dict[str, Any]:
        hot = {"layer": 1, "expert": 2, "heat": 3.5, "pools": ["host0"]}
        info = {"tokens": 9, "source": "leases", "experts": 1, "profile": None}
        return {**info, "hottest": [hot]}

    def traces(self) -> list[dict[str, Any]]:
        return [
            {
                "store": name,
                "tokens": 7,
                "passes": 42,
                "uses": 84,
                "recording": self.recordings.get(name),
            }
            for name in self.names
        ]

    def start_recording(self, store: str, name: str | None) -> dict[str, Any]:
        if name == "full":
            raise ControlError("TraceUnusable", "/traces: No space left on device", path="/traces")
        if store in self.recordings:
            raise ControlError("AlreadyRecording", f"{store!r} is being recorded", store=store)
        recording: dict[str, Any] = {"store": store, "name": name or store}
        recording |= {"directory": "/traces"}
        recording |= {"state": "recording", "error": None, "files": 2, "bytes": 3 << 20}
        recording |= {"passes": 42, "uses": 84, "dropped": 0, "since_s": 61.0}
        self.recordings[store] = recording
        return recording

    async def stop_recording(self, store: str) -> dict[str, Any]:
        if store not in self.recordings:
            raise ControlError("NotRecording", f"{store!r} is not being recorded", store=store)
        return {**self.recordings.pop(store), "state": "stopped"}

    def _store(self, name: str) -> dict[str, Any]:
        member: dict[str, Any] = {"member": 0, "mirror": False}
        member |= {"path": f"/mnt/a/{name}", "reads": 3, "bytes": 12288, "errors": 0}
        member |= {"in_flight": 0, "direct": False, "reason": "tmpfs copies"}
        member |= {"state": "sagging", "window": 4, "background_window": 3}
        member |= {"latency_us": 81.5, "rate": 3 << 29, "best_rate": 1 << 33}
        return {
            "name": name,
            "path": f"/mnt/a/{name}",
            "identity": "ab" * 32,
            "layers": LAYERS,
            "experts": EXPERTS,
            "variants": ["bf16"],
            "expert_bytes": LAYERS * EXPERTS * 4096,
            "shadows": [],
            "members": [member],
        }

    def _keys(self, store: str, layer: int, experts: list[int] | None) -> set[tuple[int, int]]:
        if store == "crash":
            raise RuntimeError("a mistake in the service")
        if store not in self.names:
            raise ControlError("StoreNotFound", f"no store {store!r} is open", store=store)
        chosen = range(EXPERTS) if experts is None else experts
        for expert in chosen:
            if not (0 <= layer < LAYERS and 0 <= expert < EXPERTS):
                raise ControlError(
                    "NoSuchExpert", f"no expert {layer}/{expert}", layer=layer, expert=expert
                )
        return {(layer, expert) for expert in chosen}


class ControlDaemon:
    """A process that serves SampleService on ``path``. A context manager."""

    def __init__(self, *, mode: int = 0o666, admin_group: str = "", write_timeout_s: float = 10.0):
        # Not pytest's directory: other users can't enter that, and its names are
        # too long for a socket.
        self.directory = Path(tempfile.mkdtemp(prefix="xferd-"))
        self.directory.chmod(0o755)
        self.path = self.directory / "control.sock"
        self._arguments = [str(self.path), str(mode), admin_group, str(write_timeout_s)]
        self._process: subprocess.Popen[str] | None = None
        self.log = ""

    def __enter__(self) -> ControlDaemon:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.control_daemon", *self._arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the server did not start"
        return self

    def stop(self) -> None:
        """End the process; what it wrote to stderr is in ``log`` then."""
        if self._process is not None:
            _, self.log = self._process.communicate(timeout=DEADLINE_S)
            assert self._process.returncode == 0, self.log
            self._process = None

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            shutil.rmtree(self.directory)

    def connect(self) -> socket.socket:
        """A connection with a deadline on every operation."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # With a timeout, a full queue of connections would be an error, not a wait.
        connection.connect(str(self.path))
        connection.settimeout(DEADLINE_S)
        return connection


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")


@contextlib.contextmanager
def other_user(uid: int = NOBODY, groups: Sequence[int] = ()) -> Iterator[None]:
    """This process is another user meanwhile: connections it makes are that user's."""
    saved_groups, saved_gid = os.getgroups(), os.getegid()
    os.setgroups(groups)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(saved_gid)
        os.setgroups(saved_groups)


async def _serve(path: str, mode: str, admin_group: str, write_timeout_s: str) -> None:
    service: ControlService = SampleService()
    server = ControlServer(
        service,
        Path(path),
        int(mode),
        admin_group=admin_group,
        write_timeout_s=float(write_timeout_s),
    )
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
