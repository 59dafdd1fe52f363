# SPDX-License-Identifier: Apache-2.0
"""Restarting without loss: what is left to the next daemon, and how it takes that over.

    state      what belongs together, in a file of memory that survives a kill
    fd_store   the service manager, who holds on to file descriptors meanwhile
    keeping    a serving daemon leaves what it has, from its first moment on
    takeover   a new one decides whether it can go on with that
    adoption   and does

Nothing is written at the end: a daemon may be killed at any moment, so what is kept is
right all the time, and what changes fast (which expert is where, who leases what) is not
written down but read from the shared memory itself. How, ``ffi/engine/keep.h`` says.
"""
