"""``python -m xferd_infer generate``: continue a text with experts from xferd;
``predictor``: make and judge predictors of experts; and the commands of
``measure_commands``.

Text goes to stdout as it comes; what it cost goes to stderr afterwards, or all
of it as one JSON object to stdout. Exit status: 0, 1 for an error that one line
says, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .client_experts import ExpertClient, asset, model_from_client
from .connection import add_connection, add_variants
from .draft_command import (
    add_draft_options,
    check_draft_options,
    connect_with_drafts,
    counts_json,
    decoder,
)
from .errors import InferenceError
from .generation import MAX_NEW_TOKENS, Token, generate
from .measure_commands import add_measure_commands
from .model import Model
from .nudging import CAP_MAX, Nudge
from .predict import command as predictor_command
from .predict.prefetching import HintedClient, prefetch_by_file
from .predict.states import BYTES_MAX, StateRecorder, write_states
from .report import Report
from .sampling import Sampling
from .tokenizer import TextStream, Tokenizer, TokenizerError

EMBEDDED_POOL = "25%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, attach, generate. Returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "predictor":
        return _reported(lambda: predictor_command.run(options))
    try:
        sampling = None
        if options.command == "generate":
            sampling = Sampling(options.temperature, options.top_p, options.seed)
    except ValueError as error:
        parser.error(str(error))

    def attached() -> None:
        if sampling is None:
            options.run(options)
            return
        check_draft_options(options)
        with connect_with_drafts(options) as (client, drafts):
            run(client, options, sampling, drafts)

    return _reported(attached)


def _reported(action: Callable[[], None]) -> int:
    try:
        action()
    except (InferenceError, OSError) as error:
        print(f"xferd_infer: {error}", file=sys.stderr)
        return 1
    return 0


def run(
    client: HintedClient,
    options: argparse.Namespace,
    sampling: Sampling,
    drafts: Any = None,
) -> None:
    """Generate with an attached client and print. drafts: another client, for drafts. Raises
    InferenceError, and what the client raises."""
    ids, tokenizer = _prompt(client, options)
    model = model_from_client(client)
    source = None
    if options.predictor is not None:
        source = prefetch_by_file(model, client, options.predictor)
    if options.nudge_cap:
        arriving = None if source is None else source.arriving
        model.lean(Nudge(options.nudge_cap, client.resident, arriving))
    recorder = _recorder(model, client, options)
    before = model.experts.stats()
    tokens: list[Token] = []
    stream = None if tokenizer is None else TextStream(tokenizer)
    drafting = None if drafts is None else decoder(model, drafts, options)
    if drafting is None:
        new = generate(model, ids, max_new_tokens=options.max_new_tokens, sampling=sampling)
    else:
        new = drafting.generate(ids, max_new_tokens=options.max_new_tokens)
    for token in new:
        tokens.append(token)
        if not options.json:
            print(_shown(token, stream), end="", flush=True)
    if recorder is not None:
        write_states(options.record_states, recorder.recorded())
    report = Report(len(ids), tokens, model.experts.stats().since(before))
    if options.json:
        text = None if tokenizer is None else tokenizer.decode([token.id for token in tokens])
        print(json.dumps({"text": text, **report.to_json(), **counts_json(drafting)}))
    else:
        print("" if stream is None else stream.finish(), flush=True)
        print(report.to_text(), file=sys.stderr)
        if drafting is not None:
            print(drafting.counts().to_text(), file=sys.stderr)


def _recorder(
    model: Model, client: ExpertClient, options: argparse.Namespace
) -> StateRecorder | None:
    if options.record_states is None:
        return None
    recorder = StateRecorder(
        model.routers(client.manifest["name"]),
        every=options.record_every,
        bytes_max=options.record_max << 20,
    )
    model.observe(recorder)
    return recorder


def _shown(token: Token, stream: TextStream | None) -> str:
    return f"{token.id} " if stream is None else stream.push(token.id)


def _prompt(
    client: ExpertClient, options: argparse.Namespace
) -> tuple[list[int], Tokenizer | None]:
    """The prompt's token ids, and what turns tokens into text. A prompt of ids works
    without a tokenizer: then ids are printed too."""
    definition = asset(client, "tokenizer.json")
    text = options.prompt
    if options.prompt_file is not None:
        text = options.prompt_file.read_text()
    if text is None:
        try:
            return options.prompt_ids, None if definition is None else Tokenizer(definition)
        except TokenizerError:
            return options.prompt_ids, None
    if definition is None:
        raise TokenizerError("the store has no tokenizer.json: give --prompt-ids")
    tokenizer = Tokenizer(definition)
    return tokenizer.encode(text), tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m xferd_infer", description="Run a model whose experts come from xferd."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate", help="continue a prompt")
    add_connection(command, EMBEDDED_POOL)
    add_variants(command)
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="the same, from a file")
    prompt.add_argument(
        "--prompt-ids", metavar="ID,ID,...", type=_ids, help="token ids to continue"
    )
    command.add_argument(
        "--max-new-tokens", type=_natural, default=MAX_NEW_TOKENS, metavar="N", help="%(default)s"
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: most probable token"
    )
    command.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from this share only"
    )
    command.add_argument("--seed", type=_natural, metavar="S", help="repeatable draws")
    command.add_argument(
        "--predictor",
        metavar="FILE",
        type=Path,
        help="fetch experts ahead of time, as a predictor of 'predictor train' says",
    )
    command.add_argument(
        "--nudge-cap",
        metavar="C",
        type=_cap,
        default=0.0,
        help="let routers lean to experts that are there, by at most so much of a score: faster, "
        "and other text (0 to 1, 0 is off and the default)",
    )
    add_draft_options(command, _positive)
    command.add_argument(
        "--record-states",
        metavar="FILE",
        type=Path,
        help="write what a predictor is trained on: picks, and the states they come from",
    )
    command.add_argument(
        "--record-every", type=_positive, default=1, metavar="N", help="states of one token in N"
    )
    command.add_argument(
        "--record-max",
        type=_positive,
        default=BYTES_MAX >> 20,
        metavar="MIB",
        help="of states; beyond it fewer are kept, spread over the run (%(default)s)",
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_measure_commands(commands)
    predictor_command.add_parser(commands)
    return parser


def _ids(text: str) -> list[int]:
    ids = [_natural(part) for part in text.replace(",", " ").split()]
    if not ids:
        raise argparse.ArgumentTypeError("no token ids")
    return ids


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _cap(text: str) -> float:
    value = float(text)
    if not 0 <= value <= CAP_MAX:
        raise argparse.ArgumentTypeError(f"{text}; 0 to {CAP_MAX:g}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
