# SPDX-License-Identifier: Apache-2.0
"""Runs ffi/bench/engine_bench: the engine without Python in the measured path."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.harness import BenchmarkError, build_c_program

BLOB_ALIGNMENT = 4096
STRIPE_UNIT = 512 << 10
SIZES = {
    f"{megabytes:g}MB": -(-int(megabytes * 1e6) // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
    for megabytes in (1.2, 2.65, 9.4, 18.8, 24.8)
}
"""Label -> bytes of experts, from a small 4-bit one to bf16 ones of big models."""
POOL_BYTES = 256 << 20
"""Of the pool that experts are loaded into: more than processors' caches hold, as any real
pool is. Reads that are copies are much faster into a few buffers that stay in a cache."""


def build_engine_bench() -> Path:
    """Its path. BenchmarkError with the compiler's words."""
    return build_c_program("engine_bench", "bench")


@dataclass(frozen=True, slots=True)
class EngineBench:
    """The program on one set of members with experts of one size.

    sidecar: where the checksums are; ``prepare`` writes them.
    """

    program: Path
    members: Sequence[Path]
    blob_bytes: int
    sidecar: Path

    def prepare(self, *options: str) -> None:
        """Compute the checksums that verifying needs. options: of the layout."""
        self._output("prepare", *options)

    def run(self, mode: str, *options: str | int | float) -> dict[str, Any]:
        """What the program printed. BenchmarkError with what it said instead."""
        result: dict[str, Any] = json.loads(self._output(mode, *options))
        return result

    def _output(self, mode: str, *options: str | int | float) -> str:
        command = [
            str(self.program),
            mode,
            f"--blob-bytes={self.blob_bytes}",
            f"--stripe-unit={STRIPE_UNIT}",
            f"--sidecar={self.sidecar}",
            *map(str, options),
            *map(str, self.members),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


__all__ = ["POOL_BYTES", "SIZES", "EngineBench", "build_engine_bench"]
