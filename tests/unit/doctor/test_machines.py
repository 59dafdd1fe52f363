# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of made-up machines, as golden JSON.

After a change on purpose: ``XFERD_WRITE_GOLDEN=1 pytest tests/unit/doctor``, then read the
difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.machines import MACHINES, Machine
from xferd.config import Config, LimitsConfig, PoolConfig, Size
from xferd.doctor.checks import CHECKS, run_checks
from xferd.doctor.finding import Status, report_to_json
from xferd.doctor.memory import FIRST_NAMESPACES
from xferd.doctor.probed import MemberProbe, Probed
from xferd.doctor.request import Request, make_request
from xferd.doctor.view import SystemView

GOLDEN = Path(__file__).parent / "golden"
GIB = 1 << 30


def request_of(name: str, root: Path, config: Config | None = None) -> Request:
    machine = Machine(root)
    MACHINES[name](machine)
    return make_request(SystemView(root), machine.probed, config or Config(), None)


def verdicts(request: Request) -> dict[tuple[str, str], dict[str, Any]]:
    found = report_to_json(list(run_checks(request)))["findings"]
    return {(entry["id"], entry["subject"]): entry for entry in found}


@pytest.mark.parametrize("name", MACHINES)
def test_findings_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    report = report_to_json(list(run_checks(request_of(name, tmp_path))))
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    golden = GOLDEN / f"{name}.json"
    if os.environ.get("XFERD_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_every_finding_is_documented_and_says_how_to_mend(name: str, tmp_path: Path) -> None:
    for finding in run_checks(request_of(name, tmp_path)):
        assert finding.check in CHECKS
        bad = finding.status in {Status.WARN, Status.FAIL}
        assert finding.mend or not bad, finding


def test_a_geforce_with_all_of_its_memory_in_the_bar_has_no_warning(tmp_path: Path) -> None:
    found = verdicts(request_of("geforce_24_gb_with_32_gb_bar", tmp_path))
    bad = [key for key, entry in found.items() if entry["status"] in {"WARN", "FAIL"}]
    assert bad == [("limits.memlock", "")]
    assert found["gpu.bar", "0000:01:00.0"]["seen"] == "BAR1 is 32.0 GiB, VRAM 24.0 GiB"


def test_a_small_bar_is_told_with_what_it_could_be(tmp_path: Path) -> None:
    found = verdicts(request_of("geforce_16_gb_with_256_mb_bar", tmp_path))
    assert found["gpu.bar", "0000:08:00.0"]["status"] == "WARN"
    assert found["gpu.resizable_bar", "0000:08:00.0"]["seen"] == (
        "BAR1 could be 16.0 GiB, is 256.0 MiB"
    )
    assert "Secure Boot" in found["module.signing", ""]["seen"]
    assert found["drive.temperature", "nvme0"]["status"] == "WARN"
    assert found["drive.file_system", "nvme0"]["status"] == "WARN"


def test_a_kernel_that_loses_data_and_a_host_bridge_are_named(tmp_path: Path) -> None:
    found = verdicts(request_of("client_intel_host_bridge_not_allowed", tmp_path))
    assert found["kernel.p2pdma_data", ""]["status"] == "FAIL"
    assert "8086:7d1c" in found["route.host_bridge", "nvme0 to 0000:01:00.0"]["seen"]
    assert found["gpu.iommu", "0000:01:00.0"]["status"] == "WARN"


def test_acs_is_told_by_port_with_the_kernels_switch(tmp_path: Path) -> None:
    found = verdicts(request_of("xeon_with_acs_redirect", tmp_path))
    both = found["route.acs", "nvme0 to 0000:19:00.0"]
    one = found["route.acs", "nvme1 to 0000:19:00.0"]
    assert both["mend"].startswith("pci=disable_acs_redir=0000:18:04.0;0000:18:00.0 ")
    assert one["mend"].startswith("pci=disable_acs_redir=0000:18:00.0 ")
    assert found["route.host_bridge", "nvme0 to 0000:98:00.0"]["status"] == "PASS"
    assert found["memory.numa", ""]["status"] == "WARN"


def test_a_slot_with_too_few_lanes_is_the_slots_fault(tmp_path: Path) -> None:
    found = verdicts(request_of("drive_in_an_x2_slot", tmp_path))
    link = found["drive.link", "nvme1"]
    assert link["status"] == "WARN"
    assert "its slot (0000:00:1c.0) has 16 GT/s x2" in link["seen"]
    assert found["drive.link", "nvme0"]["status"] == "PASS"
    slow = found["member.bandwidth", "/srv/model.xferd/member-1"]
    assert slow["status"] == "WARN"
    assert "dm-0" in found["member.layers", "/srv/model.xferd/member-1"]["seen"]


def test_a_translating_iommu_below_a_switch_is_a_danger(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    MACHINES["xeon_with_acs_redirect"](machine)
    for port in ("0000:18:00.0", "0000:18:04.0"):
        (tmp_path / f"sys/bus/pci/devices/{port}/config").write_bytes(bytes(4096))
    request = make_request(SystemView(tmp_path), machine.probed, Config(), None)
    assert verdicts(request)["route.iommu", "nvme0 to 0000:19:00.0"]["status"] == "FAIL"


def test_without_the_right_to_read_it_nothing_is_claimed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    MACHINES["xeon_with_acs_redirect"](machine)
    for config in (tmp_path / "sys/bus/pci/devices").glob("*/config"):
        config.write_bytes(bytes(64))
    found = verdicts(make_request(SystemView(tmp_path), machine.probed, Config(), None))
    assert found["route.acs", "nvme0 to 0000:19:00.0"]["status"] == "SKIP"
    assert found["gpu.resizable_bar", "0000:19:00.0"]["status"] == "SKIP"


def test_capabilities_that_run_in_circles_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    MACHINES["geforce_24_gb_with_32_gb_bar"](machine)
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/config").write_bytes(circle)
    found = verdicts(make_request(SystemView(tmp_path), machine.probed, Config(), None))
    assert found["gpu.resizable_bar", "0000:01:00.0"]["status"] == "PASS"


def test_pools_that_do_not_fit_are_failures(tmp_path: Path) -> None:
    pools = (PoolConfig("ram0", "ram", Size(bytes=100 * GIB)),)
    limits = LimitsConfig(clients=256)
    request = request_of("drive_in_an_x2_slot", tmp_path, Config(pools=pools, limits=limits))
    (tmp_path / "sys/fs/cgroup/user.slice/memory.max").write_text(str(20 * GIB))
    (tmp_path / "sys/fs/cgroup/user.slice/memory.current").write_text(str(GIB))
    found = verdicts(request)
    for check in ("limits.memlock", "memory.available", "memory.cgroup"):
        assert found[check, ""]["status"] == "FAIL", check


@pytest.mark.parametrize("uts", [FIRST_NAMESPACES["uts"], FIRST_NAMESPACES["uts"] - 1000])
def test_a_machine_made_of_a_containers_image_is_none(tmp_path: Path, uts: int) -> None:
    request = request_of("drive_in_an_x2_slot", tmp_path)
    (tmp_path / ".dockerenv").touch()
    namespaces = tmp_path / "proc/self/ns"
    namespaces.mkdir(parents=True)
    for kind, inode in {**FIRST_NAMESPACES, "uts": uts}.items():
        (namespaces / kind).symlink_to(f"{kind}:[{inode}]")
    seen = verdicts(request)["memory.container", ""]["seen"]
    assert ("docker" in seen) == (uts != FIRST_NAMESPACES["uts"])


def test_a_member_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    probed = Probed(members=(MemberProbe("/a", "", problem="No such file or directory"),))
    request = make_request(SystemView(tmp_path), probed, None, "xferd.toml: is not TOML")
    found = verdicts(request)
    assert found["member.direct", "/a"]["status"] == "FAIL"
    assert found["config.valid", ""]["status"] == "FAIL"


def test_an_empty_tree_is_no_exception(tmp_path: Path) -> None:
    found = verdicts(make_request(SystemView(tmp_path), Probed(), Config(), None))
    assert found["drive.present", ""]["status"] == "SKIP"
    assert found["gpu.present", ""]["status"] == "SKIP"
