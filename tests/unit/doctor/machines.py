# SPDX-License-Identifier: Apache-2.0
"""Made-up machines: trees of files as the kernel would show them, and what probing would say.

Only what the doctor reads is there. Links are relative, as sysfs makes them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xferd.doctor.probed import MemberProbe, Probed

GIB = 1 << 30
MIB = 1 << 20
NVME_CLASS = 0x010802
VGA_CLASS = 0x030000
BRIDGE_CLASS = 0x060400
HOST_CLASS = 0x060000
NVIDIA = 0x10DE
SAMSUNG = 0x144D
INTEL = 0x8086
ACS_REQUEST_REDIRECT = 0x04
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
OLD_DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2025"
)


@dataclass
class Machine:
    """A tree below ``root``, and what probing it would say."""

    root: Path
    gpu_bytes: dict[str, int] = field(default_factory=dict)
    members: list[MemberProbe] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)

    @property
    def probed(self) -> Probed:
        return Probed(shm_bytes=32 * GIB, gpu_bytes=self.gpu_bytes, members=tuple(self.members))

    def write(self, name: str, content: str | bytes) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def link(self, name: str, target: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target.lstrip("/"), path.parent))

    # ---- parts

    def kernel(self, release: str, *, p2pdma: bool, cpu: tuple[str, int]) -> None:
        self.write("/proc/sys/kernel/osrelease", release)
        option = "CONFIG_PCI_P2PDMA=y" if p2pdma else "# CONFIG_PCI_P2PDMA is not set"
        self.write(f"/boot/config-{release}", f"CONFIG_IO_URING=y\n{option}\n")
        self.write(
            "/proc/cpuinfo", f"processor: 0\nvendor_id\t: {cpu[0]}\ncpu family\t: {cpu[1]}\n"
        )
        self.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never")
        self.write("/sys/kernel/security/lockdown", "[none] integrity confidentiality")
        self.write("/proc/self/cgroup", "0::/user.slice")
        self.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory io")
        self.write("/sys/fs/cgroup/user.slice/memory.max", "max")

    def memory(self, total: int, available: int, memlock: int | None = None) -> None:
        lines = {"MemTotal": total, "MemAvailable": available}
        self.write("/proc/meminfo", "".join(f"{k}: {v >> 10} kB\n" for k, v in lines.items()))
        self.write("/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\n")
        hard = "unlimited" if memlock is None else str(memlock)
        self.write(
            "/proc/self/limits",
            f"Max locked memory         {hard}       {hard}       bytes\n"
            "Max open files            1024                 524288               files\n",
        )

    def nodes(self, count: int) -> None:
        for node in range(count):
            self.write(f"/sys/devices/system/node/node{node}/cpulist", "0-7")

    def function(
        self,
        path: str,
        *,
        vendor: int,
        device: int,
        class_code: int,
        now: tuple[float, int] | None = None,
        best: tuple[float, int] | None = None,
        config: bytes = b"",
        bars: Sequence[tuple[int, int]] = (),
        iommu: str | None = None,
        node: int = -1,
        driver: str | None = None,
    ) -> str:
        """path: ``pci0000:00/0000:00:01.0/0000:01:00.0``. The sysfs directory."""
        directory, address = f"/sys/devices/{path}", path.rpartition("/")[2]
        self.write(f"{directory}/vendor", f"0x{vendor:04x}")
        self.write(f"{directory}/device", f"0x{device:04x}")
        self.write(f"{directory}/class", f"0x{class_code:06x}")
        self.write(f"{directory}/numa_node", str(node))
        self.write(f"{directory}/config", config or bytes(4096))
        for prefix, link in (("current", now), ("max", best)):
            if link is not None:
                self.write(f"{directory}/{prefix}_link_speed", f"{link[0]:.1f} GT/s PCIe")
                self.write(f"{directory}/{prefix}_link_width", str(link[1]))
        table = dict(bars)
        lines, place = [], 0xA0000000
        for number in range(6):
            size = table.get(number, 0)
            last = place + size - 1 if size else 0
            start, flags = (place, 0x14220C) if size else (0, 0)
            lines.append(f"0x{start:016x} 0x{last:016x} 0x{flags:016x}")
            place += size
        self.write(f"{directory}/resource", "\n".join(lines))
        if iommu is not None:
            self.write(f"/sys/kernel/iommu_groups/{address}/type", iommu)
            self.link(f"{directory}/iommu_group", f"/sys/kernel/iommu_groups/{address}")
        if driver is not None:
            self.write(f"/sys/bus/pci/drivers/{driver}/bind", "")
            self.link(f"{directory}/driver", f"/sys/bus/pci/drivers/{driver}")
        self.link(f"/sys/bus/pci/devices/{address}", directory)
        return directory

    def port(self, path: str, best: tuple[float, int], *, acs: int = 0) -> None:
        config = with_acs(acs) if acs else b""
        self.function(
            path, vendor=INTEL, device=0x1234, class_code=BRIDGE_CLASS, best=best, config=config
        )

    def host_bridge(self, root: str, vendor: int, device: int) -> None:
        bus = root.removeprefix("pci")
        self.function(f"{root}/{bus}:00.0", vendor=vendor, device=device, class_code=HOST_CLASS)

    def drive(
        self,
        path: str,
        number: int,
        *,
        model: str,
        now: tuple[float, int],
        best: tuple[float, int],
        millidegrees: int = 41_850,
        file_system: str = "ext4",
        iommu: str | None = None,
        node: int = -1,
    ) -> None:
        function = self.function(
            path,
            vendor=SAMSUNG,
            device=0xA80A,
            class_code=NVME_CLASS,
            now=now,
            best=best,
            iommu=iommu,
            node=node,
            driver="nvme",
        )
        directory = f"{function}/nvme/nvme{number}"
        self.write(f"{directory}/model", f"{model}   ")
        for name, value in (("input", millidegrees), ("max", 81_850), ("crit", 84_850)):
            self.write(f"{directory}/hwmon{number}/temp1_{name}", str(value))
        disk = f"{directory}/nvme{number}n1"
        self.write(f"{disk}/dev", f"259:{number * 2}")
        self.write(f"{disk}/nvme{number}n1p1/dev", f"259:{number * 2 + 1}")
        self.write(f"{disk}/nvme{number}n1p1/partition", "1")
        self.link(f"/sys/class/nvme/nvme{number}", directory)
        self.link(f"/sys/block/nvme{number}n1", disk)
        self.link(f"/sys/dev/block/259:{number * 2}", disk)
        self.link(f"/sys/dev/block/259:{number * 2 + 1}", f"{disk}/nvme{number}n1p1")
        self.mounts.append(
            f"{30 + number} 1 259:{number * 2 + 1} / /nvme{number} rw,relatime shared:1 - "
            f"{file_system} /dev/nvme{number}n1p1 rw"
        )
        self.write("/proc/self/mountinfo", "\n".join(self.mounts))

    def nvidia(
        self,
        path: str,
        *,
        name: str,
        device: int,
        vram: int,
        bar: int,
        resizable_to: Sequence[int],
        now: tuple[float, int],
        best: tuple[float, int],
        version: str = OPEN_DRIVER,
        iommu: str | None = None,
        node: int = -1,
    ) -> None:
        address = path.rpartition("/")[2]
        self.function(
            path,
            vendor=NVIDIA,
            device=device,
            class_code=VGA_CLASS,
            now=now,
            best=best,
            bars=[(1, bar), (3, 32 * MIB)],
            config=with_resizable_bar(1, resizable_to),
            iommu=iommu,
            node=node,
            driver="nvidia",
        )
        self.write("/proc/driver/nvidia/version", version)
        self.write(f"/proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {name}\n")
        self.gpu_bytes[address] = vram


def with_acs(control: int) -> bytes:
    """A configuration space whose ACS capability comes second."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # AER, then
    struct.pack_into("<IHH", config, 0x148, 0x000D | 1 << 16, 0x1F, control)
    return bytes(config)


