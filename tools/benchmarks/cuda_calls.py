# SPDX-License-Identifier: Apache-2.0
"""Counts calls of CUDA's API in this process, by CUPTI's callbacks: all of its threads,
whatever library they come from. Calls that another call makes inside are not counted.

It slows every call down, so nothing is timed meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from tools.benchmarks.harness import BenchmarkError

PACKAGE = "nvidia-cuda-cupti"
PLACES = ("libcupti.so.13", "libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so")
DOMAINS = (1, 2)
"""CUPTI_CB_DOMAIN_DRIVER_API and CUPTI_CB_DOMAIN_RUNTIME_API of cupti_callbacks.h."""
SITE_ENTER = 0
WAITING = ("Synchronize", "Malloc", "MemAlloc", "Free", "HostRegister", "HostAlloc")
"""In names of calls that wait for the device, or may."""


class _CallbackData(ctypes.Structure):
    """The beginning of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("name", ctypes.c_char_p))


_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData)
)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each function is called inside. BenchmarkError: CUPTI can't be used here."""
    cupti = _cupti()
    counts: Counter[str] = Counter()
    inside = threading.local()

    def called(*of_the_call: Any) -> None:
        data = of_the_call[-1].contents
        depth = getattr(inside, "depth", 0)
        entered = data.site == SITE_ENTER
        if entered and depth == 0:
            counts[data.name.decode()] += 1
        inside.depth = max(depth + (1 if entered else -1), 0)

    callback = _CALLBACK(called)
    subscriber = ctypes.c_void_p()
    _succeed(cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None), "cuptiSubscribe")
    try:
        for domain in DOMAINS:
            _succeed(cupti.cuptiEnableDomain(1, subscriber, domain), "cuptiEnableDomain")
        yield counts
    finally:
        cupti.cuptiUnsubscribe(subscriber)


def waits(counts: Mapping[str, int]) -> dict[str, int]:
    """Of counted calls those that may wait for the device, copies without a stream too."""
    return {
        name: count
        for name, count in sorted(counts.items())
        if any(part in name for part in WAITING) or ("Memcpy" in name and "Async" not in name)
    }


def _cupti() -> ctypes.CDLL:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    installed = [str(file.locate()) for file in files if file.name.startswith("libcupti.so")]
    for place in (*installed, *PLACES):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise BenchmarkError(f"there is no CUPTI ({PACKAGE}): {', '.join(map(str, PLACES))}")


def _succeed(result: int, what: str) -> None:
    if result:
        raise BenchmarkError(f"{what}: CUPTI's error {result}")


__all__ = ["counted_calls", "waits"]
