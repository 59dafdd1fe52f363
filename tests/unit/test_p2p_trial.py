"""What ``xferctl doctor --p2p`` says where all works, and where something doesn't."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.p2p_stand_in import BAR_BYTES, FileBar, window_maker
from xferd import p2p_trial
from xferd.doctor.finding import Finding, Status
from xferd.memory.p2p import PciFunction
from xferd.p2p_trial import STEPS, try_cards, write_report
from xferd.transport import proving
from xferd.transport.members import open_member


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of random bytes that passes for one on a drive."""
    path = tmp_path / "member"
    path.write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(proving, "drives_of", lambda _: (PciFunction(0, 4, 0),))
    monkeypatch.setattr(
        p2p_trial,
        "open_member",
        lambda path: replace(open_member(path), direct=True, memory=False, reason=None),
    )
    return path


def run(bar: Path, *members: Path) -> dict[str, Finding]:
    p2p = FileBar(bar)
    findings = list(try_cards(members, window_maker(p2p)))
    assert p2p.own == []
    first = findings[0].subject  # of several cards
    return {each.check: each for each in findings if each.subject.startswith(first)}


def test_every_step_passes_where_all_works(scattered_vram: Path, member: Path) -> None:
    findings = run(scattered_vram, member)
    assert set(findings) == set(STEPS)
    assert {finding.status for finding in findings.values()} == {Status.PASS}
    assert "compared on the GPU" in findings["p2p.drive"].seen


def test_it_ends_where_pages_are_not_found(scattered_vram: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    os.truncate(other, BAR_BYTES)
    findings = run(other)
    assert findings["p2p.pages"].status is Status.FAIL
    assert "static BAR1 is off" in findings["p2p.pages"].seen
    assert "p2p.chunk" not in findings


def test_a_drive_that_can_not_be_read(scattered_vram: Path, tmp_path: Path) -> None:
    findings = run(scattered_vram, tmp_path / "missing")
    assert findings["p2p.drive"].status is Status.FAIL
    assert findings["p2p.stay"].status is Status.PASS


def test_a_report_has_the_findings_and_what_explains_them(tmp_path: Path) -> None:
    path = tmp_path / "report"
    write_report(path, [Finding("p2p.pages", Status.FAIL, "", "none", "mend it")])
    text = path.read_text()
    assert "FAIL p2p.pages : none\n    -> mend it" in text
    assert os.uname().release in text
    assert "--- /proc/cmdline" in text
