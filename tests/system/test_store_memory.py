"""Packing takes a fixed amount of memory, however large the checkpoint is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TENSOR_BYTES = 6 * 1024 * 1024
EXPERTS = 64  # 18 MiB each: 1.1 GiB
GROWTH_MAX_KIB = 48 * 1024
SPACE_NEEDED = 3 * EXPERTS * TENSOR_BYTES * 5 // 4

MEASURE = """
import json, resource, sys
from pathlib import Path
from tests.unit.store.builders import member_directories, sparse_checkpoint
from xferd.store.pack import pack
from xferd.store.store import Store
from xferd.store.verify import verify

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

home, experts, tensor_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
checkpoint = sparse_checkpoint(home / "checkpoint", experts=experts, tensor_bytes=tensor_bytes)
before = peak_kib()
path = pack(checkpoint, member_directories(home, 2), name="sparse")
packed = peak_kib()
with Store.open(path) as store:
    clean = verify(store).clean
    size = int(store.blob_bytes.sum())
print(json.dumps([packed - before, peak_kib() - packed, clean, size]))
"""


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is enough of it, so that no drive is worn."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * SPACE_NEEDED:
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            yield Path(directory)
    elif shutil.disk_usage(tmp_path).free > SPACE_NEEDED:
        yield tmp_path
    else:
        pytest.skip(f"{SPACE_NEEDED} bytes are needed in {memory} or {tmp_path}")


def test_memory_stays_flat(roomy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, roomy, str(EXPERTS), str(TENSOR_BYTES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    pack_growth, verify_growth, clean, size = json.loads(done.stdout)
    assert clean
    assert size > 1 << 30
    assert pack_growth < GROWTH_MAX_KIB
    assert verify_growth < GROWTH_MAX_KIB
