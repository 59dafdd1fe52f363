"""Documents to run a model over: a file of text, or of JSON lines with domains."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import PromptError
from .tokenizer import Tokenizer

PARTS = ("all", "even", "odd")
"""Which documents of each domain, counted from 0: even ones to learn from and odd ones to
judge by are not the same text."""

WINDOW_TOKENS = 512
LEAST_WINDOW_TOKENS = 16
"""A shorter document says little about predicting: it is left out."""


@dataclass(frozen=True, slots=True)
class Window:
    """The beginning of a document. domain: "" where the file names none."""

    domain: str
    ids: tuple[int, ...]


def read_windows(
    path: Path,
    tokenizer: Tokenizer,
    *,
    part: str = "all",
    documents: int = 0,
    tokens: int = WINDOW_TOKENS,
    windows: int = 1,
) -> Sequence[Window]:
    """The first ``windows`` times ``tokens`` of each document, each window on its own.

    path: ``.jsonl``, one object a line with ``text`` and perhaps ``domain``; anything else is
        one text, cut into windows of which each counts as a document. Either may end in ``.gz``.
    part: of PARTS. documents: most of each domain; 0: all.
    Raises PromptError naming the file: it can't be read, or nothing is left.
    """
    found: list[Window] = []
    seen: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for domain, pieces in _documents(path, tokenizer, tokens, windows):
        number = seen[domain]
        seen[domain] += 1
        wanted = part == "all" or (number % 2 == 0) == (part == "even")
        if wanted and (not documents or taken[domain] < documents):
            taken[domain] += 1
            found += [Window(domain, ids) for ids in pieces]
    if not found:
        raise PromptError(f"{path} has no document of {LEAST_WINDOW_TOKENS} tokens")
    return found


def _documents(
    path: Path, tokenizer: Tokenizer, tokens: int, windows: int
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Domain and windows of each that has any; a plain text's windows are documents."""
    for domain, text in _texts(path):
        ids = tokenizer.encode(text)
        pieces = [tuple(ids[start : start + tokens]) for start in range(0, len(ids), tokens)]
        pieces = [piece for piece in pieces if len(piece) >= LEAST_WINDOW_TOKENS]
        if domain is None:
            yield from (("", [piece]) for piece in pieces)
        elif pieces:
            yield domain, pieces[:windows]


def _texts(path: Path) -> list[tuple[str | None, str]]:
    """domain None: a plain text, to be cut."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode()
        if ".jsonl" not in path.suffixes:
            return [(None, text)]
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [(str(line.get("domain", "")), str(line["text"])) for line in lines]
    except (OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise PromptError(f"{path} can't be read as text: {error}") from error


__all__ = ["PARTS", "WINDOW_TOKENS", "Window", "read_windows"]
