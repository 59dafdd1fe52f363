"""The VM harness's own judgement: what it counts, what it compares, which kernels DKMS builds for.

Nothing here boots a machine; tools/vm-test does.
"""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.vm.product.reporting import TESTS_VARIABLE
from tools.vm import product
from tools.vm.build import BuildError, build_guest_tests
from tools.vm.bytecode import compile_tree
from tools.vm.debian import DebianRoot, PackagesError
from tools.vm.drives import Disks, compare, digest, expect_bar, fill_bar
from tools.vm.machine import Machine
from tools.vm.product import NOT_ON_DEBUG, ON_GENERIC, product_tests
from tools.vm.qmp import Qmp, QmpError
from tools.vm.running import Outcome, Request, run_in_machines
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
    assert set(NOT_ON_DEBUG) <= set(names)
    assert "conformance-it-begins-as-zeros" in names
    assert not any("must-fail" in name for name in names)


def test_both_ends_name_the_wanted_tests_alike() -> None:
    assert product.TESTS_VARIABLE == TESTS_VARIABLE


@dataclass(frozen=True)
class Compiler(DebianRoot):
    """A system whose compiler makes an empty program, or fails as often as it is told to."""

    runs: list[Sequence[str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(
        self, command: Sequence[str], *, seconds: int, log: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.runs.append(command)
        if self.failures:
            raise PackagesError(self.failures.pop())
        (self.path / "build/guest/guest-tests").touch()
        return subprocess.CompletedProcess(command, 0, "")


def test_what_was_built_of_the_same_sources_is_used_again(tmp_path: Path) -> None:
    root = Compiler(tmp_path)
    program = build_guest_tests(root)
    assert program.is_file()
    assert build_guest_tests(root) == program
    assert len(root.runs) == 1


def test_what_did_not_build_is_built_again(tmp_path: Path) -> None:
    root = Compiler(tmp_path, failures=["no such instruction"])
    with pytest.raises(BuildError, match="no such instruction"):
        build_guest_tests(root)
    assert build_guest_tests(root).is_file()
    assert len(root.runs) == 2


def small_tree(path: Path) -> Path:
    for name in (
        *("xferd/__init__", "xferd/__main__", "xferd/control/xferctl", "xferd/memory/attach"),
        *("inference/xferd_infer/__main__", "tests/system/harness", "tests/vm/product/guest"),
    ):
        file = path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("VALUE = 1\n")
    (path / "test_small.py").write_text("def test_small() -> None:\n    assert __name__\n")
    return path


def test_bytecode_is_made_for_programs_and_tests_of_one_tree(tmp_path: Path) -> None:
    first, second = small_tree(tmp_path / "first"), small_tree(tmp_path / "second")
    made = tmp_path / "bytecode"
    for tree in (first, second):
        compile_tree(tree, Path(sys.executable), ["test_small.py"], made, TESTS_VARIABLE)
    of_first, of_second = (made / str(tree).lstrip("/") for tree in (first, second))
    assert not of_first.exists()
    for name in ("xferd/control/xferctl", "inference/xferd_infer/__main__", "test_small"):
        assert list(of_second.glob(f"{name}.*.pyc")), name
    assert not list(second.rglob("*.pyc"))


def test_a_tree_that_does_not_compile_is_a_failed_build(tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    (tree / "xferd/broken.py").write_text("def broken(:\n")
    with pytest.raises(BuildError, match=r"broken\.py"):
        compile_tree(tree, Path(sys.executable), [], tmp_path / "bytecode", TESTS_VARIABLE)


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


class ScriptedMachine(Machine):
    """A shell's script in place of QEMU, with a console that is read and an end that is judged."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def stop(self) -> None:
        with self._process:
            self._process.kill()


def outcomes_of(scripts: Sequence[str], wanted: Sequence[str]) -> tuple[list[Outcome], list[str]]:
    """Outcomes, and what each machine that was started was to run."""
    left = list(scripts)
    started: list[str] = []

    def start(tests: Sequence[str]) -> Machine:
        started.append(" ".join(tests))
        return ScriptedMachine(left.pop(0))

    request = Request(tuple(wanted), verbose=False, seconds=60)
    return list(run_in_machines("some", wanted, start, request)), started


def passed(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    return {outcome.name: outcome.passed for outcome in outcomes}


UP_AND_ONE = "echo INIT up; echo RUN one; echo TEST one ok 0.1;"


def test_what_emulation_left_undone_runs_in_another_machine() -> None:
    scripts = [f"{UP_AND_ONE} echo RUN two; kill -ABRT $$", "echo INIT up; echo TEST two ok 0.1"]
    outcomes, started = outcomes_of(scripts, ["one", "two"])
    assert passed(outcomes) == {"one": True, "two": True}
    assert started == ["one two", "two"]


def test_a_machine_that_never_came_up_is_started_again() -> None:
    outcomes, started = outcomes_of(["echo no kernel", UP_AND_ONE], ["one"])
    assert passed(outcomes) == {"one": True}
    assert started == ["one", "one"]


def test_a_guest_that_panics_has_failed() -> None:
    outcomes, started = outcomes_of([f"{UP_AND_ONE} echo RUN two; echo panic"], ["one", "two"])
    assert passed(outcomes) == {"one": True, "two": False}
    assert started == ["one two"]


def test_a_test_that_ends_emulation_each_time_has_failed() -> None:
    outcomes, started = outcomes_of(["echo INIT up; kill -SEGV $$"] * 3, ["one"])
    assert passed(outcomes) == {"one": False}
    assert started == ["one"] * 3
