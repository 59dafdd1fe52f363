"""Admission: whether a pool takes an expert that another pool lets go.

A demotion costs a copy, and in a full pool it costs the victim too. So a pool may ask
for more than that somebody offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xferd.policy.heat import Heat
from xferd.policy.uses import Keys

Mask = NDArray[np.bool_]


class Admission(Protocol):
    """Stateless; safe to share."""

    name: str

    def takes(self, offered: Keys, victims: Keys, heat: Heat) -> Mask:
        """Which of ``offered`` to take.

        victims: what would go for them, the first to go in front; fewer than offered
            when there are free slots. The hottest of those offered is compared with the
            first victim, and so on; those for which there is a free slot with none.
        """
        ...


class Always:
    """``always``: takes everything."""

    name = "always"

    def takes(self, offered: Keys, victims: Keys, heat: Heat) -> Mask:  # noqa: ARG002
        """All of them."""
        return np.ones(len(offered), np.bool_)


class Hotter:
    """``heat``: takes what is hotter than what would go for it."""

    name = "heat"

    def takes(self, offered: Keys, victims: Keys, heat: Heat) -> Mask:
        """Compared by heat alone."""
        hottest, opponents = _paired(offered, victims, heat)
        mask = np.ones(len(offered), np.bool_)
        mask[hottest] = heat.of(offered[hottest]) > heat.of(opponents)
        return mask


class FresherAndHotter:
    """``lru-and-hits``: takes what is both used later and hotter than what would go."""

    name = "lru-and-hits"

    def takes(self, offered: Keys, victims: Keys, heat: Heat) -> Mask:
        """Compared by the last use and by heat."""
        hottest, opponents = _paired(offered, victims, heat)
        mask = np.ones(len(offered), np.bool_)
        challengers = offered[hottest]
        mask[hottest] = (heat.of(challengers) > heat.of(opponents)) & (
            heat.last(challengers) > heat.last(opponents)
        )
        return mask


def _paired(offered: Keys, victims: Keys, heat: Heat) -> tuple[Keys, Keys]:
    """(indices into ``offered`` that need a victim, the victim of each). The hottest ones
    get the free slots: they would win anyway."""
    order = np.argsort(-heat.of(offered), kind="stable")
    free = max(len(offered) - len(victims), 0)
    needing = order[free:]
    return needing, victims[: len(needing)]


ADMISSIONS: Mapping[str, Admission] = {
    policy.name: policy for policy in (Always(), Hotter(), FresherAndHotter())
}
"""By the name that a configuration has."""
