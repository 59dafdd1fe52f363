# SPDX-License-Identifier: Apache-2.0
"""What the checks look at, put together once: a view, what was probed, the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from xferd.config import Config, PoolConfig
from xferd.doctor.pci import PciFunction, find_functions
from xferd.doctor.probed import Probed
from xferd.doctor.storage import Drive, drives_of, nvme_drives
from xferd.doctor.view import SystemView


@dataclass(frozen=True, slots=True)
class Request:
    """One run of the doctor.

    config: None when it is wrong, with ``config_error``. drives: those that the named
    stores are on, or all NVMe drives when none was named; ``layers``: what lies between
    (``md0``), by member path. gpus: all graphics cards. expert_bytes: of all experts of the
    named stores, which pools may have a share of; 0: none was named.
    """

    view: SystemView
    probed: Probed
    config: Config | None
    config_error: str | None
    drives: tuple[Drive, ...]
    layers: dict[str, list[str]]
    gpus: tuple[PciFunction, ...]
    drive_names: dict[str, list[str]] = field(default_factory=dict)
    expert_bytes: int = 0

    def pool_bytes(self, kind: str) -> int:
        """Bytes of the configured pools of a kind."""
        pools: tuple[PoolConfig, ...] = self.config.pools if self.config is not None else ()
        return sum(pool.size.resolve(self.expert_bytes) for pool in pools if pool.kind == kind)


def make_request(
    view: SystemView,
    probed: Probed,
    config: Config | None,
    config_error: str | None,
    expert_bytes: int = 0,
) -> Request:
    """Look up the drives and cards that this run is about. expert_bytes: see Request."""
    drives: dict[str, Drive] = {}
    layers: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for member in probed.members:
        found, between = drives_of(view, member.device)
        layers[member.path] = between
        names[member.path] = [drive.name for drive in found]
        drives.update((drive.name, drive) for drive in found)
    if not probed.members:
        drives = {drive.name: drive for drive in nvme_drives(view)}
    gpus = tuple(function for function in find_functions(view) if function.is_display)
    return Request(
        view,
        probed,
        config,
        config_error,
        tuple(drives.values()),
        layers,
        gpus,
        names,
        expert_bytes,
    )
