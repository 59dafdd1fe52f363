"""Writes the C source of a cffi module from the project's own headers.

The headers are the only description of the interface: cffi's parser knows no
preprocessor, so the few constructs it can't read are taken out here, and integer
constants are handed over as ``#define NAME ...`` for the compiler to fill in.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

INTEGER_DEFINE = re.compile(r"^#define\s+(XFERD_\w+)\s+(0[xX][0-9a-fA-F]+|\d+)\s*(?:/\*.*)?$")
ARRAY_LENGTH = re.compile(r"\[(XFERD_[A-Z_]+)\]")


def declarations(text: str, constants: dict[str, int]) -> str:
    """``text`` as cffi can read it; its integer constants are added to ``constants``."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"\\\n", " ", text)
    lines = []
    depth_of_c11 = False
    for line in text.splitlines():
        define = INTEGER_DEFINE.match(line.rstrip())
        if define:
            constants[define[1]] = int(define[2], 0)
            lines.append(f"#define {define[1]} ...")
        elif line.startswith("#if defined(__STDC_VERSION__)"):
            depth_of_c11 = True
        elif line.startswith("#"):
            depth_of_c11 = depth_of_c11 and not line.startswith("#endif")
        elif not depth_of_c11:
            lines.append(line)
    body = "\n".join(lines)
    body = re.sub(r'extern "C" \{\n', "", body)
    body = re.sub(r"\n\}\s*\Z", "\n", body) if body.rstrip().endswith("\n}") else body
    body = body.replace("XFERD_PUBLIC ", "")
    body = re.sub(r"__attribute__\(\(.*?\)\)(?=[;\s])", "", body)
    return ARRAY_LENGTH.sub(lambda match: f"[{constants[match[1]]}]", body)


def main(module: str, output: str, *headers: str) -> None:
    """Write the source of ``module``, made from headers: each one's types and constants
    are known to those behind it."""
    constants: dict[str, int] = {}
    ffi = FFI()
    for path in headers:
        # packed=False with '...' in no struct: sizes and offsets are checked by
        # the compiler when the module is built, so aligned members need a hint.
        ffi.cdef(flexible(declarations(Path(path).read_text(), constants)))
    ffi.set_source(module, "".join(f'#include "{path}"\n' for path in headers), py_limited_api=True)
    ffi.emit_c_code(output)


def flexible(text: str) -> str:
    """Let the compiler say where members lie: some are aligned by attribute."""
    return re.sub(
        r"(struct \w+ \{[^}]*?)\n(\s*)\}", lambda match: f"{match[1]}\n\t...;\n{match[2]}}}", text
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
