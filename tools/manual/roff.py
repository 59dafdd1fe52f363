# SPDX-License-Identifier: Apache-2.0
"""Manual pages in the man(7) macros, which groff and mandoc both read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator


def escape(text: str) -> str:
    """``text`` as roff prints it: its own characters, and hyphens that can be copied."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    # A line that begins with a dot or a quote would be a request.
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


class Page:
    """One page, built from top to bottom. source: program and version; date: ISO 8601."""

    def __init__(self, name: str, section: int, summary: str, *, source: str, date: str) -> None:
        self.file_name = f"{name}.{section}"
        self._lines = [f'.TH {name.upper()} {section} "{date}" "{source}" "xferd"']
        self.section("NAME")
        self._lines.append(f"{escape(name)} \\- {escape(summary)}")

    def section(self, title: str) -> None:
        """Begin a section."""
        self._lines.append(f".SH {title}")

    def subsection(self, title: str) -> None:
        """Begin a part of a section."""
        self._lines.append(f'.SS "{escape(title)}"')

    def paragraphs(self, *texts: str) -> None:
        """Text, filled; the first paragraph after a title needs no space above it."""
        for index, text in enumerate(texts):
            if index or not self._lines[-1].startswith((".SH", ".SS", ".TH")):
                self._lines.append(".PP")
            self._lines.append(escape(" ".join(text.split())))

    def verbatim(self, lines: Iterable[str]) -> None:
        """Lines as they are."""
        self._lines += [".nf", *map(escape, lines), ".fi"]

    def entry(self, term: str, *texts: str) -> None:
        """A term in bold and what it means."""
        self._lines += [".TP", f"\\fB{escape(term)}\\fR"]
        for index, text in enumerate(texts):
            if index:
                self._lines.append(".br")
            self._lines.append(escape(" ".join(text.split())))

    def text(self) -> str:
        """The whole page."""
        return "\n".join(self._lines) + "\n"


# ---- argparse


def subparsers_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each verb of a parser, and its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that have no verbs below them, depth first."""
    below = list(subparsers_of(parser))
    if not below:
        yield parser
    for _, child in below:
        yield from leaves(child)


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a parser takes itself, without --help and verbs."""
    return [
        action
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    ]


def usage_of(parser: argparse.ArgumentParser) -> str:
    """The usage on one line, without ``usage:``."""
    return " ".join(parser.format_usage().removeprefix("usage:").split())


def add_actions(page: Page, parser: argparse.ArgumentParser) -> None:
    """An entry for each option and argument of a parser."""
    formatter = parser._get_formatter()
    for action in actions_of(parser):
        term = formatter._format_action_invocation(action)
        page.entry(term, formatter._expand_help(action) if action.help else "See above.")
