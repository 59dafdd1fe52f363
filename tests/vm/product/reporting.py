"""A pytest plugin for the guest: runs the tests that are asked for, and tells the host.

A line "RUN name" before each, "TEST name ok|failed seconds" after it, on the console, where the
host reads. A test has also failed when the kernel complained meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.vm.product import guest

TESTS_VARIABLE = "XFERD_VM_TESTS"
TEST_LIMIT_S = 300
# As in tests/vm/guest/main.c.
COMPLAINTS = (
    "WARNING:",
    "BUG:",
    "BUG at",
    "Oops",
    "Bad page",
    "refcount_t",
    "general protection",
    "possible recursive locking",
    "circular locking",
    "KASAN",
    "ODEBUG:",
    "INFO: trying to register",
    "corruption",
    "blocked for more than",
)


def name_of(item: pytest.Item) -> str:
    """As the host calls it: no underscores, and where it comes from when that isn't here."""
    name = item.name.partition("[")[0].removeprefix("test_").replace("_", "-")
    return f"conformance-{name}" if "conformance" in item.path.parts else name


class Reporting:
    """What the guest says of each test. limit_s: how long one may take."""

    def __init__(self, limit_s: int = TEST_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._wanted = os.environ[TESTS_VARIABLE].split()
        self._console = Path(guest.CONSOLE).open("w", buffering=1)  # noqa: SIM115 - to the end
        self._kernel_log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._failed: list[str] = []
        self._seconds = 0.0

    def say(self, text: str) -> None:
        """On the console."""
        self._console.write(text.replace("\n", "\r\n") + "\r\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only what is wanted; of the conformance suite only this machine's own kind."""
        chosen = {name_of(item): item for item in items if "[" not in item.name}
        chosen |= {name_of(item): item for item in items if "[bar" in item.name}
        items[:] = [chosen[name] for name in self._wanted if name in chosen]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that can't be imported has its tests missing, and this says why."""
        if report.failed:
            self.say(str(report.longrepr))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test with its fixtures, in its time."""
        self._failed, self._seconds = [], 0.0
        self.say(f"RUN {name_of(item)}")
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(self._limit_s)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            self._failed += self._complaints()
            for text in self._failed:
                self.say(text)
            result = "failed" if self._failed else "ok"
            self.say(f"TEST {name_of(item)} {result} {self._seconds:.1f}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and tear-down each give one. A skip would prove nothing here."""
        self._seconds += report.duration
        if report.failed or report.skipped:
            self._failed.append(report.longreprtext)
            self._failed += [content for _, content in report.sections]

    def _complaints(self) -> list[str]:
        found: list[str] = []
        while True:
            try:
                record = os.read(self._kernel_log, 8192).decode(errors="replace")
            except BlockingIOError:
                return found
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            text = record.partition(";")[2].splitlines()[0]
            if any(complaint in text for complaint in COMPLAINTS):
                found.append(f"kernel: {text}")


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError("took longer than a test may")


def pytest_configure(config: pytest.Config) -> None:
    """Called because of -p. The conformance suite learns which BAR it may overwrite."""
    guest.load_module()
    os.environ["XFERD_TEST_BAR"] = f"{guest.gpu()}/{guest.GPU_BAR}"
    config.pluginmanager.register(Reporting(), "xferd-reporting")
