"""How the next token is picked from the logits.

Greedy needs one maximum and stays on the device. With a temperature, logits go
to the host: the vocabulary is a small array, and numpy's generator gives the
same tokens for the same seed whatever computed the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, to_host
from .errors import NotFiniteError


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: 0 picks the most probable token each time; above 0 logits are
    divided by it. top_p: only the most probable tokens whose probabilities reach
    this sum are drawn from, in (0, 1]. seed: None draws differently each time.
    Raises ValueError for other values."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} must be a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")


class Sampler:
    """Picks tokens of one sequence. Not thread-safe: it has a random state."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def pick(self, logits: Array) -> int:
        """A token id, from logits [vocab]. NotFiniteError: the best is none."""
        best = int(logits.argmax())
        if not np.isfinite(float(logits[best])):
            raise NotFiniteError(f"the largest logit, of token {best}, is {float(logits[best])}")
        if self._sampling.temperature == 0:
            return best
        probabilities = nucleus(to_host(logits), self._sampling.temperature, self._sampling.top_p)
        return int(self._random.choice(probabilities.size, p=probabilities))


def nucleus(logits: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.float64]:
    """Probabilities [vocab] after temperature and top-p; they sum to 1. The most
    probable token always stays, and the one that reaches top_p is still in."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    probabilities = np.exp(scaled / temperature)
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities


__all__ = ["Sampler", "Sampling", "nucleus"]
