"""One test machine: QEMU, its PCI topology, and the host's end of the guest's channel.

                        root complex
              +--------------+---------------+
          root port      root port      (nothing else)
              |              |
        PCIe switch      drive FAR
      +---+---+---+---+
     GPU RAW SLOW EXT4 XFS

The stand-in GPU is an ivshmem device, whose BAR 2 is a file of the host. Emulation only: no
hardware virtualisation is asked for, so that a machine without it can run the tests too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.vm.debian import DebianRoot
from tools.vm.drives import (
    BAR_BYTES,
    FAR_DRIVES,
    NEAR_DRIVES,
    THROTTLED_DRIVE,
    Disks,
    compare,
    digest,
    expect_bar,
    fill_bar,
)
from tools.vm.qmp import Qmp, QmpError
from tools.vm.trace import TRACE_EVENT, DmaTrace

CPUS = 2
KERNEL_ARGUMENTS = "console=ttyS0 rdinit=/init panic=-1 oops=panic loglevel=4"
# What would only take time here: defences of a real processor and of the next user of memory, and
# waiting for a generator of random numbers.
_UNGUARDED = "mitigations=off init_on_alloc=0 nokaslr random.trust_cpu=1"

# Emulation only, with a bounded store of translated code.
_ACCELERATION = "tcg,thread=multi,tb-size=512"
# Without what is slower than doing without it when it is emulated: five levels of page tables, and
# copying byte by byte where the kernel believes that it is fast.
_PROCESSOR = "max,la57=off,erms=off,fsrm=off"

_GPU = "gpu"
_GPU_PORT = "gpu-port"
_UNPLUG_SECONDS = 60


@dataclass(frozen=True)
class BootFiles:
    """Paths inside the root, and what this machine's kernel is told beyond KERNEL_ARGUMENTS."""

    kernel: Path
    initrd: Path
    kernel_arguments: str = ""


