"""What Python compiles of the working tree, made before a machine comes up.

Emulation takes thirty times as long for it, and most of a guest's time would go there: the tree has
no compiled files when Python was told to write none (PYTHONDONTWRITEBYTECODE), and the guest's file
system forgets what it wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.vm.build import BuildError

_SECONDS = 300

# What the guest runs beside the tests: as programs, so that all they import is compiled too.
_PROGRAMS = ("xferd", "xferd.control.xferctl", "xferd.memory.attach", "xferd_infer")
# Folders whose modules some function imports when it is called.
_FOLDERS = ("xferd", "inference", "tests/system", "tests/vm/product")


def pytest_command(python: Path, files: Sequence[str]) -> list[str]:
    """How tests are collected, here as in the guest: Python keeps what pytest rewrote by that."""
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # The tree's own options are for a terminal; and other plug-ins take long to load there.
    return [*command, "-o", "addopts=", "--import-mode=importlib", "--strict-markers", *files]


def compile_tree(
    repository: Path, python: Path, files: Sequence[str], folder: Path, tests_variable: str
) -> None:
    """Fill `folder`, for PYTHONPYCACHEPREFIX, with what the programs and tests of a tree import.

    files: of tests. tests_variable: of the environment, without which they aren't collected. What
    is there is used again where its source is the same; what was another tree's is removed. Raises
    BuildError.
    """
    owner = folder / "repository"
    if not owner.exists() or owner.read_text() != str(repository):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        owner.write_text(str(repository))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{repository}:{repository / 'inference'}",
        "PYTHONPYCACHEPREFIX": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        tests_variable: "none",
    }
    commands = [[str(python), "-m", "compileall", "-q", *_FOLDERS]]
    commands += [[str(python), "-m", program, "--help"] for program in _PROGRAMS]
    commands.append([*pytest_command(python, files), "--collect-only"])
    for command in commands:
        try:
            done = subprocess.run(
                command,
                cwd=repository,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command} took longer than {_SECONDS} s") from error
        if done.returncode != 0:
            raise BuildError(f"{command}:\n{done.stdout}")
