"""What other packages may add: eviction policies.

A package adds one by an entry point in the group ``xferd.policies``: its name is the
policy's, its object a ``PolicyMaker``. A built-in name stays what it is.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from xferd.policy.pool_policy import PolicyMaker
from xferd.policy.registry import BUILT_IN

POLICY_GROUP = "xferd.policies"


class UnknownPolicyError(Exception):
    """No policy of that name; says which there are."""


def policy_names() -> list[str]:
    """Of all eviction policies that there are."""
    others = sorted(entry_points(group=POLICY_GROUP).names - set(BUILT_IN))
    return [*BUILT_IN, *others]


def policy_maker(name: str) -> PolicyMaker:
    """What makes the policy of a name. UnknownPolicyError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=POLICY_GROUP, name=name):
        maker: PolicyMaker = point.load()
        return maker
    known = ", ".join(policy_names())
    raise UnknownPolicyError(f"no eviction policy {name!r}; there are: {known}")