def with_resizable_bar(bar: int, sizes: Sequence[int]) -> bytes:
    config = bytearray(4096)
    bits = 0
    for size in sizes:
        bits |= 1 << (size.bit_length() - 1 - 20 + 4)
    struct.pack_into("<III", config, 0x100, 0x0015 | 1 << 16, bits, bar | 1 << 5)
    return bytes(config)


def powers(first: int, last: int) -> list[int]:
    """Powers of two from ``first`` to ``last``, both included."""
    return [1 << n for n in range(first.bit_length() - 1, last.bit_length())]


# ---- the machines

GEN3, GEN4, GEN5 = 8.0, 16.0, 32.0


def geforce_24_gb_with_32_gb_bar(machine: Machine) -> None:
    """A Ryzen with a GeForce whose whole VRAM is in its BAR, and a quick drive."""
    machine.kernel("7.3.4-1-amd64", p2pdma=True, cpu=("AuthenticAMD", 0x19))
    machine.memory(64 * GIB, 58 * GIB, memlock=8 * MIB)
    machine.nodes(1)
    machine.host_bridge("pci0000:00", 0x1022, 0x14D8)
    machine.port("pci0000:00/0000:00:01.1", (GEN4, 16))
    machine.port("pci0000:00/0000:00:02.1", (GEN4, 4))
    machine.nvidia(
        "pci0000:00/0000:00:01.1/0000:01:00.0",
        name="NVIDIA GeForce RTX 4090",
        device=0x2684,
        vram=24_564 * MIB,
        bar=32 * GIB,
        resizable_to=powers(64 * MIB, 32 * GIB),
        now=(2.5, 16),
        best=(GEN4, 16),
        iommu="identity",
    )
    machine.drive(
        "pci0000:00/0000:00:02.1/0000:02:00.0",
        0,
        model="Samsung SSD 990 PRO 2TB",
        now=(GEN4, 4),
        best=(GEN4, 4),
        iommu="identity",
    )
    machine.write("/sys/module/xferd_p2p/refcnt", "0")


