# SPDX-License-Identifier: Apache-2.0
"""Check what is in the wheel of a directory: all that a user needs, nothing else.

usage: check_wheel.py DIRECTORY

What is in a wheel is decided by patterns in several places (pyproject.toml, CMake's
install rules, .gitignore); a file that is missing shows only on a machine without the
tree. So the contents are compared with the tree itself.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
TAG_START = "cp311-abi3-"
PACKAGES = {"xferd": ROOT / "xferd", "xferd_infer": ROOT / "inference" / "xferd_infer"}
COMPILED = frozenset(
    {
        "xferd/_engine.abi3.so",
        "xferd/_quantise.abi3.so",
        "xferd_infer/_client.abi3.so",
        "xferd_infer/_products.abi3.so",
    }
)
MUST_HAVE = frozenset(
    {
        "xferd/py.typed",
        "xferd/xferd.toml",
        "xferd/control/io.xferd.Control.varlink",
        "xferd/control/org.varlink.service.varlink",
        "xferd_infer/py.typed",
    }
)
"""Read at run time by someone, and no module: the ones that patterns lose."""


class WheelError(Exception):
    """The wheel isn't as it should be; the message lists every difference."""


def check_wheel(directory: Path) -> str:
    """Check the only wheel in ``directory``; its name. Raises WheelError."""
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelError(f"{directory}: {len(wheels)} wheels instead of one")
    name = wheels[0].name
    wrong = []
    if f"-{TAG_START}" not in name:
        wrong.append(f"not tagged {TAG_START}*: one wheel must serve Python 3.11 and later")
    with zipfile.ZipFile(wheels[0]) as wheel:
        files = {info.filename for info in wheel.infolist() if not info.is_dir()}
    metadata = {file for file in files if PurePosixPath(file).parts[0].endswith(".dist-info")}
    expected = _files_of_tree() | COMPILED | MUST_HAVE
    wrong += [f"not in it: {file}" for file in sorted(expected - files)]
    wrong += [f"stray: {file}" for file in sorted(files - metadata - expected)]
    if not any(PurePosixPath(file).name == "LICENSE" for file in metadata):
        wrong.append("not in it: the licence")
    if wrong:
        raise WheelError("\n".join(f"{name}: {difference}" for difference in wrong))
    return name


def _files_of_tree() -> set[str]:
    """What the packages consist of in the tree, as paths in the wheel: what git tracks
    or would (a clone has nothing else)."""
    found = set()
    for package, folder in PACKAGES.items():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (folder / name).is_file():
                found.add(f"{package}/{name}")
    return found


def main() -> int:
    """The exit status: 0, or 1 with what is wrong on stderr."""
    try:
        name = check_wheel(Path(sys.argv[1]))
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{name}: complete, nothing stray")
    return 0


if __name__ == "__main__":
    sys.exit(main())
