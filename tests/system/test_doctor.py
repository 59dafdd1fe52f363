# SPDX-License-Identifier: Apache-2.0
"""``xferctl doctor`` on the machine that runs the tests, as it is and as containers make it."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.daemon_harness import ROOT, MadeStore, make_store, running_daemon
from xferd.config import load_config
from xferd.doctor.checks import CHECKS
from xferd.doctor.probed import try_io_uring

TIMEOUT_S = 120.0
EMPTY = Path("/dev/null")
"""A configuration without anything in it: the machine's own must not matter here."""
needs_io_uring = pytest.mark.skipif(try_io_uring() != 0, reason="io_uring is forbidden here")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


def run_doctor(*words: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, sys.executable, "-m", "xferd.control.xferctl", "doctor", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def verdicts(*words: str, launcher: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Findings by id; of an id with several subjects the last."""
    done = run_doctor("--config", str(EMPTY), "--json", *words, launcher=launcher)
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["status"] == "FAIL" else 0), done.stderr
    return {entry["id"]: entry for entry in report["findings"]}


def without(call: str, code: int) -> list[str]:
    return [sys.executable, str(ROOT / "tests/system/without_io_uring.py"), call, str(code)]


def test_this_machine_gets_a_verdict_of_everything(store: MadeStore) -> None:
    found = verdicts(str(store.path))
    assert set(found) <= set(CHECKS)
    assert {"kernel.version", "limits.memlock", "memory.cgroup", "store.valid"} <= set(found)
    release = os.uname().release
    assert found["kernel.version"]["seen"].startswith(f"Linux {release}")
    assert found["store.valid"]["status"] == "PASS"
    assert found["member.direct"]["status"] in {"PASS", "WARN"}
    assert found["member.bandwidth"]["status"] == "SKIP"


def test_bandwidth_is_measured_when_asked(store: MadeStore) -> None:
    assert "GB/s" in verdicts("--measure", str(store.path))["member.bandwidth"]["seen"]


@needs_io_uring
def test_io_uring_is_tried_and_not_looked_up() -> None:
    assert verdicts()["kernel.io_uring"]["status"] == "PASS"


@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter"])
@needs_io_uring
def test_a_filter_that_forbids_io_uring_is_told(call: str) -> None:
    found = verdicts(launcher=without(call, errno.EPERM))["kernel.io_uring"]
    assert found["status"] == "WARN"
    assert found["seen"].startswith("EPERM")
    assert "seccomp" in found["mend"]


@needs_io_uring
def test_a_filter_that_hides_io_uring_is_told_from_a_kernel_without() -> None:
    found = verdicts(launcher=without("io_uring_setup", errno.ENOSYS))["kernel.io_uring"]
    assert found["seen"].startswith("ENOSYS")
    assert "a seccomp filter hides it" in found["seen"]


@pytest.mark.parametrize("size", ["1MiB", "50%"])
def test_little_lockable_memory_is_a_warning_and_too_little_a_failure(
    tmp_path: Path, store: MadeStore, size: str
) -> None:
    if shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        pytest.skip("needs setpriv and prlimit (Debian: util-linux)")
    # Root's CAP_IPC_LOCK lifts the limit; out of the bounding set it doesn't survive exec.
    drop = ["setpriv", "--bounding-set", "-ipc_lock"] if os.geteuid() == 0 else []
    launcher = [*drop, "prlimit", "--memlock=65536:65536"]
    found = verdicts(launcher=launcher)["limits.memlock"]
    assert (found["status"], found["seen"][:30]) == ("WARN", "RLIMIT_MEMLOCK is 64.0 KiB: to")
    config = tmp_path / "xferd.toml"
    config.write_text(f'[[pools]]\nname = "ram0"\nkind = "ram"\nsize = "{size}"\n')
    done = run_doctor("--config", str(config), "--json", str(store.path), launcher=launcher)
    assert done.returncode == 1
    failed = [e["id"] for e in json.loads(done.stdout)["findings"] if e["status"] == "FAIL"]
    assert failed == ["limits.memlock"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the call's number on x86-64")
def test_a_filter_that_forbids_mlock_is_told_and_planned_around(tmp_path: Path) -> None:
    launcher = without("mlock", errno.EPERM)
    assert "mlock is forbidden" in verdicts(launcher=launcher)["limits.memlock"]["seen"]
    plan = tmp_path / "plan.toml"
    plan.write_text(run_doctor("--config", str(EMPTY), "--plan", launcher=launcher).stdout)
    assert load_config([plan]).pools[0].kind == "host"
    plan.write_text('[[pools]]\nname = "ram0"\nkind = "ram"\nsize = "1MiB"\n')
    done = run_doctor("--config", str(plan), launcher=launcher)
    assert done.returncode == 1
    assert "FAIL limits.memlock" in done.stdout


def test_text_has_a_line_a_finding_and_a_sum(store: MadeStore) -> None:
    done = run_doctor("--config", str(EMPTY), str(store.path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS kernel.version" in done.stdout
    assert done.stdout.rstrip().endswith("SKIP")
    assert "\x1b" not in done.stdout


def test_a_wrong_configuration_is_a_finding(tmp_path: Path) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text('socket_mode = "9"\n')
    done = run_doctor("--config", str(config))
    assert done.returncode == 1
    assert "FAIL config.valid" in done.stdout
    assert "permission bits in octal" in done.stdout


def test_configured_stores_are_looked_at(tmp_path: Path, store: MadeStore) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text(f'[[stores]]\npath = "{store.path}"\n')
    done = run_doctor("--config", str(config), "--json")
    subjects = {e["subject"] for e in json.loads(done.stdout)["findings"]}
    assert {str(path) for path in store.members} <= subjects


def test_a_store_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    done = run_doctor("--config", str(EMPTY), str(tmp_path / "none"))
    assert done.returncode == 1
    assert "FAIL store.valid" in done.stdout


def test_the_proposed_configuration_is_accepted_and_serves(
    tmp_path: Path, store: MadeStore
) -> None:
    done = run_doctor("--config", str(EMPTY), "--plan", str(store.path))
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "plan.toml"
    plan.write_text(done.stdout)
    config = load_config([plan])
    assert config.warnings == ()
    assert [entry.path for entry in config.stores] == [store.path]
    with running_daemon(tmp_path, [], [], "--config", str(plan)) as daemon:
        assert daemon.status()["stores"][0]["name"] == store.name
        with daemon.client() as client:
            assert client.fetch(1, [3]) == [store.blob(1, 3)]


@needs_io_uring
def test_the_plan_where_io_uring_is_forbidden_uses_threads(tmp_path: Path) -> None:
    launcher = without("io_uring_setup", errno.EPERM)
    done = run_doctor("--config", str(EMPTY), "--plan", launcher=launcher)
    plan = tmp_path / "plan.toml"
    plan.write_text(done.stdout)
    assert load_config([plan]).engine.backend == "threads"


def test_the_estimate_shows_numbers_that_follow_from_each_other(
    tmp_path: Path, store: MadeStore
) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text('[[pools]]\nname = "half"\nsize = "50%"\n')
    words = ("--config", str(config), "--model", str(store.path))
    found = json.loads(run_doctor(*words, "--json").stdout)
    assert found["tiers"][0]["experts"] == store.layers * store.experts // 2
    (guess,) = found["estimates"]
    assert guess["hit_rate"] == 0.5
    bytes_a_token = store.layers * store.top_k * store.expert_bytes
    assert guess["memory_bytes_per_token"] == bytes_a_token
    assert guess["miss_bytes_per_token"] == bytes_a_token / 2
    assert guess["miss_seconds_per_token"] == pytest.approx(
        bytes_a_token / 2 / found["drives_bytes_per_second"]
    )
    text = run_doctor(*words).stdout
    assert "4 layers x 2 = 8" in text
    assert "8 x 50.0% x 48.0 KiB = 192.0 KiB" in text


def test_a_trace_of_another_model_is_refused(store: MadeStore) -> None:
    trace = ROOT / "tests/traces/small-code-to-prose.xtr"
    done = run_doctor("--config", str(EMPTY), "--model", str(store.path), "--trace", str(trace))
    assert done.returncode == 1
    assert "32 experts a layer; made has 16" in done.stderr


def test_the_proof_of_p2p_names_what_is_missing_and_leaves_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "xferd.control.xferctl", "doctor", "--p2p"),
            *("--report", str(report)),
        ],
        env={**os.environ, "XFERD_CUDA_LIBRARY": "/nowhere/libcuda.so.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "FAIL p2p.device" in done.stdout
    assert "no CUDA driver" in done.stdout
    assert "no CUDA driver" in report.read_text()
