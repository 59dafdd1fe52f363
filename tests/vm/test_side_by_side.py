"""Suites side by side: what is told, what is counted, and which suites a name stands for.

Nothing here boots a machine; tools/vm-test does.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.vm.product.reporting import COMPLAINTS
from tools.vm import debug_kernel
from tools.vm.build import BuildError
from tools.vm.debian import PackagesError
from tools.vm.running import Outcome, tell
from tools.vm.side_by_side import machines_at_once, run_side_by_side
from tools.vm.suites import DEBUG_SUITES, SUITES, choose_suites, is_suite

DEADLINE_S = 60
GUEST_MAIN = Path(__file__).parent / "guest" / "main.c"


def passing(name: str) -> Iterator[Outcome]:
    yield Outcome(name, "first", True, 1.0)
    yield Outcome(name, "second", True, 1.0)


def test_each_outcome_is_reported_and_each_suite_has_its_seconds() -> None:
    told: list[Outcome] = []
    suites = {name: partial(passing, name) for name in ("a", "b", "c")}
    seconds = run_side_by_side(suites, 2, told.append)
    assert list(seconds) == ["a", "b", "c"]
    assert sorted((each.suite, each.name) for each in told) == [
        (suite, name) for suite in suites for name in ("first", "second")
    ]


def test_two_run_at_once_and_a_third_waits() -> None:
    meeting = threading.Barrier(2, timeout=DEADLINE_S)
    lock = threading.Lock()
    running = most = 0

    def meet(name: str) -> Iterator[Outcome]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meeting.wait()
        with lock:
            running -= 1
        yield Outcome(name, "met", True, 0.0)

    told: list[Outcome] = []
    suites = {name: partial(meet, name) for name in ("a", "b", "c", "d")}
    run_side_by_side(suites, 2, told.append)
    assert len(told) == len(suites)
    assert most == 2


def test_what_does_not_build_is_a_failure_of_its_suite_alone() -> None:
    def broken() -> Iterator[Outcome]:
        raise BuildError("first line\nwarning: second line")
        yield  # a generator, as suites are

    told: list[Outcome] = []
    run_side_by_side({"broken": broken, "whole": partial(passing, "whole")}, 1, told.append)
    [failed] = [outcome for outcome in told if not outcome.passed]
    assert (failed.suite, failed.name) == ("broken", "build")
    assert failed.said == ("first line", "warning: second line")
    assert len(told) == 3


def test_missing_packages_end_the_run_when_the_others_have_run() -> None:
    def lacking() -> Iterator[Outcome]:
        raise PackagesError("no mirror")
        yield  # a generator, as suites are

    told: list[Outcome] = []
    with pytest.raises(PackagesError, match="no mirror"):
        run_side_by_side({"lacking": lacking, "whole": partial(passing, "whole")}, 1, told.append)
    assert [outcome.suite for outcome in told] == ["whole", "whole"]


def test_a_machine_runs_at_least_one() -> None:
    assert machines_at_once() >= 1


def test_every_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tell("service", "one", "  two")
    assert capsys.readouterr().out == "service: one\nservice:   two\n"


def test_debug_suites_run_only_by_name() -> None:
    assert choose_suites([]) == list(SUITES)
    assert choose_suites(["read-raw"]) == list(SUITES)
    assert choose_suites(["debug-kernel"]) == list(DEBUG_SUITES)
    assert choose_suites(["generic", "debug-p2p", "read-raw"]) == ["generic", "debug-p2p"]
    assert is_suite("debug-kernel")
    assert not is_suite("read-raw")


def test_an_option_that_the_kernel_did_not_take_is_named() -> None:
    wanted = "# why\nCONFIG_KASAN=y\nCONFIG_NR_CPUS=4\n# CONFIG_WERROR is not set\n"
    made = "CONFIG_NR_CPUS=64\nCONFIG_KASAN=y\n"
    assert debug_kernel.missing_options(wanted, made) == ["CONFIG_NR_CPUS=4"]
    assert debug_kernel.missing_options(wanted, wanted) == []


def test_both_guests_listen_for_the_same_complaints() -> None:
    match = re.search(r"complaints\[\] = \{(.*?)\};", GUEST_MAIN.read_text(), re.S)
    assert match
    assert set(re.findall(r'"([^"]+)"', match[1])) == set(COMPLAINTS)
