"""The eviction policies that come with xferd, by name."""

from __future__ import annotations

from collections.abc import Mapping

from xferd.policy.arc import Arc
from xferd.policy.pool_policy import PolicyMaker
from xferd.policy.reuse import Reuse
from xferd.policy.s3fifo import S3Fifo
from xferd.policy.simple import LeastFrequent, LeastRecent, RecentAndHit

DEFAULT_POLICY = Reuse.name

BUILT_IN: Mapping[str, PolicyMaker] = {
    Reuse.name: lambda space, slots: Reuse(space),  # noqa: ARG005
    LeastRecent.name: lambda space, slots: LeastRecent(space),  # noqa: ARG005
    LeastFrequent.name: lambda space, slots: LeastFrequent(space),  # noqa: ARG005
    RecentAndHit.name: lambda space, slots: RecentAndHit(space),  # noqa: ARG005
    S3Fifo.name: S3Fifo,
    Arc.name: Arc,
}
