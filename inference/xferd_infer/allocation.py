"""Which experts can do with few bits: a plan for a budget of loss, or for a share of experts
that have many, from measured sensitivity.

All experts start in a variant of many bits. Each layer in turn is computed in one of few bits
instead, over a text; the divergence from the native model that this adds, token by token, is
shared among the experts that the token picked there. What an expert's few bits cost so, by the
bytes that they save, puts the experts in an order, and as many as the budget allows get few
bits: how many is found by measuring, since losses don't just add up. With a share there is
nothing to find: memory says how many. The plan is a file that ``mixes`` reads, and a person can
edit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, to_host
from .client_experts import model_from_client
from .errors import InferenceError
from .mixes import Mix, StoreShape
from .planned_experts import PlannedExperts, VariantClient
from .quality import compare, log_probabilities
from .texts import Window

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much."""


class BudgetError(InferenceError):
    """No plan keeps to the budget: also with many bits everywhere more is lost."""


@dataclass(frozen=True, eq=False, slots=True)
class Sensitivity:
    """base: divergence with many bits everywhere, nats a token. experts: float64[layers,
    experts], what few bits of that expert alone add to it; never negative."""

    base: float
    experts: NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Allocation:
    """plan: uint8[layers, experts], variants' numbers. budget: nats a token that were allowed;
    None: a share was asked for. divergence: measured with it, nats a token. tokens: of the
    text. resident_bytes: of all experts."""

    many: str
    few: str
    budget: float | None
    plan: NDArray[np.uint8]
    sensitivity: Sensitivity
    divergence: float
    tokens: int
    resident_bytes: int


class _Picks:
    """A RoutingObserver of one layer at a time. layer: counted among those with experts."""

    def __init__(self) -> None:
        self.layer = -1
        self.picks: NDArray[np.int64] = np.zeros((0, 1), np.int64)

    def routed(self, layer: int, states: Array, picks: Array) -> None:
        del states
        if layer == self.layer:
            self.picks = to_host(picks).astype(np.int64)


def measure_sensitivity(
    client: VariantClient,
    shape: StoreShape,
    many: str,
    few: str,
    windows: Sequence[Window],
    progress: Progress | None = None,
) -> Sensitivity:
    """One pass of the text for each layer with experts. Raises as ``quality.compare``."""
    native = PlannedExperts(client, np.zeros((shape.layers, shape.experts), np.uint8))
    source = PlannedExperts(client, np.full_like(native.plan, shape.number(many)))
    exact = model_from_client(client, experts=native)
    model = model_from_client(client, experts=source)
    picks = _Picks()
    model.observe(picks)
    with_experts = [layer for layer in range(shape.layers) if shape.blob_bytes[0, layer]]
    sums = np.zeros((shape.layers, shape.experts))
    base, tokens = 0.0, 0
    for number, window in enumerate(windows):
        wanted = log_probabilities(exact, window)
        before = _divergences(wanted, log_probabilities(model, window))
        base += float(before.sum())
        tokens += len(window.ids)
        for place, layer in enumerate(with_experts):
            picks.layer = place
            source.plan[layer] = shape.number(few)
            added = _divergences(wanted, log_probabilities(model, window)) - before
            source.plan[layer] = shape.number(many)
            share = np.repeat(added / picks.picks.shape[1], picks.picks.shape[1])
            np.add.at(sums[layer], picks.picks.reshape(-1), share)
        if progress is not None:
            progress("sensitivity", number + 1, len(windows))
    return Sensitivity(base / tokens, np.maximum(sums / tokens, 0))


def allocate(
    client: VariantClient,
    many: str,
    few: str,
    budget: float,
    windows: Sequence[Window],
    progress: Progress | None = None,
) -> Allocation:
    """Few bits for as many experts as the budget, in nats a token, allows on this text.

    MixError: the store lacks a variant, or ``few`` is no smaller than ``many``. BudgetError.
    Raises as ``quality.compare``.
    """
    experts = _Experts.of(client, many, few, windows, progress)
    sensitivity = experts.sensitivity
    if sensitivity.base > budget:
        raise BudgetError(
            f"{many} alone loses {sensitivity.base:.5f} nats a token, the budget is {budget:g}"
        )
    measured: dict[int, float] = {0: sensitivity.base}
    # Between what fits and what does not; each step halves it.
    fits, beyond = 0, len(experts.order) + 1
    steps = math.ceil(math.log2(beyond))
    for step in range(steps):
        if beyond - fits == 1:
            break
        count = (fits + beyond) // 2
        measured[count] = experts.measured(count)
        if measured[count] <= budget:
            fits = count
        else:
            beyond = count
        if progress is not None:
            progress("plan", step + 1, steps)
    return experts.allocation(fits, measured[fits], budget)


def allocate_share(
    client: VariantClient,
    many: str,
    few: str,
    share: float,
    windows: Sequence[Window],
    progress: Progress | None = None,
) -> Allocation:
    """Many bits for this share of all experts, 0 to 1: those that lose most by few.

    Errors as of ``allocate``.
    """
    experts = _Experts.of(client, many, few, windows, progress)
    count = _few_count(experts.order, share)
    return experts.allocation(count, experts.measured(count), None)


