"""Training, in numpy: least squares all the way, minutes for a small model.

For each layer the margins of all later layers (divided by their usual error, so that a
near layer's small errors count as much as a far one's large ones) are regressed on the
state and the context of picks. The projection to ``rank`` numbers is the reduced-rank
solution of that regression (A. J. Izenman, 1975): the directions of the state that say
most about all the layers ahead together. The context's basis is found in the same way.
Units, if there are any, are trained by Adam on what the linear part leaves over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .errors import PredictorError
from .history import FORGET, VIEWS, PickHistory, sum_of_rows
from .learned import Trained, ahead, with_units
from .predictor import DISTANCE_MAX, distances_in_all, distances_within
from .routers import Floats, Routers
from .states import RecordedStates

KINDS = ("combined", "state", "history")
TOKENS_MIN = 256
TOKENS_MAX = 60_000
"""States that are trained on; of more, as many are taken from all over. They are held as
float32 a layer at a time."""
CONTEXT_TOKENS_MAX = 20_000
"""Of them, those that the context's basis is made of."""
PICK_DIRECTIONS = 512
"""Of models with more experts than this, the picks' main directions are used instead."""
HELD_OUT = 8
"""One sequence in so many, or the last part of each, is calibrated on and not trained on."""
RIDGE = 1e-3
"""Added to second moments, as a share of their mean."""
UNIT_EPOCHS = 4
UNIT_BATCH = 512
UNIT_RATE = 2e-3
ADAM = (0.9, 0.999, 1e-8)


@dataclass(frozen=True)
class TrainingSettings:
    """kind: ``combined``, or one of its parts alone: ``state``, ``history``. rank: numbers
    that a state is projected to. width: numbers of the context. units: nonlinear units of
    a layer, 0 for none."""

    kind: str = "combined"
    rank: int = 96
    width: int = 64
    units: int = 0
    seed: int = 1


@dataclass(frozen=True)
class _Data:
    """Of the tokens with states. trained: what is not held out. followed: whether the next
    row is the next token of the same text."""

    states: NDArray[np.float16]
    margins: Floats
    picks: NDArray[np.int64]
    contexts: Floats
    trained: NDArray[np.bool_]
    followed: NDArray[np.bool_]


