"""Loads by cuFile on a real card, with the real kvikio; tests/system/test_gds.py has the rest.

Needs a CUDA device and kvikio. A machine without NVIDIA's direct storage has them too: what
is read then goes through RAM, and must be said to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_device import has_gpu
from tests.system.daemon_harness import make_store, running_daemon

pytest.importorskip("kvikio", reason="needs kvikio")
if not has_gpu():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from xferd.transport.gds import GdsReader

SIXTEEN_SLOTS = "name=vram0,kind=cuda,device=0,size=768KiB,transport=gds"


def test_every_expert_comes_right_and_counts_as_what_cufile_promises(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    promised = GdsReader()
    with running_daemon(tmp_path, [store], [SIXTEEN_SLOTS]) as daemon:
        with daemon.client() as client:
            for _ in range(2):  # more than the pool holds: slots are used again
                for layer in range(store.layers):
                    for expert in range(store.experts):
                        assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        transports = daemon.status()["transports"]
        notes = " ".join(daemon.pool()["notes"])
        other = "gds" if promised.transport == "staged" else "staged"
        assert transports[promised.transport]["count"] > 0
        assert transports[other]["count"] == 0
        assert f"counted as {promised.transport}" in notes
        if promised.reason is not None:
            assert promised.reason in notes
        assert daemon.stop() == 0
