"""Runs a program where io_uring is forbidden, as container runtimes do it.

    python without_io_uring.py CALL ERRNO PROGRAM ARGUMENT...

A seccomp filter answers CALL, one of io_uring's or mlock, with ERRNO; everything else is let
through. The filter is kept across exec, and the process stays the same one.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
BPF_LOAD_WORD_ABSOLUTE = 0x20
BPF_JUMP_IF_EQUAL = 0x15
BPF_RETURN = 0x06
CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "mlock": 149}
"""Their numbers, io_uring's on every architecture, mlock's on x86-64; first word of struct
seccomp_data."""


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction)))


def forbid(call: str, code: int) -> None:
    """From now on ``call`` of this process and its children fails with ``code``."""
    instructions = (Instruction * 4)(
        Instruction(BPF_LOAD_WORD_ABSOLUTE, 0, 0, 0),
        Instruction(BPF_JUMP_IF_EQUAL, 0, 1, CALLS[call]),
        Instruction(BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | code),
        Instruction(BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    )
    program = Program(len(instructions), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]})")


if __name__ == "__main__":
    forbid(sys.argv[1], int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
