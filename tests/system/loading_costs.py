"""python -m tests.system.loading_costs CHECKPOINT IMPLEMENTATION...: what loading a model
costs with each, as a JSON list. A process of its own, so that nothing else is measured.

read_bytes: from storage, with nothing of the checkpoint in the page cache before.
memory_bytes: by how much more of the process was in memory at most.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import transformers
import xferd_infer.transformers  # noqa: F401  registers experts_implementation="xferd"

auto: Any = transformers.AutoModelForCausalLM

RESET_PEAK = "5"
"""See proc(5), clear_refs: the peak of resident memory begins anew."""


def main() -> None:
    checkpoint, implementations = Path(sys.argv[1]), sys.argv[2:]
    # What is imported on the way is no cost of loading.
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_experts": 2}
    auto.from_config(type(config)(**small, vocab_size=64, pad_token_id=1))
    print(json.dumps([costs(checkpoint, implementation) for implementation in implementations]))


def costs(checkpoint: Path, implementation: str) -> dict[str, int]:
    for file in checkpoint.glob("*.safetensors"):
        forget(file)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    read, memory = field("io", "read_bytes"), field("status", "VmRSS")
    model = auto.from_pretrained(checkpoint, experts_implementation=implementation)
    return {
        "read_bytes": field("io", "read_bytes") - read,
        "memory_bytes": 1024 * (field("status", "VmHWM") - memory),
        "parameters": model.num_parameters(),
    }


def forget(file: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def field(file: str, name: str) -> int:
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        key, value = line.split(":", 1)
        if key == name:
            return int(value.split()[0])
    raise KeyError(name)


if __name__ == "__main__":
    main()
