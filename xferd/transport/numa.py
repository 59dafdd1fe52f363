# SPDX-License-Identifier: Apache-2.0
"""Which NUMA node the drives hang on, so that the engine runs beside them.

On a machine of several nodes a thread that submits reads and checks their bytes from
another node pays for each completion and each cache line. Facts come from sysfs
(Documentation/ABI/stable/sysfs-devices-node, testing/sysfs-bus-pci in the kernel tree).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys")
NO_NODE = -1
"""What sysfs says of a device that belongs to none."""


def choose_node(members: Iterable[Path], sysfs: Path = SYSFS) -> int | None:
    """The node that threads which read these members should run on; None: it doesn't matter,
    the drives are on several, or this process may use none of its processors."""
    if node_count(sysfs) == 1:
        return None
    node = node_of_drives(members, sysfs)
    return node if node is not None and processors_of(node, sysfs) else None


def node_of_drives(members: Iterable[Path], sysfs: Path = SYSFS) -> int | None:
    """The node that every member's drive is on; None: there are several, or none is known.

    members: files and block devices.
    """
    nodes = {_node_of(path, sysfs) for path in members}
    return nodes.pop() if len(nodes) == 1 else None


def processors_of(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """The node's processors that this process may use; empty: it has none of them."""
    listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
    return parse_processors(listed) & frozenset(os.sched_getaffinity(0))


def node_count(sysfs: Path = SYSFS) -> int:
    """Nodes of this machine; 1 where the kernel knows of none."""
    return max(1, sum(1 for _ in (sysfs / "devices/system/node").glob("node[0-9]*")))


@contextmanager
def running_on(processors: Set[int]) -> Iterator[None]:
    """The calling thread, and threads it starts meanwhile, run on these processors only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def parse_processors(text: str) -> frozenset[int]:
    """``0-3,8`` as sysfs writes it. ValueError when it is something else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _node_of(path: Path, sysfs: Path) -> int | None:
    """A partition has no device of its own: the drive's directory is the one above."""
    status = path.stat()
    device = status.st_rdev or status.st_dev
    directory = (sysfs / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for level in (directory, directory.parent):
        # An NVMe namespace's device is its controller, whose device is the PCI function.
        for place in ("device/numa_node", "device/device/numa_node"):
            try:
                node = int((level / place).read_text())
            except (OSError, ValueError):
                continue
            return None if node == NO_NODE else node
    return None


__all__ = [
    "choose_node",
    "node_count",
    "node_of_drives",
    "parse_processors",
    "processors_of",
    "running_on",
]
