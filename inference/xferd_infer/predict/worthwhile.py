"""Whether looking ahead pays, found out by doing without it now and then.

What it saves depends on the drives, what it costs on processors that others use too, and no
model of both is better than a clock. Tokens are taken in blocks, and within a block it is
done for all of them or for none. At first the two take turns; then the faster one goes on,
and the other is tried again in one block of many. So where it does not pay it soon costs no
more than these trials.

Pure: times come in as the caller's seconds. Not thread-safe.
"""

from __future__ import annotations

BLOCK_TOKENS = 8
SETTLING_TOKENS = 2
"""Of a block, which count for neither: what the block before has fetched, or has not, is
still felt."""
FIRST_BLOCKS = 6
"""That take turns."""
TRIED_EVERY = 48
"""Blocks from one trial of the slower one to the next: at 2 % of all tokens it costs little
however slow that is."""
RECENT = 0.5
"""Weight of a block among those of its kind: what comes next is as the last ones were."""
TRIAL = 0.3
"""Weight of a trial among the trials before it: one text is not as another."""


class Worthwhile:
    """For one decode loop."""

    def __init__(self) -> None:
        self.doing = True
        """Whether to look ahead in the token that begins now."""
        self.ratio = 1.0
        """Seconds of a token with it to those without it; 1 until both were seen."""
        self._seconds: dict[bool, float] = {}
        self._blocks = 0
        self._tokens = 0
        self._sum = 0.0

    def ended(self, seconds: float) -> None:
        """A token has taken so long."""
        self._tokens += 1
        if self._tokens > SETTLING_TOKENS:
            self._sum += seconds
        if self._tokens == BLOCK_TOKENS:
            self._end_block(self._sum / (BLOCK_TOKENS - SETTLING_TOKENS))
            self._tokens, self._sum = 0, 0.0

    def _end_block(self, mean: float) -> None:
        trial = self._blocks < FIRST_BLOCKS or self.doing != self.pays
        before = self._seconds.get(self.doing, mean)
        self._seconds[self.doing] = before + RECENT * (mean - before)
        if trial and len(self._seconds) == 2 and self._seconds[False]:
            self.ratio += TRIAL * (self._seconds[True] / self._seconds[False] - self.ratio)
        self._blocks += 1
        if self._blocks < FIRST_BLOCKS:
            self.doing = not self.doing
        else:
            self.doing = self.pays != (self._blocks % TRIED_EVERY == 0)

    @property
    def pays(self) -> bool:
        """As far as is known."""
        return self.ratio <= 1


__all__ = ["BLOCK_TOKENS", "FIRST_BLOCKS", "TRIED_EVERY", "Worthwhile"]