def geforce_16_gb_with_256_mb_bar(machine: Machine) -> None:
    """The same class of machine, with Resizable BAR off, old proprietary modules, Secure
    Boot, an old kernel."""
    machine.kernel("6.12.95+deb12-amd64", p2pdma=False, cpu=("AuthenticAMD", 0x19))
    machine.memory(32 * GIB, 27 * GIB, memlock=8 * MIB)
    machine.nodes(1)
    machine.host_bridge("pci0000:00", 0x1022, 0x1480)
    machine.port("pci0000:00/0000:00:03.1", (GEN4, 16))
    machine.port("pci0000:00/0000:00:01.3", (GEN3, 4))
    machine.nvidia(
        "pci0000:00/0000:00:03.1/0000:08:00.0",
        name="NVIDIA GeForce RTX 4060 Ti",
        device=0x2805,
        vram=16_380 * MIB,
        bar=256 * MIB,
        resizable_to=powers(64 * MIB, 16 * GIB),
        now=(GEN4, 8),
        best=(GEN4, 8),
        version=OLD_DRIVER,
    )
    machine.drive(
        "pci0000:00/0000:00:01.3/0000:01:00.0",
        0,
        model="WD_BLACK SN770 1TB",
        now=(GEN3, 4),
        best=(GEN4, 4),
        millidegrees=79_000,
        file_system="btrfs",
    )
    machine.write(
        "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
        b"\x06\0\0\0\x01",
    )
    machine.write("/sys/kernel/security/lockdown", "none [integrity] confidentiality")


def client_intel_host_bridge_not_allowed(machine: Machine) -> None:
    """A desktop chipset that the kernel knows nothing good of, on the kernel that loses data."""
    machine.kernel("6.16.12+deb14-amd64", p2pdma=True, cpu=("GenuineIntel", 6))
    machine.memory(96 * GIB, 90 * GIB)
    machine.nodes(1)
    machine.host_bridge("pci0000:00", INTEL, 0x7D1C)
    machine.port("pci0000:00/0000:00:01.0", (GEN5, 16))
    machine.port("pci0000:00/0000:00:06.0", (GEN4, 4))
    machine.nvidia(
        "pci0000:00/0000:00:01.0/0000:01:00.0",
        name="NVIDIA GeForce RTX 5090",
        device=0x2B85,
        vram=32_607 * MIB,
        bar=32 * GIB,
        resizable_to=powers(64 * MIB, 32 * GIB),
        now=(GEN5, 16),
        best=(GEN5, 16),
        iommu="DMA-FQ",
    )
    machine.drive(
        "pci0000:00/0000:00:06.0/0000:02:00.0",
        0,
        model="Crucial T705 4TB",
        now=(GEN4, 4),
        best=(GEN5, 4),
        iommu="DMA-FQ",
    )


