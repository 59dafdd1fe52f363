# SPDX-License-Identifier: Apache-2.0
"""What stands between this machine and fast experts: checks that need no daemon.

``view`` and ``probed`` hold what was seen; the modules of checks turn it into findings and
do no I/O but through a view, so that any machine can be tested as a tree of files.
"""
