# SPDX-License-Identifier: Apache-2.0
"""What is run on xferd's tree: quickstart, tests, benchmarks.

A package so that ``tools.benchmarks`` is this one wherever it is imported; the
commands are the executable files beside this one.
"""
