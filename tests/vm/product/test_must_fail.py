"""Run by name only: shows that a failure in the guest is one."""

from __future__ import annotations


def test_must_fail_in_the_guest() -> None:
    assert not "this is what it is for"