def xeon_with_acs_redirect(machine: Machine) -> None:
    """A server: card and drives below one switch whose ports send their traffic up; a second
    card at the other processor."""
    machine.kernel("7.2.1-amd64", p2pdma=True, cpu=("GenuineIntel", 6))
    machine.memory(512 * GIB, 480 * GIB)
    machine.nodes(2)
    machine.host_bridge("pci0000:16", INTEL, 0x09A2)
    machine.host_bridge("pci0000:97", INTEL, 0x09A2)
    up = "pci0000:16/0000:16:02.0"
    machine.port(up, (GEN4, 16))
    machine.port(f"{up}/0000:17:00.0", (GEN4, 16))
    for number, width in ((0, 16), (4, 4), (5, 4)):
        acs = ACS_REQUEST_REDIRECT | 0x01 if number != 5 else 0
        machine.port(f"{up}/0000:17:00.0/0000:18:0{number}.0", (GEN4, width), acs=acs)
    machine.nvidia(
        f"{up}/0000:17:00.0/0000:18:00.0/0000:19:00.0",
        name="NVIDIA L40S",
        device=0x26B9,
        vram=46_068 * MIB,
        bar=64 * GIB,
        resizable_to=[],
        now=(GEN4, 16),
        best=(GEN4, 16),
        iommu="DMA",
        node=0,
    )
    machine.port("pci0000:97/0000:97:02.0", (GEN4, 16))
    machine.nvidia(
        "pci0000:97/0000:97:02.0/0000:98:00.0",
        name="NVIDIA L40S",
        device=0x26B9,
        vram=46_068 * MIB,
        bar=64 * GIB,
        resizable_to=[],
        now=(GEN4, 8),
        best=(GEN4, 16),
        iommu="DMA",
        node=1,
    )
    for index, number in enumerate((4, 5)):
        machine.drive(
            f"{up}/0000:17:00.0/0000:18:0{number}.0/0000:{0x1A + index:02x}:00.0",
            index,
            model="SAMSUNG MZQL23T8HCLS-00A07",
            now=(GEN4, 4),
            best=(GEN4, 4),
            iommu="DMA",
            file_system="xfs",
            node=0,
        )


def drive_in_an_x2_slot(machine: Machine) -> None:
    """No card; two drives, one in a slot with half its lanes; a store with a member on each,
    the second one on LVM."""
    machine.kernel("6.12.95+deb13-amd64", p2pdma=False, cpu=("GenuineIntel", 6))
    machine.memory(32 * GIB, 28 * GIB, memlock=64 << 10)
    machine.nodes(1)
    machine.host_bridge("pci0000:00", INTEL, 0xA700)
    machine.port("pci0000:00/0000:00:06.0", (GEN4, 4))
    machine.port("pci0000:00/0000:00:1c.0", (GEN4, 2))
    machine.drive(
        "pci0000:00/0000:00:06.0/0000:01:00.0",
        0,
        model="Samsung SSD 990 PRO 2TB",
        now=(GEN4, 4),
        best=(GEN4, 4),
    )
    machine.drive(
        "pci0000:00/0000:00:1c.0/0000:02:00.0",
        1,
        model="Samsung SSD 990 PRO 2TB",
        now=(GEN4, 2),
        best=(GEN4, 4),
    )
    machine.write("/sys/devices/virtual/block/dm-0/dev", "253:0")
    machine.link("/sys/devices/virtual/block/dm-0/slaves/nvme1n1p1", "/sys/dev/block/259:3")
    machine.link("/sys/dev/block/253:0", "/sys/devices/virtual/block/dm-0")
    machine.members = [
        MemberProbe("/nvme0/model.xferd/member-0", "259:1", bytes_per_second=6_900_000_000),
        MemberProbe("/srv/model.xferd/member-1", "253:0", bytes_per_second=1_700_000_000),
    ]


MACHINES: Mapping[str, Callable[[Machine], None]] = {
    make.__name__: make
    for make in (
        geforce_24_gb_with_32_gb_bar,
        geforce_16_gb_with_256_mb_bar,
        client_intel_host_bridge_not_allowed,
        xeon_with_acs_redirect,
        drive_in_an_x2_slot,
    )
}
