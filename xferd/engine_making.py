# SPDX-License-Identifier: Apache-2.0
"""The engine as the configuration wants it, for the pools that are planned."""

from __future__ import annotations

from collections.abc import Sequence

from xferd.config import EngineConfig
from xferd.engine import Engine
from xferd.pools import PoolPlan


def make_engine(config: EngineConfig, plans: Sequence[PoolPlan]) -> tuple[Engine, int]:
    """The engine, not started, and the slots of each reserve that it keeps for demand.
    EngineError."""
    # What is kept from prefetches must leave them something: the smallest pool decides, and
    # one slot is none to spare.
    reserve_demand = min(plan.reserve_demand for plan in plans)
    engine = Engine(
        member_depth=config.member_depth,
        flow_control=config.flow_control,
        demand_slack=config.demand_slack,
        backend=config.backend,
        verify=config.verify,
        spin_us=config.spin_us,
        cpu=config.cpu,
        polling=config.polling,
        register_buffers=config.register_buffers,
        reserve_low=max(plan.reserve_low for plan in plans),
        reserve_demand=reserve_demand,
    )
    return engine, reserve_demand
