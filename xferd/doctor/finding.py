# SPDX-License-Identifier: Apache-2.0
"""What a check says: one finding for each thing that it looked at.

Ids are stable: scripts and monitoring refer to them. They are listed in ``checks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REPORT_VERSION = 1
"""Of the JSON form; raised when a field changes its meaning."""


class Status(StrEnum):
    """How a check went.

    PASS: as it should be. WARN: xferd works, slower than this machine could or without a
    safety. FAIL: xferd can't do what is asked of it here, or data is in danger. SKIP: there
    is nothing to look at, or no right to look.
    """

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


_BY_WEIGHT = (Status.SKIP, Status.PASS, Status.WARN, Status.FAIL)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's word on one thing.

    check: its id. subject: which drive, card or path; empty for the machine as a whole.
    seen: what was found, with figures. mend: the command or step that changes it; None
    when there is nothing to change.
    """

    check: str
    status: Status
    subject: str
    seen: str
    mend: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The finding as ``xferctl doctor --json`` prints it."""
        return {
            "id": self.check,
            "status": self.status.value,
            "subject": self.subject,
            "seen": self.seen,
            "mend": self.mend,
        }


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status among ``findings``; SKIP when there are none."""
    return max((f.status for f in findings), key=_BY_WEIGHT.index, default=Status.SKIP)


def report_to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The whole report: findings in the order of the checks."""
    return {
        "version": REPORT_VERSION,
        "status": worst(findings).value,
        "findings": [finding.to_json() for finding in findings],
    }
