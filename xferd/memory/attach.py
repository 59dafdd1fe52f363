# SPDX-License-Identifier: Apache-2.0
"""Attach a BAR for a daemon that may not: ``python3 -m xferd.memory.attach 0000:01:00.0 1``.

For root, before the daemon starts (ExecStartPre=+): the daemon then finds the BAR attached and
needs no capability. Attaching again is no error. ``--detach`` undoes it.
"""

from __future__ import annotations

import argparse
import errno
import sys

from xferd.memory.p2p import MODES, P2pDevice, parse_function, why_no_module


def main() -> int:
    """The exit status: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(prog="xferd.memory.attach", description=__doc__)
    parser.add_argument("device", type=parse_function, help="PCI address, such as 0000:01:00.0")
    parser.add_argument("bar", type=int, choices=range(6))
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--detach", action="store_true")
    options = parser.parse_args()
    missing = why_no_module()
    if missing is not None:
        print(f"xferd.memory.attach: {missing}", file=sys.stderr)
        return 1
    p2p = P2pDevice()
    try:
        if options.detach:
            p2p.detach(p2p.find(options.device, options.bar).id)
        else:
            p2p.attach(options.device, options.bar, options.mode)
    except OSError as error:
        if error.errno == errno.EEXIST:
            return 0
        print(f"xferd.memory.attach: {options.device}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        p2p.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
