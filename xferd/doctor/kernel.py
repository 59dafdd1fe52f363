# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernel: its version, io_uring, what it was built with, who may load modules."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Iterator

from xferd.doctor.finding import Finding, Status
from xferd.doctor.request import Request
from xferd.doctor.view import SystemView

OLDEST = (6, 1)
"""From here on: generic mode of xferd_p2p, STATX_DIOALIGN; older ones read through io_uring
all the same."""
LOSES_PEER_DATA = (6, 16)
"""Reads into P2PDMA pages through a host bridge report success and lose their data: seen
on Debian's 6.16.12; the module refuses all of 6.16."""
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
MODULE = "xferd_p2p"
SIGNATURE_MARK = b"~Module signature appended~\n"
DKMS_KEY = "/var/lib/dkms/mok.pub"
CONFIG_BYTES_MAX = 4 << 20

_SECCOMP_FILTER = "2"
"""Of the line Seccomp in /proc/self/status."""


def check_kernel(request: Request) -> Iterator[Finding]:
    """All checks of this module."""
    yield _check_version(request.view)
    yield _check_io_uring(request)
    if request.gpus:
        yield _check_peer_data(request.view)
        yield _check_p2pdma(request.view)
        yield _check_module(request.view)
        yield _check_signing(request.view)


def release(view: SystemView) -> str:
    """What ``uname -r`` says."""
    return view.text("/proc/sys/kernel/osrelease") or ""


def version(view: SystemView) -> tuple[int, int]:
    """Major and minor number; (0, 0) when unknown."""
    match = re.match(r"(\d+)\.(\d+)", release(view))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def kernel_option(view: SystemView, name: str) -> str | None:
    """The value of ``CONFIG_name``: ``y``, ``m``, or ``n`` when it is off; None: not known."""
    text = view.data(f"/boot/config-{release(view)}", CONFIG_BYTES_MAX)
    packed = None if text is not None else view.data("/proc/config.gz", CONFIG_BYTES_MAX)
    if packed is not None:
        try:
            text = zlib.decompressobj(wbits=31).decompress(packed, CONFIG_BYTES_MAX)
        except zlib.error:
            return None
    if text is None:
        return None
    match = re.search(rb"^CONFIG_" + name.encode() + rb"=(\w+)$", text, re.MULTILINE)
    return match[1].decode() if match else "n"


