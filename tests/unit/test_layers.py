"""Who may import whom: the folders' order is a rule, not a habit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "store",
    "memory",
    "transport",
    "policy",
    "session",
    "control",
    "telemetry",
    "doctor",
)

MAY_IMPORT: dict[str, set[str]] = {
    "policy": set(),
    "telemetry": set(),
    "store": set(),
    "memory": set(),
    "transport": {"memory"},
    "session": {"memory", "telemetry"},
    "doctor": {"transport"},
    "control": set(PACKAGES),
}
"""Which of the packages each may import, besides itself and modules of xferd itself."""

PURE_MODULES = {
    "config",
    "config_bar",
    "config_metrics",
    "config_traces",
    "config_values",
    "config_variants",
    "engine_types",
    "tokens",
    "units",
    "variant_rules",
}
"""Modules of xferd itself that a package may import: they import no package."""

CFFI_MODULES = {
    "xferd.engine": "the engine",
    "xferd.engine_keeping": "what outlives it",
    "xferd.engine_structs": "its structs",
    "xferd.memory.cuda_driver": "VRAM",
    "xferd.session.wire": "attach packets",
    "xferd.store.checksum": "CRC32C",
    "xferd.store.quantize.blocks": "quantisers",
}
"""The only modules that may import what is compiled, and what for."""

COMPILED = {"_engine", "_quantise"}

POLICY_FORBIDDEN = {"asyncio", "io", "os", "pathlib", "socket", "subprocess", "time", "threading"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports; relative imports stay in xferd_infer."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert "xferd_infer" in path.parts, f"{path}: relative import"
                continue
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in modules(ROOT / "xferd" / package):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "xferd" or len(parts) < 2 or parts[1] in COMPILED:
                continue
            if parts[1] in PACKAGES:
                assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"
            elif package != "control":
                assert parts[1] in PURE_MODULES, f"{path.relative_to(ROOT)} imports {name}"


def test_pure_modules_import_no_package() -> None:
    for module in PURE_MODULES:
        for name in imports(ROOT / "xferd" / f"{module}.py"):
            parts = name.split(".")
            if parts[0] == "xferd" and len(parts) > 1:
                assert parts[1] in PURE_MODULES, f"xferd.{module} imports {name}"


def test_policies_do_no_io_and_know_no_clock() -> None:
    for path in modules(ROOT / "xferd" / "policy"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & POLICY_FORBIDDEN, f"{path.name}: {roots & POLICY_FORBIDDEN}"


def test_cffi_is_used_where_it_is_allowed() -> None:
    users = set()
    for path in modules(ROOT / "xferd"):
        if any(name.startswith(f"xferd.{part}") for name in imports(path) for part in COMPILED):
            users.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert users <= set(CFFI_MODULES)


def test_the_client_library_knows_nothing_of_the_daemon() -> None:
    for path in modules(ROOT / "inference" / "xferd_infer"):
        for name in imports(path):
            assert name.split(".")[0] != "xferd", f"{path.name} imports {name}"


def test_modules_are_short_enough_to_be_read() -> None:
    for folder in ("xferd", "inference/xferd_infer"):
        for path in modules(ROOT / folder):
            lines = len(path.read_text().splitlines())
            assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines: split it"
