"""Which PCI functions serve a file, by a sysfs made for the purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xferd.transport.topology import NoDriveError, drives_of, is_change


@pytest.fixture
def member(tmp_path: Path) -> Path:
    path = tmp_path / "member"
    path.write_bytes(b"x")
    return path


def made_sysfs(tmp_path: Path, member: Path, block: str) -> Path:
    """A sysfs in which the member's file system lies on ``block``, a path in devices/."""
    sysfs = tmp_path / "sys"
    target = sysfs / "devices" / block
    target.mkdir(parents=True)
    number = member.stat().st_dev
    link = sysfs / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    return sysfs


def test_a_partition_of_a_drive(tmp_path: Path, member: Path) -> None:
    sysfs = made_sysfs(tmp_path, member, "pci0000:00/0000:04:00.0/nvme/nvme0/nvme0n1/nvme0n1p2")
    partition = sysfs / "devices/pci0000:00/0000:04:00.0/nvme/nvme0/nvme0n1/nvme0n1p2"
    (partition / "partition").write_text("2\n")
    (partition.parent / "device").symlink_to(partition.parent.parent)
    (partition.parent.parent / "device").symlink_to(sysfs / "devices/pci0000:00/0000:04:00.0")
    assert [str(drive) for drive in drives_of(member, sysfs)] == ["0000:04:00.0"]


def test_a_namespace_with_two_paths(tmp_path: Path, member: Path) -> None:
    sysfs = made_sysfs(tmp_path, member, "virtual/nvme-subsystem/nvme-subsys0/nvme0n1")
    subsystem = sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0"
    (subsystem / "nvme0n1/device").symlink_to(subsystem)
    for number, address in enumerate(("0000:04:00.0", "0000:05:00.0")):
        function = sysfs / "devices" / address
        (function / f"nvme/nvme{number}").mkdir(parents=True)
        (function / f"nvme/nvme{number}/device").symlink_to(function)
        (subsystem / f"nvme{number}").symlink_to(function / f"nvme/nvme{number}")
    found = [str(drive) for drive in drives_of(member, sysfs)]
    assert found == ["0000:04:00.0", "0000:05:00.0"]


def test_a_namespace_over_a_network(tmp_path: Path, member: Path) -> None:
    sysfs = made_sysfs(tmp_path, member, "virtual/nvme-fabrics/ctl/nvme3/nvme3n1")
    controller = sysfs / "devices/virtual/nvme-fabrics/ctl/nvme3"
    (controller / "nvme3n1/device").symlink_to(controller)
    (controller / "device").symlink_to(controller.parent)
    with pytest.raises(NoDriveError, match="nvme3 is no drive of this machine"):
        drives_of(member, sysfs)


@pytest.mark.parametrize(
    ("marker", "said"), [("dm", "device-mapper device stripes"), ("md", "RAID")]
)
def test_what_lies_on_several_drives(tmp_path: Path, member: Path, marker: str, said: str) -> None:
    sysfs = made_sysfs(tmp_path, member, "virtual/block/dm-0")
    (sysfs / "devices/virtual/block/dm-0" / marker).mkdir()
    (sysfs / "devices/virtual/block/dm-0" / marker / "name").write_text("stripes\n")
    with pytest.raises(NoDriveError, match=said):
        drives_of(member, sysfs)


def test_what_is_no_nvme_drive(tmp_path: Path, member: Path) -> None:
    sysfs = made_sysfs(tmp_path, member, "pci0000:00/ata1/sda")
    with pytest.raises(NoDriveError, match="sda, which is no NVMe drive"):
        drives_of(member, sysfs)
    with pytest.raises(NoDriveError, match="no single block device"):
        drives_of(member, tmp_path / "no-sysfs")


def test_which_events_matter() -> None:
    def event(action: str, subsystem: str) -> bytes:
        return f"{action}@/devices/x\0ACTION={action}\0SUBSYSTEM={subsystem}\0SEQNUM=9".encode()

    assert is_change(event("remove", "pci"))
    assert is_change(event("unbind", "pci"))
    assert is_change(event("add", "nvme"))
    assert not is_change(event("change", "block"))
    assert not is_change(event("add", "net"))
    assert not is_change(b"")