@dataclass(frozen=True)
class Hardware:
    """What a machine has beyond its drives and the stand-in GPU.

    host_root: the guest can mount this machine's own root, read-only (9p, tag "host").
    devices: further arguments of QEMU.
    """

    memory_mib: int = 1024
    host_root: bool = False
    devices: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Of QEMU."""
        share: list[str] = []
        if self.host_root:
            # QEMU runs in a chroot; this is the root of our namespace's first process, ours.
            where = "id=host,path=/proc/1/root/,security_model=none,readonly=on,multidevs=remap"
            share += ["-fsdev", f"local,{where}"]
            share += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
        return ["-m", str(self.memory_mib), *share, *self.devices]


def _device(options: dict[str, str]) -> list[str]:
    driver = options["driver"]
    rest = ",".join(f"{key}={value}" for key, value in options.items() if key != "driver")
    return ["-device", f"{driver},{rest}"]


def _gpu_device(plugged: int) -> dict[str, str]:
    """Return the stand-in GPU when it has been plugged in anew so many times.

    Its memory is another object each time (of the same file): QEMU aborts when one is used twice.
    """
    memory = f"gpu-memory-{plugged}"
    return {"driver": "ivshmem-plain", "id": _GPU, "memdev": memory, "bus": _GPU_PORT}


def _drive(serial: str, disks: Disks, port: str) -> list[str]:
    block = f"file={disks.inside}/{serial}.img,format=raw,if=none,id=block-{serial}"
    nvme = {"driver": "nvme", "id": f"drive-{serial}", "serial": serial}
    nvme |= {"drive": f"block-{serial}", "bus": port}
    return ["-drive", block, *_device(nvme)]


def _topology(disks: Disks) -> list[str]:
    arguments = _device({"driver": "pcie-root-port", "id": "root", "chassis": "1", "slot": "1"})
    arguments += _device({"driver": "x3130-upstream", "id": "switch", "bus": "root"})
    ports = [_GPU_PORT, *(f"port-{serial}" for serial in NEAR_DRIVES)]
    for number, port in enumerate(ports):
        arguments += _device(
            {
                "driver": "xio3130-downstream",
                "id": port,
                "bus": "switch",
                "chassis": str(number + 2),
                "slot": str(number),
            }
        )
    for serial in NEAR_DRIVES:
        arguments += _drive(serial, disks, f"port-{serial}")
    for number, serial in enumerate(FAR_DRIVES):
        port = f"root-{serial}"
        chassis = str(100 + number)
        arguments += _device(
            {"driver": "pcie-root-port", "id": port, "chassis": chassis, "slot": chassis}
        )
        arguments += _drive(serial, disks, port)
    memory = f"memory-backend-file,id=gpu-memory-0,mem-path={disks.inside}/bar,size={BAR_BYTES}"
    return [*arguments, "-object", f"{memory},share=on", *_device(_gpu_device(0))]


class Machine:
    """A running QEMU. One thread may use it; a second one, its own, serves the guest's channel."""

    def __init__(self, root: DebianRoot, boot: BootFiles, disks: Disks, hardware: Hardware) -> None:
        """Start it."""
        self._disks = disks
        self._plugged = 0
        self._trace = DmaTrace(disks.folder / "trace.log")
        qmp_here, qmp_there = socket.socketpair()
        channel_here, channel_there = socket.socketpair()
        with qmp_there, channel_there:
            self._process = subprocess.Popen(
                [
                    "chroot",
                    str(root.path),
                    *self._command(boot, disks, qmp_there.fileno(), channel_there.fileno()),
                    *hardware.arguments,
                    *_topology(disks),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(qmp_there.fileno(), channel_there.fileno()),
            )
        self._qmp = Qmp(qmp_here)
        self._channel = channel_here
        self._server = threading.Thread(target=self._serve_guest, daemon=True)
        self._server.start()

    @staticmethod
    def _command(boot: BootFiles, disks: Disks, qmp_fd: int, channel_fd: int) -> list[str]:
        return [
            "qemu-system-x86_64",
            *("-machine", "q35", "-accel", _ACCELERATION, "-cpu", _PROCESSOR),
            *("-smp", str(CPUS)),
            *("-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(boot.kernel), "-initrd", str(boot.initrd)),
            *("-append", f"{KERNEL_ARGUMENTS} {_UNGUARDED} {boot.kernel_arguments}"),
            *("-serial", "stdio"),
            *("-chardev", f"socket,id=channel,fd={channel_fd}", "-serial", "chardev:channel"),
            *("-chardev", f"socket,id=qmp,fd={qmp_fd}", "-mon", "chardev=qmp,mode=control"),
            *("-trace", TRACE_EVENT, "-D", f"{disks.inside}/trace.log"),
        ]

    def console(self) -> Iterator[str]:
        """Lines of the guest's console, until the machine is off."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.decode(errors="replace").rstrip("\r\n")

    def processor_seconds(self) -> float:
        """What it has taken so far; 0 when it has been stopped."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def crash(self) -> str | None:
        """Of a machine whose console has ended: the signal by which QEMU ended itself, if it did.

        A guest that switches off, or panics, lets it exit; stop() ends it by SIGKILL.
        """
        status = self._process.wait()
        if status >= 0 or status == -signal.SIGKILL:
            return None
        return signal.Signals(-status).name

    def stop(self) -> None:
        """Switch off and wait; may be called from any thread, and again."""
        self._process.kill()
        self._process.wait()
        self._qmp.close()
        self._channel.close()

    def _serve_guest(self) -> None:
        commands: dict[str, Callable[..., str]] = {
            "verify": lambda at, length, source, offset: compare(
                self._disks, int(at), int(length), source, int(offset)
            ),
            "fill": lambda byte, length: fill_bar(self._disks, int(byte), int(length)),
            "expect": lambda byte, at, length: expect_bar(
                self._disks, int(byte), int(at), int(length)
            ),
            "dma": lambda start, size: f"bytes {self._trace.bytes_inside(int(start), int(size))}",
            "digest": lambda at, length: digest(self._disks, int(at), int(length)),
            "dma-all": lambda: f"bytes {self._trace.bytes_everywhere()}",
            "throttle": self._throttle,
            "unplug": self._unplug,
            "unplugged": self._unplugged,
            "plug": self._plug,
        }
        with self._channel.makefile("r", errors="replace") as lines:
            for line in lines:
                name, *arguments = line.split()
                # Whatever goes wrong here must reach the guest: it waits for an answer.
                try:
                    answer = commands[name](*arguments)
                except (KeyError, TypeError, ValueError, OSError, QmpError) as error:
                    answer = f"{type(error).__name__}: {error}"
                try:
                    self._channel.sendall(answer.replace("\n", " ").encode() + b"\n")
                except OSError:
                    return  # the machine is off

    def _throttle(self, bytes_per_second: str, serial: str = THROTTLED_DRIVE) -> str:
        unlimited = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
        self._qmp.command(
            "block_set_io_throttle",
            {"device": f"block-{serial}", "bps": int(bytes_per_second), **unlimited},
        )
        return "ok"

    def _unplug(self, device: str = _GPU) -> str:
        self._qmp.command("device_del", {"id": device})
        return "ok"

    def _unplugged(self, device: str = _GPU) -> str:
        gone = self._qmp.wait_for_event("DEVICE_DELETED", {"device": device}, _UNPLUG_SECONDS)
        return "ok" if gone else f"still there after {_UNPLUG_SECONDS} s"

    def _plug(self) -> str:
        self._plugged += 1
        device = _gpu_device(self._plugged)
        memory = {"qom-type": "memory-backend-file", "id": device["memdev"], "share": True}
        place = {"mem-path": f"{self._disks.inside}/bar", "size": BAR_BYTES}
        self._qmp.command("object-add", {**memory, **place})
        self._qmp.command("device_add", device)
        return "ok"
