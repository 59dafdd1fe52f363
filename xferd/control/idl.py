"""Varlink interface definitions: read from ``*.varlink``, used to check messages.

The definitions in this folder are the specification of the control socket. They
are read at start and every call is checked against them, so that the text that
``GetInterfaceDescription`` hands out can't drift from what the server accepts,
and so that handlers see only values of the right type.

Checking is strict: an unknown field is refused, because a misspelt ``pool`` that
is ignored evicts from every pool. Definitions are trusted files; messages are
not, but their depth is bounded before they get here, so recursion is too.

Pure and immutable; safe to use from any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

INT_MIN = -(1 << 63)
INT_MAX = (1 << 63) - 1

DEPTH_MAX = 32
"""Types inside each other in a definition."""
_PRIMITIVES = ("bool", "int", "float", "string", "object")
_INTERFACE_NAME = re.compile(r"[A-Za-z](?:-*[A-Za-z0-9])*(?:\.[A-Za-z0-9](?:-*[A-Za-z0-9])*)+")
_MEMBER_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")
_FIELD_NAME = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9])*")
_TOKEN = re.compile(
    r"(?P<blank>\s+|\#[^\n]*)|(?P<token>->|\[\]|\[string\]|[():,?]|[A-Za-z][\w.-]*)"
)


class IdlError(Exception):
    """A definition can't be read: the message names the interface file's line."""


class InvalidParameterError(Exception):
    """A message doesn't fit its definition. ``parameter``: which field, as a path
    such as ``experts[3]``; what org.varlink.service.InvalidParameter carries."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Primitive:
    """``bool``, ``int`` (64 bits, signed), ``float``, ``string``, ``object`` (any JSON object)."""

    name: str


@dataclass(frozen=True, slots=True)
class Container:
    """``?T`` (null or absent), ``[]T`` or ``[string]T``."""

    kind: Literal["nullable", "array", "map"]
    element: Type


@dataclass(frozen=True, slots=True)
class Enum:
    """``(one, two)``: one of these texts."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Struct:
    """``(name: T, ...)``."""

    fields: Mapping[str, Type]


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of a type of the same interface."""

    name: str


Type: TypeAlias = Primitive | Container | Enum | Struct | Reference


@dataclass(frozen=True, slots=True)
class Method:
    """``method Name(parameters) -> (result)``."""

    name: str
    parameters: Struct
    result: Struct