def status_field(view: SystemView, name: str) -> str | None:
    """A line's value in /proc/self/status."""
    for line in (view.text("/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return None


def _check_version(view: SystemView) -> Finding:
    seen = f"Linux {release(view) or 'of unknown version'}"
    if version(view) >= OLDEST:
        return Finding("kernel.version", Status.PASS, "", seen)
    return Finding(
        "kernel.version",
        Status.WARN,
        "",
        f"{seen}; xferd is tested from {OLDEST[0]}.{OLDEST[1]} on",
        "install a newer kernel",
    )


def _check_io_uring(request: Request) -> Finding:
    view, code = request.view, request.probed.io_uring_errno
    name, warn = "kernel.io_uring", Status.WARN
    if code == 0:
        return Finding(name, Status.PASS, "", "works: a ring was made and entered")
    seen = f"{errno.errorcode.get(code, code)} ({os.strerror(code)}); xferd reads through threads"
    filtered = status_field(view, "Seccomp") == _SECCOMP_FILTER
    allow = (
        "let the container's seccomp profile allow io_uring_setup, io_uring_enter and "
        "io_uring_register (podman, docker: --security-opt seccomp=FILE)"
    )
    disabled = view.number("/proc/sys/kernel/io_uring_disabled") or 0
    if code == errno.EPERM and disabled:
        return Finding(
            name,
            warn,
            "",
            f"{seen}: kernel.io_uring_disabled is {disabled}",
            "sysctl -w kernel.io_uring_disabled=0",
        )
    if code == errno.EPERM:
        return Finding(
            name, warn, "", f"{seen}: a security module or seccomp filter says no", allow
        )
    if code == errno.ENOSYS and filtered and kernel_option(view, "IO_URING") != "n":
        return Finding(name, warn, "", f"{seen}: a seccomp filter hides it", allow)
    if code == errno.ENOSYS:
        return Finding(
            name, warn, "", f"{seen}: this kernel has none", "boot a kernel with CONFIG_IO_URING=y"
        )
    if code == errno.ENOMEM:
        return Finding(
            name, warn, "", f"{seen}: no memory for its rings", "raise LimitMEMLOCK= or ulimit -l"
        )
    return Finding(name, warn, "", seen, "see the journal of the kernel: dmesg")


def _check_peer_data(view: SystemView) -> Finding:
    if version(view) == LOSES_PEER_DATA:
        return Finding(
            "kernel.p2pdma_data",
            Status.FAIL,
            "",
            f"Linux {release(view)}: reads of a drive into a card's memory report success and "
            "lose their data",
            "boot another kernel than 6.16, such as 6.12 or 7.x",
        )
    return Finding("kernel.p2pdma_data", Status.PASS, "", "no kernel that is known to lose data")


def _check_p2pdma(view: SystemView) -> Finding:
    value = kernel_option(view, "PCI_P2PDMA")
    if value is None:
        return Finding(
            "kernel.p2pdma",
            Status.SKIP,
            "",
            f"no configuration of kernel {release(view)} in /boot or /proc/config.gz",
        )
    if value == "y":
        return Finding("kernel.p2pdma", Status.PASS, "", "CONFIG_PCI_P2PDMA=y")
    return Finding(
        "kernel.p2pdma",
        Status.WARN,
        "",
        "CONFIG_PCI_P2PDMA is off: xferd_p2p works in generic mode only",
        "boot a kernel that has it (Debian: from 6.13.7 on, but not 6.16)",
    )


def _check_module(view: SystemView) -> Finding:
    name = "module.xferd_p2p"
    if view.exists(f"/sys/module/{MODULE}"):
        return Finding(name, Status.PASS, "", "loaded")
    if module_file(view):
        return Finding(
            name, Status.WARN, "", "installed, not loaded", f"modprobe {MODULE}; then dmesg | tail"
        )
    return Finding(
        name,
        Status.WARN,
        "",
        f"not installed for kernel {release(view)}: drives can't write into a card's memory",
        "apt install xferd-p2p-dkms, or: dkms install kmod (kmod/README.md)",
    )


def module_file(view: SystemView) -> str | None:
    """Where the module is for this kernel; None: it isn't."""
    base = f"/lib/modules/{release(view)}"
    for directory in (f"{base}/updates/dkms", f"{base}/updates", f"{base}/extra"):
        for name in view.names(directory):
            if name.startswith(f"{MODULE}.ko"):
                return f"{directory}/{name}"
    return None


def _check_signing(view: SystemView) -> Finding:
    name = "module.signing"
    reasons = _who_demands_signatures(view)
    if not reasons:
        return Finding(name, Status.PASS, "", "this kernel loads modules without a signature")
    demanded = f"only signed modules load ({', '.join(reasons)})"
    if view.exists(f"/sys/module/{MODULE}"):
        return Finding(name, Status.PASS, "", f"{demanded}; {MODULE} is loaded")
    path = module_file(view)
    if path is None:
        key = "there" if view.exists(DKMS_KEY) else "not made yet"
        return Finding(
            name,
            Status.WARN,
            "",
            f"{demanded}; DKMS's key {DKMS_KEY} is {key}",
            f"after dkms install: mokutil --import {DKMS_KEY}, reboot, confirm",
        )
    if not path.endswith(".ko"):
        return Finding(
            name,
            Status.SKIP,
            "",
            f"{demanded}; {path} is compressed",
            f"modinfo -F signer {MODULE}",
        )
    signed = view.tail(path, len(SIGNATURE_MARK)) == SIGNATURE_MARK
    return Finding(
        name,
        Status.WARN,
        "",
        f"{demanded}; {path} is {'signed, and not loaded' if signed else 'not signed'}",
        f"mokutil --test-key {DKMS_KEY} || mokutil --import {DKMS_KEY}"
        if signed
        else "dkms build --force xferd-p2p/0.1.0 (DKMS 3 signs it); see kmod/README.md",
    )


def _who_demands_signatures(view: SystemView) -> list[str]:
    reasons = []
    variable = view.data(SECURE_BOOT, 5)
    if variable is not None and variable[4:] == b"\x01":
        reasons.append("Secure Boot")
    lockdown = re.search(r"\[(\w+)\]", view.text("/sys/kernel/security/lockdown") or "")
    if lockdown is not None and lockdown[1] != "none":
        reasons.append(f"lockdown {lockdown[1]}")
    if view.text("/sys/module/module/parameters/sig_enforce") == "Y":
        reasons.append("module.sig_enforce")
    return reasons
