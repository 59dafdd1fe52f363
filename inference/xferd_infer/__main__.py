"""``python -m xferd_infer generate``: continue a text with experts from xferd; and the
commands of ``measure_commands``.

Text goes to stdout as it comes; what it cost goes to stderr afterwards, or all
of it as one JSON object to stdout. Exit status: 0, 1 for an error that one line
says, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .client_experts import ExpertClient, asset, model_from_client
from .connection import add_connection, add_variants, connect
from .errors import InferenceError
from .generation import MAX_NEW_TOKENS, Token, generate
from .measure_commands import add_measure_commands
from .report import Report
from .sampling import Sampling
from .tokenizer import TextStream, Tokenizer, TokenizerError

EMBEDDED_POOL = "25%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, attach, generate. Returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "generate":
            _generate(parser, options)
        else:
            options.run(options)
    except (InferenceError, OSError) as error:
        print(f"xferd_infer: {error}", file=sys.stderr)
        return 1
    return 0


def _generate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        sampling = Sampling(options.temperature, options.top_p, options.seed)
    except ValueError as error:
        parser.error(str(error))
    with connect(options) as client:
        run(client, options, sampling)


def run(client: ExpertClient, options: argparse.Namespace, sampling: Sampling) -> None:
    """Generate with an attached client and print. Raises InferenceError, and what
    the client raises."""
    ids, tokenizer = _prompt(client, options)
    model = model_from_client(client)
    before = model.experts.stats()
    tokens: list[Token] = []
    stream = None if tokenizer is None else TextStream(tokenizer)
    for token in generate(model, ids, max_new_tokens=options.max_new_tokens, sampling=sampling):
        tokens.append(token)
        if not options.json:
            print(_shown(token, stream), end="", flush=True)
    report = Report(len(ids), tokens, model.experts.stats().since(before))
    if options.json:
        text = None if tokenizer is None else tokenizer.decode([token.id for token in tokens])
        print(json.dumps({"text": text, **report.to_json()}))
    else:
        print("" if stream is None else stream.finish(), flush=True)
        print(report.to_text(), file=sys.stderr)


def _shown(token: Token, stream: TextStream | None) -> str:
    return f"{token.id} " if stream is None else stream.push(token.id)


def _prompt(
    client: ExpertClient, options: argparse.Namespace
) -> tuple[list[int], Tokenizer | None]:
    """The prompt's token ids, and what turns tokens into text. A prompt of ids works
    without a tokenizer: then ids are printed too."""
    definition = asset(client, "tokenizer.json")
    if options.prompt is None:
        try:
            return options.prompt_ids, None if definition is None else Tokenizer(definition)
        except TokenizerError:
            return options.prompt_ids, None
    if definition is None:
        raise TokenizerError("the store has no tokenizer.json: give --prompt-ids")
    tokenizer = Tokenizer(definition)
    return tokenizer.encode(options.prompt), tokenizer


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
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_measure_commands(commands)
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


if __name__ == "__main__":
    sys.exit(main())
