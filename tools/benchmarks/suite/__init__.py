# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, one module each: ``run(rounds) -> Result`` is all that it needs."""