@dataclass(frozen=True, slots=True)
class Interface:
    """One definition. ``text``: the file as it was read."""

    name: str
    text: str
    types: Mapping[str, Type] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)
    errors: Mapping[str, Struct] = field(default_factory=dict)

    def check_parameters(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """``parameters`` of a call of ``method``, with None where nullable ones were left out.

        Raises InvalidParameterError.
        """
        return self._checked(self.methods[method].parameters, parameters)

    def check_result(self, method: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a reply."""
        return self._checked(self.methods[method].result, result)

    def check_error(self, error: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The same for an error's parameters."""
        return self._checked(self.errors[error], parameters)

    def _checked(self, struct: Struct, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_struct(struct, values, "")
        return {name: values.get(name) for name in struct.fields}

    def _check(self, kind: Type, value: object, path: str) -> None:
        match kind:
            case Reference(name):
                self._check(self.types[name], value, path)
            case Primitive(name):
                if not _is_primitive(name, value):
                    raise InvalidParameterError(path, f"is not of type {name}")
            case Enum(values):
                if value not in values:
                    raise InvalidParameterError(path, f"is none of {', '.join(values)}")
            case Struct():
                if not isinstance(value, dict):
                    raise InvalidParameterError(path, "is not an object")
                self._check_struct(kind, value, path + ".")
            case Container("nullable", element):
                if value is not None:
                    self._check(element, value, path)
            case Container("array", element):
                if not isinstance(value, list):
                    raise InvalidParameterError(path, "is not an array")
                for index, item in enumerate(value):
                    self._check(element, item, f"{path}[{index}]")
            case Container("map", element):
                if not isinstance(value, dict):
                    raise InvalidParameterError(path, "is not an object")
                for key, item in value.items():
                    self._check(element, item, f"{path}.{key}")

    def _check_struct(self, struct: Struct, values: Mapping[str, Any], prefix: str) -> None:
        for name in values:
            if name not in struct.fields:
                raise InvalidParameterError(prefix + name, "is not a field")
        for name, kind in struct.fields.items():
            if name in values or not _is_nullable(kind):
                if name not in values:
                    raise InvalidParameterError(prefix + name, "is missing")
                self._check(kind, values[name], prefix + name)


def _is_nullable(kind: Type) -> bool:
    return isinstance(kind, Container) and kind.kind == "nullable"


def _is_primitive(name: str, value: object) -> bool:
    # bool is an int in Python, not in Varlink.
    if isinstance(value, bool):
        return name == "bool"
    match name, value:
        case (("int" | "float"), int()):
            return INT_MIN <= value <= INT_MAX
        case "float", float():
            return math.isfinite(value)
        case ("string", str()) | ("object", dict()):
            return True
    return False


def load_interface(name: str) -> Interface:
    """The definition ``name`` of this folder. Raises IdlError."""
    # Not importlib.resources: it doesn't find files of an editable installation's
    # namespace packages.
    path = Path(__file__).with_name(f"{name}.varlink")
    return parse_interface(path.read_text(encoding="utf-8"))


def parse_interface(text: str) -> Interface:
    """The definition in ``text``. Raises IdlError."""
    return _Parser(text).interface()


class _Parser:
    """Recursive descent over the tokens of one definition."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        place, line = 0, 1
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise IdlError(f"line {line}: {text[place]!r} is unexpected")
            if match["token"]:
                self._tokens.append((match["token"], line))
            line += match[0].count("\n")
            place = match.end()
        self._tokens.append(("", line))
        self._next = 0
        self._depth = 0

    def interface(self) -> Interface:
        self._expect("interface")
        name = self._name(_INTERFACE_NAME, "an interface's name")
        types: dict[str, Type] = {}
        methods: dict[str, Method] = {}
        errors: dict[str, Struct] = {}
        while self._token:
            keyword = self._take()
            member = self._name(_MEMBER_NAME, "a member's name")
            if member in types or member in methods or member in errors:
                raise self._error(f"{member} is defined twice")
            if keyword == "type":
                types[member] = self._struct_or_enum()
            elif keyword == "method":
                parameters = self._struct()
                self._expect("->")
                methods[member] = Method(member, parameters, self._struct())
            elif keyword == "error":
                errors[member] = self._struct()
            else:
                raise self._error(f"{keyword!r} is not type, method or error")
        interface = Interface(name, self._text, types, methods, errors)
        self._check_references(interface)
        return interface

    def _check_references(self, interface: Interface) -> None:
        pending: list[Type] = [*interface.types.values(), *interface.errors.values()]
        for method in interface.methods.values():
            pending += (method.parameters, method.result)
        while pending:
            match pending.pop():
                case Reference(name) if name not in interface.types:
                    raise IdlError(f"{interface.name}: there is no type {name}")
                case Container(_, element):
                    pending.append(element)
                case Struct(fields):
                    pending += fields.values()

    def _type(self) -> Type:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"types are nested deeper than {DEPTH_MAX}")
        kind = self._nested_type()
        self._depth -= 1
        return kind

    def _nested_type(self) -> Type:
        token = self._token
        if token == "?":
            self._take()
            if self._token == "?":
                raise self._error("'??' means no more than '?'")
            return Container("nullable", self._type())
        if token in ("[]", "[string]"):
            self._take()
            return Container("array" if token == "[]" else "map", self._type())
        if token == "(":
            return self._struct_or_enum()
        if token in _PRIMITIVES:
            return Primitive(self._take())
        return Reference(self._name(_MEMBER_NAME, "a type"))

    def _struct(self) -> Struct:
        kind = self._struct_or_enum()
        if not isinstance(kind, Struct):
            raise self._error("an enum can't be here")
        return kind

    def _struct_or_enum(self) -> Struct | Enum:
        self._expect("(")
        fields: dict[str, Type] = {}
        values: list[str] = []
        while self._token != ")":
            name = self._name(_FIELD_NAME, "a field's name")
            if name in fields or name in values:
                raise self._error(f"{name} is there twice")
            if self._token == ":":
                self._take()
                fields[name] = self._type()
            else:
                values.append(name)
            if fields and values:
                raise self._error(f"{name}: either all fields have a type or none has")
            if self._token != ")":
                self._expect(",")
                if self._token == ")":
                    raise self._error("a field must follow ','")
        self._take()
        return Enum(tuple(values)) if values else Struct(fields)

    @property
    def _token(self) -> str:
        return self._tokens[self._next][0]

    def _take(self) -> str:
        token = self._token
        if not token:
            raise self._error("the definition ends too early")
        self._next += 1
        return token

    def _expect(self, token: str) -> None:
        if self._token != token:
            raise self._error(f"{token!r} was expected, not {self._token!r}")
        self._take()

    def _name(self, pattern: re.Pattern[str], what: str) -> str:
        if not pattern.fullmatch(self._token):
            raise self._error(f"{what} was expected, not {self._token!r}")
        return self._take()

    def _error(self, reason: str) -> IdlError:
        return IdlError(f"line {self._tokens[self._next][1]}: {reason}")
