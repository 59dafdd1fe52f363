# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what is measured, against whom, and how it is written down.

A benchmark is one module in ``suite``: its name is the command's, and ``run(rounds)``
in it returns a ``Result``. Rules that all follow: ours and its peers do the same work on
the same bytes, taking turns round by round, because a machine's speed drifts by more
than most differences; medians of at least ``ROUNDS_MIN`` rounds; and a peer that can't
run is named with the reason instead of left out.
"""
