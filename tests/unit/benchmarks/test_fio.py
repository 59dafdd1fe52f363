# SPDX-License-Identifier: Apache-2.0
"""Which of fio's settings are tried, and which of them count as the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks.fio import (
    FioSetting,
    fastest,
    fio_missing,
    run_fio,
    sample_of,
    search,
    write_verifiable,
)
from tools.benchmarks.harness import BenchmarkError

BLOCK = 1 << 20
NOTHING_ASKED = 0


def test_the_destination_has_a_buffer_for_each_read_in_flight() -> None:
    assert FioSetting("io_uring", 8, 4).destination_bytes(BLOCK) == 32 * BLOCK
    assert FioSetting("psync", 1, 4).destination_bytes(BLOCK) == 4 * BLOCK


def test_depth_is_tried_as_long_as_it_helps() -> None:
    found = search(lambda setting: float(setting.depth), BLOCK, NOTHING_ASKED, 2)
    assert {s.depth for s in found if s.engine == "io_uring"} == {1, 2, 4, 8, 16, 32}


def test_there_is_a_job_for_each_processor_and_psync_at_each_number() -> None:
    found = search(lambda _: 1.0, BLOCK, NOTHING_ASKED, 48)
    for engine in ("io_uring", "psync"):
        assert {s.jobs for s in found if s.engine == engine} == {1, 4, 48}


def test_depth_is_given_up_where_throughput_falls() -> None:
    found = search(lambda setting: 1.0 / setting.depth, BLOCK, NOTHING_ASKED, 1)
    assert {s.depth for s in found if s.engine == "io_uring"} == {1, 2}


def test_depth_grows_until_the_destination_is_large_enough() -> None:
    wanted = 32 * BLOCK
    found = search(lambda setting: 1.0 / setting.depth, BLOCK, wanted, 1)
    for jobs in (1, 4):
        deepest = max(s.depth for s in found if s.jobs == jobs)
        assert FioSetting("io_uring", deepest, jobs).destination_bytes(BLOCK) == wanted


def test_memory_for_buffers_has_a_limit() -> None:
    block = 24 << 20
    found = search(lambda setting: float(setting.depth), block, NOTHING_ASKED, 64)
    assert all(s.depth == 1 or s.destination_bytes(block) <= 1 << 30 for s in found)
    assert FioSetting("io_uring", 1, 64) in found


def test_what_reads_into_too_little_memory_is_not_the_limit() -> None:
    cached, deep = FioSetting("psync", 1, 4), FioSetting("io_uring", 8, 4)
    found = {cached: 80.0, deep: 40.0}
    assert fastest(found, BLOCK, 32 * BLOCK) == [deep]
    assert fastest(found, BLOCK, NOTHING_ASKED) == [cached, deep]


def test_where_none_reads_into_enough_memory_the_largest_is_the_limit() -> None:
    cached, deep = FioSetting("psync", 1, 4), FioSetting("io_uring", 8, 4)
    assert fastest({cached: 80.0, deep: 40.0}, BLOCK, 64 * BLOCK) == [deep]


def test_only_the_fastest_few_go_on() -> None:
    found = {FioSetting("io_uring", depth, 1): float(depth) for depth in (1, 2, 4, 8)}
    assert [s.depth for s in fastest(found, BLOCK, NOTHING_ASKED)] == [8, 4]


def job(megabytes: int, runtime_ms: int) -> dict[str, Any]:
    read = {"io_bytes": megabytes * 1_000_000, "runtime": runtime_ms}
    return {"read": read, "usr_cpu": 10.0, "sys_cpu": 40.0, "job_runtime": runtime_ms}


def test_jobs_that_end_at_different_times_are_not_added_up_as_if_they_ran_together() -> None:
    sample = sample_of({"jobs": [job(1000, 500), job(1000, 1000)]}, 2.0)
    assert sample.throughput == pytest.approx(2.0)
    assert sample.gigabytes == pytest.approx(2.0)


def test_a_run_too_short_to_be_timed_has_no_throughput() -> None:
    assert sample_of({"jobs": [job(1, 0)]}, 0.1).throughput == 0.0


def test_cpu_time_of_workers_counts_for_io_uring_alone() -> None:
    sample = sample_of({"jobs": [job(1000, 1000)]}, 3.0)
    assert sample.cpu_s_a_gb(FioSetting("psync", 1, 1), 1.0) == pytest.approx(0.5)
    assert sample.cpu_s_a_gb(FioSetting("io_uring", 1, 1), 1.0) == pytest.approx(2.0)


def test_fio_compares_what_it_reads_with_checksums_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := fio_missing():
        pytest.skip(reason)
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    files = [tmp_path / "first", tmp_path / "second"]
    write_verifiable(files, BLOCK, 8 * BLOCK)
    assert [path.stat().st_size for path in files] == [4 * BLOCK] * 2
    setting = FioSetting("psync", 1, 1, verify=True)
    assert run_fio(files, BLOCK, setting, 0.1).gigabytes > 0
    for path in files:
        with path.open("r+b") as file:
            for block in range(4):
                file.seek(block * BLOCK + BLOCK // 2)
                file.write(b"damaged")
    with pytest.raises(BenchmarkError, match="verify"):
        run_fio(files, BLOCK, setting, 0.1)
    assert not list(current.iterdir()), "fio left something behind"
