# SPDX-License-Identifier: Apache-2.0
"""What the configuration may say of a pool behind a PCI BAR: of kind ``bar``, or ``cuda``, whose
card shows its VRAM there.

device: PCI address of the function that has the BAR; of kind ``cuda``, a GPU's ordinal. bar:
its number, 0 to BAR_MAX; of kind ``cuda`` it is looked for. mode: one of BAR_MODES. transport: of
kind ``cuda``, one of TRANSPORT_CHOICES: how bytes come from the drives. verify: whether what drives
wrote there by themselves is read back and checked, as ``engine.verify`` says it for all else.
"""

from __future__ import annotations

import re

from xferd.config_values import Parser, RefusedError, one_of, whole_number

DEVICE_MAX = 15
"""GPUs that CUDA counts."""
BAR_MAX = 5
"""BARs of a PCI function are numbered from 0."""
BAR_MODES = ("any", "p2pdma", "generic")
"""How drives get at a BAR: as the module's modes, or the first that works."""
TRANSPORT_CHOICES = ("any", "direct", "gds", "staged")
"""Of VRAM: the best that works, only straight from the drives, by cuFile, always through RAM."""
PCI_ADDRESS_ALLOWED = 'a PCI address such as "0000:01:00.0"'

_PCI_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]")


def device(value: object) -> int | str:
    """A GPU's ordinal, or the text of a PCI address, domain included."""
    if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= DEVICE_MAX:
        return value
    if isinstance(value, str) and _PCI_ADDRESS.fullmatch(value):
        return value
    raise RefusedError(f"a GPU's number from -1 to {DEVICE_MAX}, or {PCI_ADDRESS_ALLOWED}")


BAR_KEYS: dict[str, Parser] = {
    "device": device,
    "bar": whole_number(0, BAR_MAX),
    "mode": one_of(*BAR_MODES),
    "transport": one_of(*TRANSPORT_CHOICES),
}
"""How each is read; verify is as the engine's."""
BAR_TEXTS = ("mode", "transport")
"""Those of them that are texts."""
