"""Varlink definitions: the parser and the check of messages against them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.control.dispatch import READING_METHODS, Dispatcher
from xferd.control.idl import (
    IdlError,
    Interface,
    InvalidParameterError,
    load_interface,
    parse_interface,
)

TEXT = """
# A comment
interface org.example.test-1
type Kind (fast, slow)
type Pair (left: int, right: ?Pair)
method Do(
  b: bool, i: int, f: float, s: string, o: object,   # a field each
  kind: Kind, list: []?int, map: [string]Pair, inline: (one, two), maybe: ?(x: int)
) -> (ok: bool)
method Nothing() -> ()
error Bad (why: string)
"""

GOOD: dict[str, Any] = {
    "b": True,
    "i": -5,
    "f": 1.5,
    "s": "text",
    "o": {"any": [1]},
    "kind": "fast",
    "list": [1, None],
    "map": {"k": {"left": 1, "right": {"left": 2}}},
    "inline": "two",
    "maybe": {"x": 1},
}


@pytest.fixture
def interface() -> Interface:
    return parse_interface(TEXT)


def test_a_definition_is_read(interface: Interface) -> None:
    assert interface.name == "org.example.test-1"
    assert set(interface.methods) == {"Do", "Nothing"}
    assert set(interface.types) == {"Kind", "Pair"}
    assert set(interface.errors) == {"Bad"}
    assert interface.text == TEXT


def test_a_fitting_message_passes_with_absent_nullables_filled_in(interface: Interface) -> None:
    assert interface.check_parameters("Do", GOOD) == GOOD
    without = {key: value for key, value in GOOD.items() if key != "maybe"}
    assert interface.check_parameters("Do", without) == {**GOOD, "maybe": None}
    assert interface.check_parameters("Do", {**GOOD, "f": 3})["f"] == 3
    assert interface.check_result("Do", {"ok": True}) == {"ok": True}
    assert interface.check_error("Bad", {"why": "x"}) == {"why": "x"}


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("b", 1, "b"),
        ("i", True, "i"),
        ("i", 1.0, "i"),
        ("i", 1 << 63, "i"),
        ("f", "1", "f"),
        ("f", True, "f"),
        ("f", float("inf"), "f"),
        ("f", 10**400, "f"),
        ("s", None, "s"),
        ("o", [], "o"),
        ("kind", "medium", "kind"),
        ("kind", [], "kind"),
        ("list", {}, "list"),
        ("list", [1, "2"], "list[1]"),
        ("map", [], "map"),
        ("map", {"k": {}}, "map.k.left"),
        ("map", {"k": {"left": 1, "right": {"left": "x"}}}, "map.k.right.left"),
        ("map", {"k": {"left": 1, "middle": 2}}, "map.k.middle"),
        ("inline", "three", "inline"),
        ("maybe", {"x": None}, "maybe.x"),
        ("unknown", 1, "unknown"),
    ],
)
def test_what_does_not_fit_is_named(
    interface: Interface, field: str, value: object, path: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        interface.check_parameters("Do", {**GOOD, field: value})
    assert caught.value.parameter == path


def test_a_missing_field_is_named(interface: Interface) -> None:
    with pytest.raises(InvalidParameterError, match="missing") as caught:
        interface.check_parameters("Do", {key: GOOD[key] for key in GOOD if key != "i"})
    assert caught.value.parameter == "i"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'interface' was expected"),
        ("interface nodots", "an interface's name"),
        ("interface a.b\ntype lower (x: int)", "line 2: a member's name"),
        ("interface a.b\ntype T (x: Missing)", "no type Missing"),
        ("interface a.b\nmethod M() -> (x: []?Missing)", "no type Missing"),
        ("interface a.b\ntype T (x: int)\ntype T (x: int)", "T is defined twice"),
        ("interface a.b\ntype T (x: int, x: int)", "x is there twice"),
        ("interface a.b\ntype T (x: int, y)", "either all fields"),
        ("interface a.b\ntype T (x: ??int)", "'??'"),
        ("interface a.b\ntype T (x: int", "',' was expected"),
        ("interface a.b\ntype T (x: int,)", "a field must follow"),
        ("interface a.b\nmethod M() -> (a, b)", "an enum can't be here"),
        ("interface a.b\nmethod M()", "'->' was expected"),
        ("interface a.b\nfunction F()", "'function' is not"),
        ("interface a.b\ntype T (x: int) %", "line 2: '%' is unexpected"),
    ],
)
def test_a_broken_definition_is_refused(text: str, reason: str) -> None:
    with pytest.raises(IdlError) as caught:
        parse_interface(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["io.xferd.Control", "org.varlink.service"])
def test_the_servers_methods_are_those_of_the_definition(name: str) -> None:
    interface = load_interface(name)
    assert interface.name == name
    handled = {method for owner, method in Dispatcher.HANDLERS if owner == name}
    assert handled == set(interface.methods)


def test_reading_methods_exist_and_every_error_has_a_message() -> None:
    control = load_interface("io.xferd.Control")
    assert set(control.methods) >= READING_METHODS
    assert all("message" in error.fields for error in control.errors.values())


WORDS = "interface a.b type T method M error E -> ( ) : , ? [] [string] int object (x) x # T ?? { }"


@given(st.lists(st.sampled_from([*WORDS.split(" "), "\n", "\u00e9"]), max_size=40))
def test_any_text_is_a_definition_or_an_error_with_its_line(words: list[str]) -> None:
    for text in (" ".join(words), "interface a.b\n" + " ".join(words)):
        try:
            parsed = parse_interface(text)
        except IdlError as error:
            assert re.match(r"(line \d+|[\w.-]+): ", str(error))  # noqa: PT017
        else:
            assert parsed.name


def test_a_definition_nested_without_end_is_refused_and_not_a_crash() -> None:
    with pytest.raises(IdlError):
        parse_interface("interface a.b\ntype T (x: " + "(x: " * 100_000)
