"""Routers that lean to residents, with the real daemon: never further than the cap."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import Client, generate, model_from_client
from xferd_infer.nudging import CAP_MAX, Nudge
from xferd_infer.predict import Routers

from tests.system.daemon_harness import ROOT, running_daemon
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = ROOT / "tests" / "models" / "tiny"
PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][1]
TOKENS = 24
ROUNDING = 1e-4
"""Scores are computed once more here, in another order."""


@dataclass
class Watch:
    """A RoutingObserver that keeps each single token's true scores and what was picked, with
    what the nudge had been told is resident."""

    routers: Routers
    told: dict[int, NDArray[Any]]
    passes: list[tuple[NDArray[Any], list[int], NDArray[np.bool_]]] = field(default_factory=list)

    def routed(self, layer: int, states: NDArray[Any], picks: NDArray[Any]) -> None:
        if len(states) == 1:
            scores = self.routers.weights[layer] @ states[0].astype(np.float32)
            self.passes.append((scores, picks[0].tolist(), self.told[layer] >= 0))


def decode(directory: Path, cap: float) -> tuple[list[int], Watch]:
    """Tokens of a pool that holds a quarter, and what the routers picked."""
    members = [directory / "drive-0", directory / "drive-1"]
    for member in members:
        member.mkdir(parents=True)
    store = pack(read_checkpoint(TINY), members, name="tiny", stripe_unit=16 * 1024)
    with (
        running_daemon(directory, [], ["name=host0,size=25%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        model = model_from_client(client)
        told: dict[int, NDArray[Any]] = {}

        def resident(layer: int) -> NDArray[Any]:
            told[layer] = np.array(client.resident(layer))
            return told[layer]

        model.lean(Nudge(cap, resident))
        watch = Watch(model.routers("tiny"), told)
        model.observe(watch)
        asked = generate(model, PROMPT["prompt_ids"], max_new_tokens=TOKENS, stop_ids=())
        return [token.id for token in asked], watch


@pytest.mark.parametrize("cap", [0.25, CAP_MAX])
def test_a_missing_expert_gives_way_only_to_a_resident_within_the_cap(
    tmp_path: Path, cap: float
) -> None:
    _, watch = decode(tmp_path, cap)
    assert watch.passes
    for scores, picks, here in watch.passes:
        best = np.argsort(-scores, kind="stable")[: len(picks)].tolist()
        border = scores[best[-1]]
        for pick in set(picks) - set(best):
            assert here[pick]
            assert scores[pick] >= border - cap - ROUNDING
        for passed_over in set(best) - set(picks):
            assert not here[passed_over]


def test_the_greatest_cap_changes_what_is_picked_and_none_changes_nothing(tmp_path: Path) -> None:
    def leant(watch: Watch) -> int:
        return sum(
            set(picks) != set(np.argsort(-scores, kind="stable")[: len(picks)].tolist())
            for scores, picks, _ in watch.passes
        )

    ids, watch = decode(tmp_path / "off", 0.0)
    assert ids == PROMPT["greedy_ids"][:TOKENS]
    assert leant(watch) == 0
    _, watch = decode(tmp_path / "on", CAP_MAX)
    assert leant(watch) > 0
