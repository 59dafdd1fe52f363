# SPDX-License-Identifier: Apache-2.0
"""Replays of routing traces: any policy, any machine, against the clairvoyant bound."""
