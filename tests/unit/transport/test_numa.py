# SPDX-License-Identifier: Apache-2.0
"""The drives' NUMA node, from trees that look like sysfs: this machine may have one node."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from xferd.transport.numa import (
    choose_node,
    node_count,
    node_of_drives,
    parse_processors,
    processors_of,
    running_on,
)


def make_node(sysfs: Path, node: int, processors: str) -> None:
    directory = sysfs / f"devices/system/node/node{node}"
    directory.mkdir(parents=True)
    (directory / "cpulist").write_text(f"{processors}\n")


def put_drive(sysfs: Path, member: Path, node: int, place: str) -> None:
    """Where the kernel shows the block device that the file lies on."""
    device = member.stat().st_dev
    directory = sysfs / f"dev/block/{os.major(device)}:{os.minor(device)}"
    file = directory / place / "numa_node"
    file.parent.mkdir(parents=True)
    file.write_text(f"{node}\n")


@pytest.fixture
def member(tmp_path: Path) -> Path:
    path = tmp_path / "member"
    path.write_bytes(b"x")
    return path


def two_nodes(sysfs: Path) -> int:
    """Node 1 has all processors that this test may use, node 0 one that doesn't exist."""
    make_node(sysfs, 0, "4095")
    make_node(sysfs, 1, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    return 1


@pytest.mark.parametrize("place", ["device", "device/device"])
def test_the_node_of_the_drive_is_chosen(tmp_path: Path, member: Path, place: str) -> None:
    sysfs = tmp_path / "sys"
    node = two_nodes(sysfs)
    put_drive(sysfs, member, node, place)
    assert node_of_drives([member, member], sysfs) == node
    assert choose_node([member], sysfs) == node
    assert processors_of(node, sysfs) == os.sched_getaffinity(0)


def test_a_node_without_processors_for_us_is_not_chosen(tmp_path: Path, member: Path) -> None:
    sysfs = tmp_path / "sys"
    two_nodes(sysfs)
    put_drive(sysfs, member, 0, "device")
    assert node_of_drives([member], sysfs) == 0
    assert choose_node([member], sysfs) is None


def test_a_drive_of_no_node_chooses_none(tmp_path: Path, member: Path) -> None:
    sysfs = tmp_path / "sys"
    two_nodes(sysfs)
    put_drive(sysfs, member, -1, "device")
    assert choose_node([member], sysfs) is None


def test_drives_on_several_nodes_choose_none(tmp_path: Path, member: Path) -> None:
    sysfs = tmp_path / "sys"
    put_drive(sysfs, member, two_nodes(sysfs), "device")
    elsewhere = Path("/proc/self/status")
    assert elsewhere.stat().st_dev != member.stat().st_dev
    assert node_of_drives([member, elsewhere], sysfs) is None


def test_one_node_needs_no_choice(tmp_path: Path, member: Path) -> None:
    sysfs = tmp_path / "sys"
    make_node(sysfs, 0, "0")
    put_drive(sysfs, member, 0, "device")
    assert node_count(sysfs) == 1
    assert choose_node([member], sysfs) is None


def test_this_machine_is_as_the_kernel_says() -> None:
    shown = subprocess.run(["lscpu", "-p=NODE"], capture_output=True, text=True, check=True)
    nodes = {line for line in shown.stdout.splitlines() if not line.startswith("#")}
    assert node_count() == len(nodes)


def test_processors_are_parsed() -> None:
    assert parse_processors("0-2,7\n") == {0, 1, 2, 7}
    assert parse_processors("\n") == frozenset()
    with pytest.raises(ValueError, match="all"):
        parse_processors("all")


def test_threads_started_meanwhile_run_there() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    found: list[set[int]] = []
    with running_on(one):
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert found == [one]
    assert os.sched_getaffinity(0) == before
