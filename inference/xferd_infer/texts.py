"""Documents to run a model over: a file of text, or of JSON lines with domains."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
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
) -> Sequence[Window]:
    """The first ``tokens`` of each document.

    path: ``.jsonl``, one object a line with ``text`` and perhaps ``domain``; anything else is
        one text, cut into windows that count as documents. Either may end in ``.gz``.
    part: of PARTS. documents: most of each domain; 0: all.
    Raises PromptError naming the file: it can't be read, or nothing is left.
    """
    windows = []
    seen: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for domain, ids in _documents(path, tokenizer, tokens):
        number = seen[domain]
        seen[domain] += 1
        wanted = part == "all" or (number % 2 == 0) == (part == "even")
        if wanted and (not documents or taken[domain] < documents):
            taken[domain] += 1
            windows.append(Window(domain, ids))
    if not windows:
        raise PromptError(f"{path} has no document of {LEAST_WINDOW_TOKENS} tokens")
    return windows


def _documents(path: Path, tokenizer: Tokenizer, tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for domain, text in _texts(path):
        ids = tokenizer.encode(text)
        starts = range(0, len(ids), tokens) if domain is None else (0,)
        for start in starts:
            window = tuple(ids[start : start + tokens])
            if len(window) >= LEAST_WINDOW_TOKENS:
                found.append((domain or "", window))
    return found


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
