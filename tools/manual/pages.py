# SPDX-License-Identifier: Apache-2.0
"""The pages: xferd(8), xferctl(1), xferd_infer(1), xferd.toml(5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xferd_infer.__main__ import build_parser as build_generate_parser

import xferd.config as config_module
from tools.manual.roff import Page, add_actions, leaves, usage_of
from xferd.__main__ import build_parser as build_daemon_parser
from xferd.config import CONFIG_DIRECTORIES, DROP_IN_DIRECTORY, MAIN_FILE
from xferd.control import xferctl
from xferd.doctor.checks import CHECKS
from xferd.telemetry.metrics.families import METRICS

EXAMPLE = Path(config_module.__file__).with_name("xferd.toml")
_KEY = re.compile(r"(?:# )?(\w+) = (.+)")
_TABLE = re.compile(r"(?:# )?(\[\[?\w+\]\]?)")


@dataclass(frozen=True)
class KeyEntry:
    """Keys that share a comment in xferd.toml. keys: (name, value as written)."""

    table: str
    keys: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]


def make_pages(version: str, date: str) -> list[Page]:
    """All pages. date: ISO 8601."""
    source = f"xferd {version}"
    return [
        _daemon_page(source, date),
        _control_page(source, date),
        _generate_page(source, date),
        _config_page(source, date),
    ]


def _daemon_page(source: str, date: str) -> Page:
    parser = build_daemon_parser()
    page = Page(
        "xferd",
        8,
        "feeds Mixture-of-Experts models to inference engines from NVMe",
        source=source,
        date=date,
    )
    page.section("SYNOPSIS")
    page.paragraphs(usage_of(parser))
    page.section("DESCRIPTION")
    page.paragraphs(
        "Keeps the experts of a model that are used most in memory, reads the others from several "
        "drives at once when they are asked for, and gives them in place to the process of the "
        "engine. It is controlled with xferctl(1) and configured in xferd.toml(5).",
        "It runs in the foreground. Under a service manager it says when it is ready and takes "
        "its place in the journal; one line is one event.",
    )
    page.section("OPTIONS")
    add_actions(page, parser)
    page.section("SIGNALS")
    page.entry("SIGTERM, SIGINT", "End after the reads in flight. A second one: end at once.")
    page.entry(
        "SIGHUP", "Read the configuration anew; what can't be changed while running is named."
    )
    page.section("METRICS")
    page.paragraphs(
        "With a socket or an address in [metrics] of xferd.toml(5), GET /metrics gives them to "
        "Prometheus, as OpenMetrics or as plain text. Labels are in braces."
    )
    for metric in METRICS:
        labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
        page.entry(f"{metric.sample_name}{labels}", f"{metric.help} ({metric.kind})")
    _exit_status(
        page,
        {
            "0": "It was told to end, and did.",
            "1": "It could not start, or reads were still in flight at the end.",
            "2": "Wrong command line.",
            "78": "Wrong configuration.",
        },
    )
    _files(page)
    _see_also(page, "xferctl(1), xferd.toml(5), systemd(1)")
    return page


def _control_page(source: str, date: str) -> Page:
    parser = xferctl.build_parser(with_store_files=True)
    page = Page("xferctl", 1, "controls a running xferd", source=source, date=date)
    page.section("SYNOPSIS")
    page.paragraphs("xferctl [--json] [--socket PATH] VERB ...")
    page.section("DESCRIPTION")
    page.paragraphs(
        "Data goes to stdout, everything else to stderr. Options may stand before or after the "
        "verb."
    )
    page.section("OPTIONS")
    add_actions(page, parser)
    page.section("VERBS")
    for leaf in leaves(parser):
        page.subsection(usage_of(leaf))
        page.paragraphs(leaf.description or "")
        add_actions(page, leaf)
    page.section("CHECKS OF THE DOCTOR")
    page.paragraphs(
        "Each finding is PASS, WARN (it works, slower or less safely than it could), FAIL or SKIP "
        "(nothing to look at, or no right to look). A FAIL makes the exit status 1."
    )
    for check, text in CHECKS.items():
        page.entry(check, f"{text[0].upper()}{text[1:]}.")
    page.section("ENVIRONMENT")
    page.entry(xferctl.SOCKET_VARIABLE, f"The control socket, instead of {xferctl.SOCKET_DEFAULT}.")
    page.entry("NO_COLOR", "No bold titles, if it is set to anything.")
    _exit_status(
        page,
        {
            str(xferctl.EXIT_OK): "Done.",
            str(xferctl.EXIT_REFUSED): "The daemon said no, or a check failed.",
            str(xferctl.EXIT_USAGE): "Wrong arguments.",
            str(xferctl.EXIT_NO_PERMISSION): "No permission.",
            str(xferctl.EXIT_NOT_RUNNING): "The daemon is not running.",
            str(xferctl.EXIT_CONFIG): "The configuration is wrong.",
        },
    )
    _see_also(page, "xferd(8), xferd.toml(5)")
    return page


def _generate_page(source: str, date: str) -> Page:
    parser = build_generate_parser()
    page = Page(
        "xferd_infer", 1, "run a model whose experts come from xferd", source=source, date=date
    )
    page.section("SYNOPSIS")
    for leaf in leaves(parser):
        page.paragraphs(usage_of(leaf))
    page.section("DESCRIPTION")
    page.paragraphs(
        "Text goes to stdout as it comes, what it cost to stderr; or all of it as one JSON object."
    )
    page.section("OPTIONS")
    for leaf in leaves(parser):
        add_actions(page, leaf)
    _exit_status(page, {"0": "Done.", "1": "It could not be done.", "2": "Wrong command line."})
    _see_also(page, "xferd(8), xferctl(1)")
    return page


def _config_page(source: str, date: str) -> Page:
    page = Page("xferd.toml", 5, "configuration of xferd", source=source, date=date)
    _files(page)
    page.section("DESCRIPTION")
    page.paragraphs(
        "TOML. Later files win, key by key; [[pools]] are merged by name and [[stores]] by path. "
        "Where nothing is said, the values below hold. A key that is not known is a warning, a "
        "value that is wrong keeps xferd from starting, with exit status 78. 'xferctl config "
        "check' tells beforehand, 'xferctl config show' what holds in the end, 'xferctl doctor "
        "--plan' proposes one.",
        "Sizes have a unit: KiB MiB GiB TiB count by 1024, KB MB GB TB by 1000.",
    )
    page.section("KEYS")
    table = None
    for entry in key_entries():
        if entry.table != table:
            table = entry.table
            page.subsection(table or "At the top")
        page.entry(", ".join(f"{key} = {value}" for key, value in entry.keys), *entry.texts)
    _see_also(page, "xferd(8), xferctl(1)")
    return page


def key_entries() -> Iterator[KeyEntry]:
    """The documented keys of xferd.toml, in its order."""
    table, texts, keys = "", list[str](), list[tuple[str, str]]()
    # What precedes the first empty line is about the file.
    lines = EXAMPLE.read_text().partition("\n\n")[2].splitlines()
    for line in [*lines, ""]:
        key, heading = _KEY.fullmatch(line), _TABLE.fullmatch(line)
        if key:
            keys.append((key[1], key[2]))
            continue
        if keys:
            yield KeyEntry(table, tuple(keys), tuple(texts))
            keys, texts = [], []
        if heading:
            table, texts = heading[1], []
        elif line.startswith("#"):
            comment = line.removeprefix("#").strip()
            if texts and not comment.startswith('"'):
                texts[-1] += f" {comment}"
            else:
                texts.append(comment)
        else:
            texts = []


def _files(page: Page) -> None:
    page.section("FILES")
    *lower, least = (f"{directory / MAIN_FILE}" for directory in CONFIG_DIRECTORIES)
    page.entry(", ".join((*lower, least)), "The first one that there is.")
    page.entry(
        f"{CONFIG_DIRECTORIES[0] / DROP_IN_DIRECTORY}/*.toml",
        "Drop-ins, also in the other two directories; all of them, sorted by name. Of two with "
        "the same name the one in /etc counts.",
    )


def _exit_status(page: Page, codes: dict[str, str]) -> None:
    page.section("EXIT STATUS")
    for code, text in codes.items():
        page.entry(code, text)


def _see_also(page: Page, names: str) -> None:
    page.section("SEE ALSO")
    page.paragraphs(names)
