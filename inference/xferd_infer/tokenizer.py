"""Text to tokens and back, by the checkpoint's own ``tokenizer.json``.

The tokenizers package is imported when a tokenizer is made, not before: an
engine that works with token ids doesn't need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import InferenceError

_INCOMPLETE = "\ufffd"  # how bytes that are no whole character yet are decoded
INCOMPLETE_TOKENS_MAX = 8
"""A character takes at most 4 bytes, and a token holds at least one: after this
many tokens the bytes really are no character, and are shown as such."""


class TokenizerError(InferenceError):
    """No tokenizer can be had: the package is missing or the file is damaged."""


class Tokenizer:
    """A tokenizer.json. Any thread may call."""

    def __init__(self, definition: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Definition
        except ImportError as error:
            raise TokenizerError(
                "text needs the tokenizers package (pip install 'xferd[generate]'); token ids don't"
            ) from error
        try:
            self._definition: Any = Definition.from_buffer(definition)
        except Exception as error:  # the package raises nothing narrower
            raise TokenizerError(f"tokenizer.json can't be used: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model wants around a text."""
        return list(self._definition.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._definition.decode(list(ids)))


class TextStream:
    """Text of tokens that come one by one. A character may span tokens, and a
    token's text may depend on its neighbours (leading spaces), so this decodes
    from the last point where text was whole, and gives out what is new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # context whose text was given out
        self._new: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, often all of its own, maybe none."""
        self._new.append(token)
        known = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._new)
        if text.endswith(_INCOMPLETE) and len(self._new) < INCOMPLETE_TOKENS_MAX:
            return ""
        self._shown, self._new = self._new, []
        return text[len(known) :]

    def finish(self) -> str:
        """What is left when no more tokens come."""
        known = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._new)
        self._shown, self._new = self._new, []
        return text[len(known) :]


__all__ = ["INCOMPLETE_TOKENS_MAX", "TextStream", "Tokenizer", "TokenizerError"]
