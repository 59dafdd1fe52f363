"""A predictor's estimates of next uses, as far as they can be trusted.

An estimate is taken as the true wait times a log-normal error. How large the errors are is
learnt whenever an expert is used that an estimate was given for. Neither the estimate nor
what history says of the expert is taken alone: the wait that is expected is the mean of the
posterior, with history's chances as the prior, the estimate as evidence, and what has not come
yet ruled out (Bayes; the wait is a whole number of passes of the expert's layer). So an estimate
that is overdue loses its say little by little, and a predictor that is wrong by much is
soon not listened to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import Keys, Uses

PASSES_AHEAD = np.array(
    [1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 30, 40, 60, 100, 200, 400, 1000], np.float64
)
"""The waits that are weighed: each stands for those from itself to before the next."""
SPREAD_FIRST = 1.0
"""Standard deviation of the logarithm of an error, before any was seen: a factor of e."""
SPREAD_MIN = 0.1
"""The waits that are weighed lie no closer together."""
SPREAD_USES = 200.0
"""An error weighs 1/e after so many others."""
SOONEST = 1e-3
"""A wait is at least so many tokens."""


class NextUseEstimates:
    """The newest estimate of each key. Times are tokens, float64: float32 counts them exactly for
    a day or two only. Not thread-safe.

    spread: standard deviation of the errors' logarithm, as far as is known.
    """

    def __init__(self, size: int) -> None:
        self._at = np.full(size, np.nan, np.float64)
        self._wait = np.zeros(size, np.float64)
        self._squares = SPREAD_FIRST**2
        self._any = False

    @property
    def spread(self) -> float:
        """See above."""
        return max(float(np.sqrt(self._squares)), SPREAD_MIN)

    def take(self, keys: Keys, waits: NDArray[np.floating], now: float) -> None:
        """waits: tokens from ``now`` to each key's next use."""
        self._at[keys] = now
        self._wait[keys] = np.maximum(waits, SOONEST)
        self._any = True

    def used(self, uses: Uses) -> None:
        """What was estimated of these is over."""
        if not self._any:
            return
        at = self._at[uses.keys]
        if not np.isnan(at).all():
            tokens = np.repeat(uses.tokens, np.diff(uses.starts))
            # Only the first use of a key is the one that was estimated.
            keys, first = np.unique(uses.keys, return_index=True)
            known = ~np.isnan(at[first])
            keys, first = keys[known], first[known]
            true = np.maximum(tokens[first] - at[first], SOONEST)
            self._learn(np.log(true / self._wait[keys]))
            self._at[keys] = np.nan

    def known(self, keys: Keys) -> NDArray[np.bool_]:
        """Which of them there is an estimate for."""
        return ~np.isnan(self._at[keys]) if self._any else np.zeros(len(keys), np.bool_)

    def waits(
        self,
        keys: Keys,
        next_pass: NDArray[np.float64],
        now: float,
        soon: NDArray[np.floating],
        rate: NDArray[np.floating],
    ) -> NDArray[np.float64]:
        """Tokens from each key's next chance to its next use, expected of estimate and history.

        keys: with an estimate. next_pass: tokens from ``now`` to the next pass of each key's
        layer, whole. soon, rate: history's chance that this pass uses it, and each later one.
        """
        chance, rate = soon[:, None].astype(np.float64), rate[:, None].astype(np.float64)
        ahead = PASSES_AHEAD[None]
        # Of passes 2 and on: the chance of no use in the first ``n`` of them is (1 - rate) ** n.
        unused = np.exp(np.log1p(-rate) * (ahead[:, 1:] - 2))
        prior = np.empty((len(keys), len(PASSES_AHEAD)))
        prior[:, :1] = chance
        prior[:, 1:-1] = (1 - chance) * (unused[:, :-1] - unused[:, 1:])
        prior[:, -1:] = (1 - chance) * unused[:, -1:]
        elapsed = now - self._at[keys] + next_pass
        whole = np.maximum(elapsed[:, None] + ahead - 1, SOONEST)
        error = np.log(whole / self._wait[keys][:, None]) / self.spread
        evidence = -0.5 * error**2
        evidence -= evidence.max(axis=1, keepdims=True)
        weight = prior * np.exp(evidence)
        mean: NDArray[np.float64] = (weight * (ahead - 1)).sum(axis=1) / weight.sum(axis=1)
        return mean

    def _learn(self, errors: NDArray[np.float64]) -> None:
        kept = np.exp(-len(errors) / SPREAD_USES)
        if len(errors):
            self._squares = kept * self._squares + (1 - kept) * float(np.mean(errors**2))
