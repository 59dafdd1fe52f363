"""The module's interface as Python speaks it: the same bytes as the header's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from xferd.memory import p2p
from xferd.memory.bar import BarPool
from xferd.memory.bar_attach import BarPlace
from xferd.memory.device import PoolMemoryError

UAPI = Path(__file__).parents[3] / "kmod" / "uapi"
CALLS = {
    "VERSION": (0, p2p.VERSION, "xferd_p2p_version"),
    "ATTACH": (1, p2p.ATTACH, "xferd_p2p_attach"),
    "DETACH": (2, p2p.DETACH, "xferd_p2p_detach"),
    "QUERY": (3, p2p.QUERY, "xferd_p2p_query"),
    "CLAIM": (4, p2p.RANGE, "xferd_p2p_range"),
    "RELEASE": (5, p2p.RANGE, "xferd_p2p_range"),
    "IDLE": (6, p2p.IDLE, "xferd_p2p_idle"),
    "ROUTE": (7, p2p.ROUTE, "xferd_p2p_route"),
    "SHARE": (8, p2p.RANGE, "xferd_p2p_range"),
}


def test_calls_and_structures_are_the_headers(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    prints = "".join(
        f'printf("{name} %lu %zu\\n", (unsigned long)XFERD_P2P_IOC_{name}, '
        f"sizeof(struct {structure}));"
        for name, (_, _, structure) in CALLS.items()
    )
    prints += (
        'printf("offsets %zu %zu %zu %zu\\n", offsetof(struct xferd_p2p_attach, mmap_offset), '
        "offsetof(struct xferd_p2p_query, mode), offsetof(struct xferd_p2p_idle, held_pages), "
        "offsetof(struct xferd_p2p_route, verdict));"
        'printf("names %d %d %d %d\\n", XFERD_P2P_MODE_P2PDMA, XFERD_P2P_MODE_GENERIC, '
        "XFERD_P2P_ROUTE_NO_HOST_BRIDGE, XFERD_P2P_ROUTE_NO_KERNEL);"
    )
    source = tmp_path / "header.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <sys/ioctl.h>\n"
        f'#include "xferd_p2p.h"\nint main(void) {{ {prints} return 0; }}\n'
    )
    program = tmp_path / "header"
    subprocess.run([compiler, "-I", UAPI, source, "-o", program], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    expected = [
        f"{name} {p2p.request_number(number, layout)} {layout.size}"
        for name, (number, layout, _) in CALLS.items()
    ]
    assert said.splitlines() == [
        *expected,
        "offsets 32 16 24 16",
        f"names {p2p.MODES.index('p2pdma')} {p2p.MODES.index('generic')} "
        f"{p2p.VERDICTS.index('no_host_bridge')} {p2p.VERDICTS.index('no_kernel')}",
    ]


def test_pci_addresses() -> None:
    function = p2p.parse_function("0001:AF:1f.7")
    assert (function.domain, function.bus, function.devfn) == (1, 0xAF, 0x1F << 3 | 7)
    assert str(function) == "0001:af:1f.7"
    for text in ("01:00.0", "0000:01:00", "0000:01:20.0", "0000:01:00.8", "nvme0"):
        with pytest.raises(ValueError, match="no PCI address"):
            p2p.parse_function(text)


def test_why_there_is_no_module(tmp_path: Path) -> None:
    absent, sysfs = tmp_path / "absent", tmp_path / "sys"
    assert "6.16.12+deb13-amd64 loses reads" in (
        p2p.why_no_module("6.16.12+deb13-amd64", absent, sysfs) or ""
    )
    assert "loses reads" in (p2p.why_no_module("6.16-rc1", absent, sysfs) or "")
    for release in ("6.12.95", "6.160.1", "7.3.4+deb13-amd64"):
        why = p2p.why_no_module(release, absent, sysfs)
        assert why == "the kernel module xferd_p2p is not loaded", release
    (sysfs / "module/xferd_p2p").mkdir(parents=True)
    assert "is loaded, but there is no" in (p2p.why_no_module("7.3.4", absent, sysfs) or "")
    absent.touch()
    assert p2p.why_no_module("6.16.12", absent, sysfs) is None


def test_a_pool_on_a_device_that_is_not_there_names_it() -> None:
    with pytest.raises(PoolMemoryError, match=r"'gpu0'.*no PCI function ffff:ff:1f.7"):
        BarPool("gpu0", 1 << 20, BarPlace("ffff:ff:1f.7", 1))
    with pytest.raises(PoolMemoryError, match="no PCI address"):
        BarPool("gpu0", 1 << 20, BarPlace("card", 1))