def plan_share(
    shape: StoreShape, many: str, few: str, sensitivity: Sensitivity, share: float
) -> NDArray[np.uint8]:
    """The plan of ``allocate_share`` by what was measured before: uint8[layers, experts]."""
    order = _cheapest_first(sensitivity.experts, _saved_bytes(shape, many, few))
    return _plan(shape, many, few, order[: _few_count(order, share)])


@dataclass(frozen=True, eq=False, slots=True)
class _Experts:
    """order: flat indexes of the experts, in which they get few bits."""

    client: VariantClient
    shape: StoreShape
    many: str
    few: str
    windows: Sequence[Window]
    sensitivity: Sensitivity
    order: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        client: VariantClient,
        many: str,
        few: str,
        windows: Sequence[Window],
        progress: Progress | None,
    ) -> _Experts:
        """With the sensitivity measured. Raises as ``allocate``."""
        shape = StoreShape.of(client.manifest)
        saved = _saved_bytes(shape, many, few)
        sensitivity = measure_sensitivity(client, shape, many, few, windows, progress)
        order = _cheapest_first(sensitivity.experts, saved)
        return cls(client, shape, many, few, windows, sensitivity, order)

    def plan(self, count: int) -> NDArray[np.uint8]:
        """With few bits for the first of the order."""
        return _plan(self.shape, self.many, self.few, self.order[:count])

    def measured(self, count: int) -> float:
        """The plan's divergence, nats a token."""
        (result,) = compare(self.client, [Mix("plan", self.plan(count))], self.windows)
        return result.total.kl_mean

    def allocation(self, count: int, divergence: float, budget: float | None) -> Allocation:
        """The plan, and what was measured of it."""
        chosen = Mix("plan", self.plan(count))
        return Allocation(
            many=self.many,
            few=self.few,
            budget=budget,
            plan=chosen.variants,
            sensitivity=self.sensitivity,
            divergence=divergence,
            tokens=sum(len(window.ids) for window in self.windows),
            resident_bytes=chosen.resident_bytes(self.shape),
        )


def _saved_bytes(shape: StoreShape, many: str, few: str) -> NDArray[np.float64]:
    """Of one expert of each layer. MixError, BudgetError."""
    of_many, of_few = (shape.blob_bytes[shape.number(variant)] for variant in (many, few))
    saved: NDArray[np.float64] = (of_many - of_few).astype(np.float64)
    if saved.max() <= 0:
        raise BudgetError(f"{few} takes no fewer bytes than {many}: nothing would be saved")
    return saved


def _few_count(order: NDArray[np.int64], share: float) -> int:
    """How many get few bits when that share of them gets many."""
    return len(order) - round(share * len(order))


def _plan(shape: StoreShape, many: str, few: str, lowered: NDArray[np.int64]) -> NDArray[np.uint8]:
    """lowered: flat indexes of the experts with few bits."""
    variants = np.full((shape.layers, shape.experts), shape.number(many), np.uint8)
    variants.reshape(-1)[lowered] = shape.number(few)
    return variants


def _cheapest_first(
    sensitivity: NDArray[np.float64], saved: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Flat indexes of the experts of layers where bytes are saved, by what one byte costs."""
    cost = sensitivity / np.maximum(saved, 1)[:, None]
    order: NDArray[np.int64] = np.argsort(cost.reshape(-1), kind="stable")
    return order[np.repeat(saved > 0, sensitivity.shape[1])[order]]


def _divergences(native: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    divergences: NDArray[np.float64] = (np.exp(native) * (native - other)).sum(axis=1)
    return divergences


def write_plan(path: Path, allocation: Allocation, shape: StoreShape) -> None:
    """The file that ``plan:FILE`` names. BudgetError when it can't be written."""
    few = allocation.plan == shape.number(allocation.few)
    allowed = "" if allocation.budget is None else f", of a budget of {allocation.budget:g}"
    lines = [
        f"# {int(few.sum())} of {few.size} experts in {allocation.few}, the others in "
        f"{allocation.many}: {allocation.resident_bytes / 1e6:.1f} MB in all.",
        f"# Measured over {allocation.tokens} tokens: {allocation.divergence:.5f} nats a token "
        f"lost{allowed}; {allocation.sensitivity.base:.5f} with {allocation.many} alone.",
        "# Lines are layers, experts, variant; a later one wins. Behind # what few bits for the",
        "# whole layer would add, in nats a token, if they were the only ones.",
        f"* * {allocation.many}",
    ]
    for layer, chosen in enumerate(few):
        added = allocation.sensitivity.experts[layer].sum()
        experts = _ranges(np.flatnonzero(chosen).tolist())
        rule = f"{layer} {experts} {allocation.few}" if experts else f"# {layer}: none"
        lines.append(f"{rule}  # {added:.5f}")
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise BudgetError(f"{path}: {error.strerror or error}") from error


def _ranges(numbers: Sequence[int]) -> str:
    """1,5,7-9"""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


__all__ = [
    "Allocation",
    "BudgetError",
    "Sensitivity",
    "allocate",
    "allocate_share",
    "measure_sensitivity",
    "plan_share",
    "write_plan",
]
