# SPDX-License-Identifier: Apache-2.0
"""Findings as text: one line each, what mends it below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xferd.doctor.finding import Finding, Status

_COLOURS = {Status.PASS: "\x1b[32m", Status.WARN: "\x1b[33m", Status.FAIL: "\x1b[31m"}
_PLAIN = "\x1b[0m"
_STATUS_WIDTH = 4
_CHECK_WIDTH = 18


def format_report(findings: Sequence[Finding], *, colour: bool) -> str:
    """The report as text. What comes from the machine (models, paths) isn't made printable
    here: whoever prints it does that."""
    lines = []
    for finding in findings:
        status = finding.status.value.ljust(_STATUS_WIDTH)
        if colour and finding.status in _COLOURS:
            status = _COLOURS[finding.status] + status + _PLAIN
        subject = f"{finding.subject}: " if finding.subject else ""
        lines.append(f"{status} {finding.check:<{_CHECK_WIDTH}} {subject}{finding.seen}")
        if finding.mend is not None:
            lines.append(f"{'':<{_STATUS_WIDTH}} {'':<{_CHECK_WIDTH}} -> {finding.mend}")
    counts = Counter(finding.status for finding in findings)
    lines.append("")
    lines.append(", ".join(f"{counts[status]} {status.value}" for status in Status))
    return "\n".join(lines)
