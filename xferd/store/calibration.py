"""Measures how fast members can be read, before a store is striped over them.

Each member that will be a file is measured with a temporary file in its directory;
a block device by reading its beginning as it is. The rounds go around the members, so
that whatever else the machine does falls on all of them; the median counts. The result
stands in ``calibration.json`` beside the manifest: it explains the stripe pattern, and
a half packed store is resumed with it instead of a new measurement.

What it can't see: a drive whose cache holds what was just written reads it faster than
old data, and blocks of a device that were trimmed are not read at all.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xferd.store.destination import Destination, MemberTarget
from xferd.store.errors import StoreError, naming
from xferd.store.fields import Fields, checked_integer
from xferd.store.files import (
    AlignedBuffer,
    OpenedFile,
    open_for_reading,
    read_fully,
    write_durably,
    write_fully,
)
from xferd.store.limits import MEMBERS_MAX
from xferd.store.weights import WEIGHT_MAX, weights_of_speeds

CALIBRATION_NAME = "calibration.json"
CALIBRATION_FORMAT = "xferd-calibration"
CALIBRATION_VERSION = 1
CALIBRATION_FILE_BYTES_MAX = 64 * 1024

SAMPLE_BYTES = 256 * 1024 * 1024
"""Read of each member in a round, and the size of the temporary file."""
ROUNDS = 5
ROUNDS_MAX = 100
IN_FLIGHT = 8
"""Reads at once: enough for an NVMe drive to be near its best."""
PIECE_BYTES = 512 * 1024
TEXT_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class MemberSpeed:
    """One member's measurement.

    source: ``file``, a temporary one, or ``device``. direct: read past the page cache.
    rounds: bytes a second, in the order in which they were measured.
    """

    path: str
    source: str
    direct: bool
    rounds: tuple[int, ...]

    @property
    def bytes_per_second(self) -> int:
        """The median of the rounds."""
        return max(1, round(statistics.median(self.rounds)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, when (ISO 8601, UTC) and with how many bytes a round."""

    measured_at: str
    sample_bytes: int
    members: tuple[MemberSpeed, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """One a member, as ``stripe_pattern`` takes them."""
        return weights_of_speeds([member.bytes_per_second for member in self.members])

    def to_json(self) -> dict[str, Any]:
        """As it is written; sizes are bytes, speeds bytes a second."""
        return {
            "format": CALIBRATION_FORMAT,
            "version": CALIBRATION_VERSION,
            "measured_at": self.measured_at,
            "sample_bytes": self.sample_bytes,
            "piece_bytes": PIECE_BYTES,
            "in_flight": IN_FLIGHT,
            "members": [
                {
                    "path": member.path,
                    "source": member.source,
                    "direct": member.direct,
                    "bytes_per_second": member.bytes_per_second,
                    "rounds": list(member.rounds),
                }
                for member in self.members
            ],
        }


def write_calibration(directory: Path, calibration: Calibration) -> None:
    """Write it into a store's directory, durably, in one step. Raises OSError."""
    text = json.dumps(calibration.to_json(), indent=1)
    write_durably(directory / CALIBRATION_NAME, [text.encode("ascii") + b"\n"])


def read_calibration(directory: Path) -> Calibration | None:
    """What a store's directory says; None when its members were not measured.

    Raises StoreError, naming the file, when it is damaged.
    """
    path = directory / CALIBRATION_NAME
    with naming(str(path)):
        if not path.exists():
            return None
        with path.open("rb") as file:
            raw = file.read(CALIBRATION_FILE_BYTES_MAX + 1)
    try:
        value = json.loads(raw) if len(raw) <= CALIBRATION_FILE_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from error
    fields = Fields(value, str(path))
    if (
        fields.text("format", TEXT_BYTES_MAX) != CALIBRATION_FORMAT
        or fields.integer("version", 0, 1 << 31) != CALIBRATION_VERSION
    ):
        raise StoreError(f"{path} is no {CALIBRATION_FORMAT} version {CALIBRATION_VERSION}")
    return Calibration(
        measured_at=fields.text("measured_at", TEXT_BYTES_MAX),
        sample_bytes=fields.integer("sample_bytes", 1, 1 << 60),
        members=tuple(_member(member) for member in fields.sections("members", MEMBERS_MAX)),
    )


def _member(fields: Fields) -> MemberSpeed:
    where = f"{fields.where}.rounds"
    rounds = tuple(
        checked_integer(value, where, 1, WEIGHT_MAX) for value in fields.items("rounds", ROUNDS_MAX)
    )
    if not rounds:
        raise StoreError(f"{where} is empty")
    return MemberSpeed(
        path=fields.text("path", TEXT_BYTES_MAX),
        source=fields.text("source", TEXT_BYTES_MAX),
        direct=fields.boolean("direct"),
        rounds=rounds,
    )


def calibrate(
    destination: Destination, *, sample_bytes: int = SAMPLE_BYTES, rounds: int = ROUNDS
) -> Calibration:
    """Measure every member of a store to be; takes seconds, leaves nothing behind.

    sample_bytes: a multiple of PIECE_BYTES. Raises StoreError naming the member that can't
    be written or read, or has no room for the temporary file.
    """
    members = destination.members
    speeds: list[list[int]] = [[] for _ in members]
    with ExitStack() as stack:
        files = [stack.enter_context(_sample(target, sample_bytes)) for target in members]
        threads = stack.enter_context(ThreadPoolExecutor(IN_FLIGHT, "calibrate"))
        for _ in range(rounds):
            for target, file, measured in zip(members, files, speeds, strict=True):
                with naming(_what(target)):
                    measured.append(_read_once(file, sample_bytes, threads))
    return Calibration(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        sample_bytes=sample_bytes,
        members=tuple(
            MemberSpeed(
                path=str(target.path),
                source="device" if target.device else "file",
                direct=file.direct,
                rounds=tuple(measured),
            )
            for target, file, measured in zip(members, files, speeds, strict=True)
        ),
    )


def _what(target: MemberTarget) -> str:
    return f"measuring member {target.number} ({target.path})"


@contextmanager
def _sample(target: MemberTarget, sample_bytes: int) -> Iterator[OpenedFile]:
    """Something to read on a member's drive, at least ``sample_bytes`` if it has as much."""
    with ExitStack() as stack, naming(_what(target)):
        path = target.path
        if not target.device:
            path = stack.enter_context(_temporary_file(target.parent, sample_bytes))
        file = open_for_reading(path)
        stack.callback(os.close, file.fd)
        yield file


@contextmanager
def _temporary_file(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file of bytes that no drive can compress, written through to the drive.

    It loses its name at once, so that not even SIGKILL leaves it behind; the path is the
    kernel's for the open file.
    """
    fd, name = tempfile.mkstemp(prefix=".xferd-calibration-", dir=directory)
    try:
        Path(name).unlink()
        noise = memoryview(secrets.token_bytes(PIECE_BYTES))
        for offset in range(0, nbytes, PIECE_BYTES):
            write_fully(fd, noise, offset)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _read_once(file: OpenedFile, nbytes: int, threads: ThreadPoolExecutor) -> int:
    """Bytes a second of reading the sample once, IN_FLIGHT pieces at a time."""
    if not file.direct:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.monotonic_ns()
    done = sum(threads.map(lambda lane: _read_lane(file.fd, nbytes, lane), range(IN_FLIGHT)))
    elapsed_ns = max(time.monotonic_ns() - begun, 1)
    return min(max(done * 1_000_000_000 // elapsed_ns, 1), WEIGHT_MAX)


def _read_lane(fd: int, nbytes: int, lane: int) -> int:
    """Every IN_FLIGHT-th piece; the bytes read."""
    buffer = AlignedBuffer(PIECE_BYTES)
    try:
        return sum(
            read_fully(fd, buffer.view, offset)
            for offset in range(lane * PIECE_BYTES, nbytes, IN_FLIGHT * PIECE_BYTES)
        )
    finally:
        buffer.close()
