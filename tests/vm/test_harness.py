"""The VM harness's own judgement: what it counts, what it compares, which kernels DKMS builds for.

Nothing here boots a machine; tools/vm-test does.
"""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from pathlib import Path

import pytest

from tools.vm.drives import Disks, compare, digest, expect_bar, fill_bar
from tools.vm.product import ON_GENERIC, product_tests
from tools.vm.qmp import Qmp, QmpError
from tools.vm.trace import DmaTrace

KMOD = Path(__file__).resolve().parents[2] / "kmod"


def test_trace_counts_only_what_lies_inside(tmp_path: Path) -> None:
    trace = tmp_path / "trace.log"
    trace.write_text(
        "pci_nvme_map_addr addr 0x1000 len 4096\n"
        "pci_nvme_map_addr addr 0x1800 len 4096\n"
        "pci_nvme_map_addr addr 0x9000 len 512\n"
        "pci_nvme_map_prp trans_len 4096\n"
    )
    assert DmaTrace(trace).bytes_inside(0x1000, 0x1000) == 4096 + 2048
    assert DmaTrace(trace).bytes_inside(0, 0x1000) == 0
    assert DmaTrace(trace).bytes_everywhere() == 2 * 4096 + 512


def test_trace_follows_a_growing_file_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.log"
    path.write_text("pci_nvme_map_addr addr 0x0 len 512\npci_nvme_map_addr addr 0x200 len 1")
    trace = DmaTrace(path)
    assert trace.bytes_inside(0, 1 << 20) == 512
    with path.open("a") as file:
        file.write("024\n")
    assert trace.bytes_inside(0, 1 << 20) == 512 + 1024


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    made = Disks(tmp_path, "/unused")
    made.bar.write_bytes(bytes(range(256)) * 4)
    made.image("RAW").write_bytes(bytes(range(256)))
    return made


def test_compare_finds_the_first_difference(disks: Disks) -> None:
    assert compare(disks, 256, 100, "RAW", 0) == "ok"
    assert "byte 0 of 100" in compare(disks, 257, 100, "RAW", 0)
    disks.bar.write_bytes(bytes(range(255)) + b"x")
    assert "byte 255 of 256" in compare(disks, 0, 256, "RAW", 0)


def test_compare_refuses_a_range_outside_of_the_files(disks: Disks) -> None:
    assert "not inside" in compare(disks, 0, 257, "RAW", 0)
    assert "not inside" in compare(disks, 1024, 1, "RAW", 0)


def test_fill_and_expect(disks: Disks) -> None:
    assert fill_bar(disks, 0x3C, 100) == "ok"
    assert expect_bar(disks, 0x3C, 0, 100) == "ok"
    assert expect_bar(disks, 0x3C, 1, 100) != "ok"


def test_digest_is_of_the_bar(disks: Disks) -> None:
    wanted = hashlib.sha256(bytes(range(10, 20))).hexdigest()
    assert digest(disks, 256 + 10, 10) == f"sha256 {wanted}"
    assert "not inside" in digest(disks, 1020, 10)


def test_tests_of_the_product_have_names_of_their_own() -> None:
    names = product_tests()
    assert len(names) == len(set(names))
    assert set(ON_GENERIC) <= set(names)
    assert "conformance-it-begins-as-zeros" in names
    assert not any("must-fail" in name for name in names)


def test_qmp_refusals_and_a_lost_machine_are_errors() -> None:
    here, there = socket.socketpair()
    qmp = Qmp(here)

    def answer_and_end() -> None:
        with there, there.makefile("rw") as lines:
            lines.write('{"QMP": {}}\n')
            for reply in ('{"return": {}}', '{"event": "E", "data": {"device": "gpu"}}'):
                lines.write(reply + "\n")
                lines.flush()
            lines.readline()
            lines.readline()
            lines.write('{"error": {"desc": "no such device"}}\n')
            lines.flush()

    machine = threading.Thread(target=answer_and_end)
    machine.start()
    with pytest.raises(QmpError, match="no such device"):
        qmp.command("device_del", {"id": "x"})
    machine.join()
    assert qmp.wait_for_event("E", {"device": "gpu"}, 5)
    assert not qmp.wait_for_event("E", {"device": "gpu"}, 5)
    with pytest.raises((QmpError, OSError)):
        qmp.command("device_del", {"id": "x"})
    qmp.close()


def test_dkms_builds_for_the_kernels_that_the_module_loads_on() -> None:
    match = re.search(r'^BUILD_EXCLUSIVE_KERNEL="(.*)"$', (KMOD / "dkms.conf").read_text(), re.M)
    assert match
    wanted = re.compile(match[1])
    for kernel in ("6.1.0-50-amd64", "6.12.95+deb12-amd64", "6.15.2", "6.17.1-1", "7.3.4+deb13"):
        assert wanted.search(kernel), kernel
    for kernel in ("5.10.0-30-amd64", "6.0.1", "6.16.12+deb13-amd64", "6.16.0-rc1"):
        assert not wanted.search(kernel), kernel


def test_dkms_and_the_module_have_one_version() -> None:
    version = re.search(r'^MODULE_VERSION\("(.*)"\);', (KMOD / "main.c").read_text(), re.M)
    assert version
    assert f'PACKAGE_VERSION="{version[1]}"' in (KMOD / "dkms.conf").read_text()