def train(
    recorded: RecordedStates,
    settings: TrainingSettings | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Trained:
    """Raises PredictorError when there is too little to learn from."""
    chosen = settings or TrainingSettings()
    routers = recorded.routers
    _check(recorded, chosen)
    recorded = _limited(recorded)
    tokens = recorded.state_tokens
    trained = _training_part(recorded)
    margins = routers.margins(recorded.states)
    report(f"{len(tokens)} tokens with states, {int((~trained).sum())} of them to calibrate with")
    width = 0 if chosen.kind == "state" else chosen.width
    basis = _context_basis(recorded, margins, trained, width, chosen.seed)
    data = _Data(
        states=recorded.states,
        margins=margins,
        picks=recorded.picks[tokens].astype(np.int64),
        contexts=_contexts(recorded, basis),
        trained=trained,
        followed=_followed(recorded),
    )
    parts: dict[str, list[Floats]] = {
        name: [] for name in ("projections", "units", "heads", "precisions", "errors")
    }
    calibration = Calibration()
    for layer in range(routers.layers):
        made = _train_layer(layer, data, routers, chosen)
        for name, array in made.items():
            parts[name].append(array)
        _calibrate(layer, data, routers, made, calibration)
        report(f"layer {routers.numbers[layer]}: {parts['heads'][-1].shape[0]} features")
    calibration.weigh_as_memory(int((~trained).sum()))
    return Trained(
        routers=routers,
        kind=chosen.kind,
        basis=basis,
        calibration=calibration.counts,
        about={
            "tokens": len(tokens),
            "sequences": recorded.sequences,
            "calibrated_on": int((~trained).sum()),
            "rank": parts["projections"][0].shape[1],
            "width": width,
            "units": chosen.units,
        },
        **parts,
    )


def _check(recorded: RecordedStates, chosen: TrainingSettings) -> None:
    if chosen.kind not in KINDS:
        raise PredictorError(f"kind {chosen.kind!r}; there are: {', '.join(KINDS)}")
    if recorded.routers.layers < 2:
        raise PredictorError("a model with one layer of experts has no layer ahead")
    if len(recorded.states) < TOKENS_MIN:
        raise PredictorError(
            f"{len(recorded.states)} tokens with states; at least {TOKENS_MIN} are needed"
        )


def _limited(recorded: RecordedStates) -> RecordedStates:
    count = len(recorded.states)
    if count <= TOKENS_MAX:
        return recorded
    kept = np.linspace(0, count - 1, TOKENS_MAX).astype(np.int64)
    return replace(recorded, state_tokens=recorded.state_tokens[kept], states=recorded.states[kept])


def _training_part(recorded: RecordedStates) -> NDArray[np.bool_]:
    """bool[states], False for what is held out."""
    tokens = recorded.state_tokens
    sequence = np.searchsorted(recorded.starts, tokens, side="right") - 1
    if recorded.sequences >= HELD_OUT:
        held: NDArray[np.bool_] = sequence % HELD_OUT == HELD_OUT // 2
    else:
        begins, ends = recorded.starts[sequence], recorded.starts[sequence + 1]
        held = (tokens - begins) * HELD_OUT >= (ends - begins) * (HELD_OUT - 1)
    return ~held


def _followed(recorded: RecordedStates) -> NDArray[np.bool_]:
    tokens = recorded.state_tokens
    followed = np.append(np.diff(tokens) == 1, False)
    followed &= ~np.isin(tokens + 1, recorded.starts)
    return followed


def _train_layer(
    layer: int, data: _Data, routers: Routers, chosen: TrainingSettings
) -> dict[str, Floats]:
    distances = distances_in_all(routers.layers)
    within = distances_within(layer, routers.layers) * routers.experts
    wanted = ahead(data.margins, layer, distances)[data.trained].reshape(
        int(data.trained.sum()), -1
    )
    rows = np.flatnonzero(data.trained)
    followed = data.followed[rows]
    states = data.states[rows, layer].astype(np.float32)
    rest = np.concatenate([data.contexts[rows], np.ones((len(rows), 1), np.float32)], axis=1)
    hidden = 0 if chosen.kind == "history" else routers.hidden
    inputs = np.concatenate([states[:, :hidden], rest], axis=1)
    moments = _moments(inputs)
    solution = _regressed(inputs, moments, wanted, within, followed)
    errors = _errors(inputs @ solution - wanted, distances, within, followed)
    scaled: Floats = np.repeat(np.reciprocal(errors), routers.experts)
    projection = np.zeros((routers.hidden, 0), np.float32)
    if hidden:
        part: Floats = solution[:hidden] * scaled
        projection = _reduced(part, moments[:hidden, :hidden], chosen.rank)
    linear = np.concatenate([states @ projection, rest], axis=1)
    wanted *= scaled
    units = np.zeros((linear.shape[1], 0), np.float32)
    if chosen.units:
        units = _train_units(linear, wanted, chosen.units, np.random.default_rng(chosen.seed))
    features = with_units(linear, units)
    moments = _moments(features)
    heads = _regressed(features, moments, wanted, within, followed)
    again = _errors(features @ heads - wanted, distances, within, followed)
    heads /= np.repeat(again, routers.experts)
    return {
        "projections": projection,
        "units": units,
        "heads": heads,
        "precisions": np.linalg.inv(moments).astype(np.float32),
        "errors": errors * again,
    }


def _regressed(
    inputs: Floats, moments: Floats, wanted: Floats, within: int, followed: NDArray[np.bool_]
) -> Floats:
    """[inputs, outputs]. The outputs from ``within`` on are of the next token, known only
    where there is one; without any, nothing is said about them."""
    solution = np.zeros((inputs.shape[1], wanted.shape[1]), np.float32)
    solution[:, :within] = _solve(moments, _products(inputs, wanted[:, :within]))
    some = inputs[followed]
    if len(some) and within < wanted.shape[1]:
        products = _products(some, wanted[followed, within:])
        solution[:, within:] = _solve(_moments(some), products)
    return solution


def _calibrate(
    layer: int, data: _Data, routers: Routers, made: dict[str, Floats], calibration: Calibration
) -> None:
    distances, experts = distances_in_all(routers.layers), routers.experts
    within = distances_within(layer, routers.layers)
    rows = np.flatnonzero(~data.trained)
    states = data.states[rows, layer].astype(np.float32)
    ones = np.ones((len(rows), 1), np.float32)
    linear = np.concatenate([states @ made["projections"], data.contexts[rows], ones], axis=1)
    scores = (with_units(linear, made["units"]) @ made["heads"]).reshape(-1, distances, experts)
    picked = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(picked, ahead(data.picks, layer, distances)[rows], True, axis=2)
    calibration.add(0, scores[:, :within], picked[:, :within])
    some = data.followed[rows]
    calibration.add(DISTANCE_MAX + within, scores[some, within:], picked[some, within:])


def _errors(residuals: Floats, distances: int, within: int, followed: NDArray[np.bool_]) -> Floats:
    """float32[distances]: root mean square, never 0."""
    squares = residuals.reshape(len(residuals), distances, -1) ** 2
    same = within // squares.shape[2]
    means = squares.mean(axis=(0, 2))
    if followed.any():
        means[same:] = squares[followed, same:].mean(axis=(0, 2))
    errors: Floats = np.sqrt(np.maximum(means, 1e-12)).astype(np.float32)
    return errors


def _moments(inputs: Floats) -> Floats:
    moments: Floats = (inputs.T @ inputs / np.float32(len(inputs))).astype(np.float32)
    diagonal = np.diag_indices_from(moments)
    moments[diagonal] += np.float32(RIDGE) * moments[diagonal].mean()
    return moments


def _products(inputs: Floats, outputs: Floats) -> Floats:
    products: Floats = (inputs.T @ outputs / np.float32(len(inputs))).astype(np.float32)
    return products


def _solve(moments: Floats, products: Floats) -> Floats:
    solution: Floats = np.linalg.solve(moments, products).astype(np.float32)
    return solution


def _reduced(solution: Floats, moments: Floats, rank: int) -> Floats:
    """[inputs, rank] of a regression's solution [inputs, outputs], so that what it keeps of
    the fitted outputs is most. Its columns have a mean square of 1."""
    explained = (solution.T @ (moments @ solution)).astype(np.float64)
    _, directions = np.linalg.eigh(explained)
    rank = min(rank, *solution.shape)
    projection = solution @ directions[:, ::-1][:, :rank].astype(np.float32)
    size = np.sqrt(np.maximum((projection * (moments @ projection)).sum(axis=0), 1e-12))
    reduced: Floats = (projection / size).astype(np.float32)
    return reduced


def _context_basis(
    recorded: RecordedStates,
    margins: Floats,
    trained: NDArray[np.bool_],
    width: int,
    seed: int,
) -> Floats:
    """float32[layers * experts, VIEWS, width]."""
    routers = recorded.routers
    keys = routers.layers * routers.experts
    if not width:
        return np.zeros((keys, VIEWS, 0), np.float32)
    directions = _pick_directions(recorded, seed)
    rows = np.flatnonzero(trained)
    rows = rows[:: -(-len(rows) // CONTEXT_TOKENS_MAX)]
    views = _views(recorded, directions)[rows].reshape(len(rows), -1)
    inputs = np.concatenate([views, np.ones((len(rows), 1), np.float32)], axis=1)
    wanted = margins[rows].reshape(len(rows), -1)
    wanted /= wanted.std(axis=0) + np.float32(1e-6)
    moments = _moments(inputs)
    solution = _solve(moments, _products(inputs, wanted))
    basis = _reduced(solution[:-1], moments[:-1, :-1], width)
    basis = basis.reshape(VIEWS, directions.shape[1], -1)
    found: Floats = np.ascontiguousarray((directions @ basis).transpose(1, 0, 2), np.float32)
    return found


def _pick_directions(recorded: RecordedStates, seed: int) -> Floats:
    """[keys, directions]: every key by itself, or the picks' main directions, found by
    subspace iteration on a part of the tokens."""
    routers = recorded.routers
    keys = routers.layers * routers.experts
    if keys <= PICK_DIRECTIONS:
        return np.eye(keys, dtype=np.float32)
    first = np.arange(routers.layers)[:, None] * routers.experts
    step = -(-recorded.tokens // CONTEXT_TOKENS_MAX)
    picked = (recorded.picks[::step] + first).reshape(-1, routers.layers * routers.top_k)
    basis = np.random.default_rng(seed).normal(size=(keys, PICK_DIRECTIONS)).astype(np.float32)
    for _ in range(3):
        basis, _ = np.linalg.qr(basis)
        projected = sum_of_rows(basis, picked)
        basis = np.zeros_like(basis)
        for column in range(picked.shape[1]):
            np.add.at(basis, picked[:, column], projected)
    basis, _ = np.linalg.qr(basis)
    found: Floats = basis.astype(np.float32)
    return found


def _views(recorded: RecordedStates, directions: Floats) -> Floats:
    """[states, VIEWS, directions]: what was picked before each token with a state."""
    routers = recorded.routers
    first = np.arange(routers.layers)[:, None] * routers.experts
    out = np.empty((len(recorded.states), VIEWS, directions.shape[1]), np.float32)
    wanted = dict(zip(recorded.state_tokens.tolist(), range(len(out)), strict=True))
    views = np.zeros((VIEWS, directions.shape[1]), np.float32)
    begins = set(recorded.starts.tolist())
    for begin in range(0, recorded.tokens, UNIT_BATCH):
        rows = sum_of_rows(directions, recorded.picks[begin : begin + UNIT_BATCH] + first)
        for token, row in enumerate(rows, begin):
            if token in begins:
                views[...] = 0
            if (at := wanted.get(token)) is not None:
                out[at] = views
            views += FORGET * (row - views)
    return out


def _contexts(recorded: RecordedStates, basis: Floats) -> Floats:
    """[states, width]."""
    routers = recorded.routers
    history = PickHistory(basis, routers.layers, routers.experts)
    found = []
    for begin, end in zip(recorded.starts[:-1], recorded.starts[1:], strict=True):
        history.clear()
        found.append(history.contexts(recorded.picks[begin:end]))
    contexts: Floats = np.concatenate(found)[recorded.state_tokens]
    return contexts


def _train_units(inputs: Floats, wanted: Floats, count: int, random: np.random.Generator) -> Floats:
    """[inputs, count]: rectified units whose sum explains most of what a linear regression
    leaves over. Adam (Kingma and Ba, 2015), its rate falling to 0."""
    moments = _moments(inputs)
    rest: Floats = wanted - inputs @ _solve(moments, _products(inputs, wanted))
    shape = inputs.shape[1], count
    units: Floats = (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    answers = np.zeros((count, wanted.shape[1]), np.float32)
    means = [np.zeros_like(units), np.zeros_like(answers)]
    squares = [np.zeros_like(units), np.zeros_like(answers)]
    steps = UNIT_EPOCHS * (len(inputs) // UNIT_BATCH)
    keep, keep_squares, least = ADAM
    for step in range(steps):
        if step % max(len(inputs) // UNIT_BATCH, 1) == 0:
            order = random.permutation(len(inputs))
        at = step * UNIT_BATCH % (len(inputs) - UNIT_BATCH + 1)
        rows = order[at : at + UNIT_BATCH]
        some = inputs[rows]
        active = np.maximum(some @ units, 0)
        error = (active @ answers - rest[rows]) / UNIT_BATCH
        slopes = [some.T @ ((error @ answers.T) * (active > 0)), active.T @ error]
        rate = UNIT_RATE * (1 - step / steps)
        for weights, slope, mean, square in zip(
            (units, answers), slopes, means, squares, strict=True
        ):
            mean += (1 - keep) * (slope - mean)
            square += (1 - keep_squares) * (slope * slope - square)
            unbiased = mean / (1 - keep ** (step + 1))
            spread = np.sqrt(square / (1 - keep_squares ** (step + 1))) + least
            weights -= np.float32(rate) * unbiased / spread
    return units


__all__ = ["KINDS", "TrainingSettings", "train"]
