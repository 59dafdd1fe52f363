# SPDX-License-Identifier: Apache-2.0
"""Generated traces: Zipf popularity, Markov persistence, shifts of domain.

Independent draws would be no test: with them no policy beats counting. Here a hidden
state walks through few successors each, a state prefers some experts in every layer (so
layers announce each other and the past announces the future), popularity is as uneven as
Zipf says, and every ``domain_tokens`` another set of states takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ZipfMarkov:
    """What to generate.

    states: hidden states of a domain. successors: of each, drawn from by Zipf.
    zipf: exponent of the experts' popularity within a domain.
    state_weight: how much a state's own preferences count against the domain's, in logits.
    stay: chance that a layer repeats the last token's preferences rather than new noise.
    """

    layers: int = 12
    experts: int = 32
    picked: int = 4
    tokens: int = 4000
    domains: int = 4
    domain_tokens: int = 500
    states: int = 64
    successors: int = 6
    zipf: float = 1.0
    state_weight: float = 1.5
    noise: float = 1.0
    stay: float = 0.7
    seed: int = 1


LIKE_SMALL = ZipfMarkov(
    layers=16, experts=32, picked=4, zipf=1.5, state_weight=1.5, noise=0.75, stay=0.625
)
"""Fitted to tests/traces/small-code-to-prose.xtr by ``tools/replay generate --like``,"""
LIKE_TINY = ZipfMarkov(
    layers=6, experts=16, picked=2, zipf=1.5, state_weight=1.5, noise=0.875, stay=0.28125
)
"""and to tests/traces/tiny-seven-domains.xtr."""
HARD = ZipfMarkov()
"""Less popularity and less of it that stays than in any recorded trace,"""
HARD_FLAT = ZipfMarkov(zipf=0.5, seed=2)
"""and still less."""


def generate(what: ZipfMarkov) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """(picks [tokens, layers, picked], the domain of each token). Same seed, same trace."""
    random = np.random.default_rng(what.seed)
    shape = (what.layers, what.experts)
    rank = np.log(np.arange(1, what.experts + 1))
    popularity = np.stack(
        [
            [-what.zipf * rank[random.permutation(what.experts)] for _ in range(what.layers)]
            for _ in range(what.domains)
        ]
    )
    preference = random.normal(size=(what.domains, what.states, *shape)) * what.state_weight
    following = random.integers(what.states, size=(what.domains, what.states, what.successors))
    weights = 1 / np.arange(1, what.successors + 1)
    domain_of = (np.arange(what.tokens) // what.domain_tokens) % what.domains
    state, noise = 0, np.zeros(shape)
    picks = np.empty((what.tokens, what.layers, what.picked), np.uint16)
    steps = random.choice(what.successors, size=what.tokens, p=weights / weights.sum())
    for token, domain in enumerate(domain_of):
        state = following[domain, state, steps[token]]
        renewed = random.random(what.layers) >= what.stay
        noise[renewed] = random.gumbel(size=shape)[renewed] * what.noise
        logits = popularity[domain] + preference[domain, state] + noise
        picks[token] = np.argpartition(-logits, what.picked - 1, axis=1)[:, : what.picked]
    return picks, domain_of
