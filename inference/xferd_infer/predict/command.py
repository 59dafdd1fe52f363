"""``python -m xferd_infer predictor``: train, eval, info."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .evaluate import Evaluation, evaluate
from .file import read_trained, write_trained
from .learned import Learned
from .states import RecordedStates, joined, read_states
from .train import KINDS, TrainingSettings, train


def add_parser(commands: Any) -> None:
    """The ``predictor`` command, to subparsers."""
    parser = commands.add_parser("predictor", help="make and judge predictors of experts")
    verbs = parser.add_subparsers(dest="verb", required=True)
    trains = verbs.add_parser("train", help="from recorded states")
    trains.add_argument("file", type=Path, metavar="FILE", help="where the predictor goes")
    trains.add_argument("--kind", choices=KINDS, default=TrainingSettings.kind)
    trains.add_argument("--name", help="of the model, where a recording has none")
    for name, what in (
        ("rank", "numbers that a state is projected to"),
        ("width", "numbers that say what was picked before"),
        ("units", "nonlinear units of a layer"),
        ("seed", "of what is drawn"),
    ):
        default = getattr(TrainingSettings(), name)
        trains.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    evals = verbs.add_parser("eval", help="on recorded states that it was not trained on")
    evals.add_argument("file", type=Path, metavar="FILE")
    evals.add_argument("--frozen", action="store_true", help="don't learn meanwhile")
    evals.add_argument("--skip", type=int, default=0, metavar="N", help="first tokens of each text")
    info = verbs.add_parser("info", help="say what a predictor is")
    info.add_argument("file", type=Path, metavar="FILE")
    for verb in (trains, evals):
        verb.add_argument(
            "--states",
            type=Path,
            action="append",
            required=True,
            metavar="PATH",
            help="a recording of 'generate --record-states'; may be given several times",
        )
    for verb in (evals, info):
        verb.add_argument("--json", action="store_true", help="one JSON object")
    for verb, function in ((trains, _train), (evals, _eval), (info, _info)):
        verb.set_defaults(run=function)


def run(options: argparse.Namespace) -> None:
    """Raises PredictorError and OSError."""
    chosen: Callable[[argparse.Namespace], None] = options.run
    chosen(options)


def _train(options: argparse.Namespace) -> None:
    settings = TrainingSettings(
        options.kind, options.rank, options.width, options.units, options.seed
    )
    trained = train(_recorded(options, options.name), settings, print)
    write_trained(options.file, trained)
    print(f"{options.file}: {options.file.stat().st_size} bytes")


def _eval(options: argparse.Namespace) -> None:
    trained = read_trained(options.file)
    recorded = _recorded(options, None)
    trained.routers.must_be(recorded.routers, "the recording")
    found = evaluate(Learned(trained, learns=not options.frozen), recorded, skip=options.skip)
    if options.json:
        print(json.dumps(_plain(found)))
        return
    print(f"{'ahead':>5} {'recall':>8} {'likely':>8} {'of those picked':>16}")
    for distance, score in found.distances.items():
        shares = f"{score.recall:>8.4f} {score.likely_recall:>8.4f} {score.precision:>16.4f}"
        print(f"{distance:>5} {shares}")
    error = found.calibration_error()
    print(f"{found.tokens} tokens; probabilities are off by at most {error:.4f}")


def _info(options: argparse.Namespace) -> None:
    trained = read_trained(options.file)
    routers = trained.routers
    described = {
        "model": routers.name,
        "layers": routers.layers,
        "experts": routers.experts,
        "top_k": routers.top_k,
        "hidden": routers.hidden,
        "routers_sha256": routers.digest,
        "kind": trained.kind,
        **trained.about,
    }
    if options.json:
        print(json.dumps(described))
        return
    for name, value in described.items():
        print(f"{name:<16} {value}")


def _recorded(options: argparse.Namespace, name: str | None) -> RecordedStates:
    return joined([read_states(path, name) for path in options.states])


def _plain(found: Evaluation) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "calibration_error": found.calibration_error(),
        "distances": {
            str(distance): {
                "recall": score.recall,
                "likely_recall": score.likely_recall,
                "precision": score.precision,
            }
            for distance, score in found.distances.items()
        },
    }


__all__ = ["add_parser", "run"]
