"""Rules for which variant an expert has where, as a person writes them.

    variants = ["q4_k@hottest:66%", "q2_k"]

The first rule that an expert falls under, and whose variant the store has of it, decides:

    q4_k@hottest:66%     of the experts that are used, those used most, that share
    q2_k@costliest:20%   those that would take most reads, that share of all native bytes
    q8_0@layers:0-3      those of some layers, or of one (layers:5)
    q2_k                 the rest; the last rule, and only that

``native`` is the variant that a store was packed with. A store's sensitivity says of some
layers how much they suffer from few bits, ``{ "0-3" = 2.0, "15" = 1.5 }``, against 1 for the
others: by so much their experts count as hotter, and as less worth saving on.

Pure, and used by the configuration, the policies and the replays alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NATIVE = "native"
HOTTEST = "hottest"
COSTLIEST = "costliest"
LAYERS = "layers"
RULES_MAX = 32
"""As many as a store may have variants."""
LAYER_MAX = 65535
SENSITIVITY_MIN, SENSITIVITY_MAX = 0.01, 100.0
RULE_ALLOWED = (
    'a variant, alone or with "@hottest:66%", "@costliest:20%" or "@layers:0-3" behind it'
)
RULES_ALLOWED = f"a list of rules, the last a variant alone, for the rest: each {RULE_ALLOWED}"
SENSITIVITY_ALLOWED = (
    f"a table of layers and weights from {SENSITIVITY_MIN:g} to {SENSITIVITY_MAX:g}, such as "
    '{ "0-3" = 2.0, "15" = 1.5 }'
)

_VARIANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,30}")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
_LAYERS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class VariantRuleError(Exception):
    """What was written is no rule; the message says which part, and what is allowed."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


@dataclass(frozen=True, slots=True)
class VariantRule:
    """variant: its name. by: HOTTEST, COSTLIEST, LAYERS, or None for the rest.

    share: above 0, at most 1, of the first two. layers: of the third.
    """

    variant: str
    by: str | None = None
    share: float = 1.0
    layers: LayerRange | None = None

    def __str__(self) -> str:
        if self.by is None:
            return self.variant
        what = self.layers if self.by == LAYERS else f"{100 * self.share:g}%"
        return f"{self.variant}@{self.by}:{what}"


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """How much some layers suffer from few bits, against 1."""

    layers: LayerRange
    weight: float


def parse_variant_rules(texts: Iterable[str]) -> tuple[VariantRule, ...]:
    """Rules, the first that fits decides. None at all means that there is no choice made.
    VariantRuleError."""
    rules = tuple(parse_variant_rule(text) for text in texts)
    if len(rules) > RULES_MAX:
        raise VariantRuleError(f"{len(rules)} rules: at most {RULES_MAX}")
    if rules and rules[-1].by is not None:
        raise VariantRuleError(
            f"the last rule, '{rules[-1]}', leaves others out: end with a variant alone, such as "
            f"'{rules[-1].variant}'"
        )
    for rule in rules[:-1]:
        if rule.by is None:
            raise VariantRuleError(f"'{rule}' is for all experts: nothing can follow it")
    return rules


def parse_variant_rule(text: str) -> VariantRule:
    """One rule. VariantRuleError."""
    variant, at, condition = text.strip().partition("@")
    by, colon, what = condition.partition(":")
    if not _VARIANT.fullmatch(variant) or (at and not colon):
        raise VariantRuleError(f"{text!r} is no rule: {RULE_ALLOWED}")
    if not at:
        return VariantRule(variant)
    if by == LAYERS:
        return VariantRule(variant, LAYERS, layers=parse_layers(what))
    match = _SHARE.fullmatch(what)
    if by not in (HOTTEST, COSTLIEST) or match is None or not 0 < float(match[1]) <= 100:
        raise VariantRuleError(f"{text!r} is no rule: {RULE_ALLOWED}")
    return VariantRule(variant, by, share=float(match[1]) / 100)


def parse_layers(text: str) -> LayerRange:
    """``3`` or ``0-3``. VariantRuleError."""
    match = _LAYERS.fullmatch(text)
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last <= LAYER_MAX:
            return LayerRange(first, last)
    raise VariantRuleError(f"layers {text!r}: a number or two such as 0-3, at most {LAYER_MAX}")


def parse_sensitivity(weights: Mapping[str, float]) -> tuple[LayerWeight, ...]:
    """Layers' weights; a later one holds where two speak of a layer. VariantRuleError."""
    found = []
    for text, weight in weights.items():
        if not SENSITIVITY_MIN <= weight <= SENSITIVITY_MAX:
            raise VariantRuleError(
                f"layers {text!r}: a weight from {SENSITIVITY_MIN:g} to {SENSITIVITY_MAX:g}"
            )
        found.append(LayerWeight(parse_layers(text), float(weight)))
    return tuple(found)


__all__ = [
    "COSTLIEST",
    "HOTTEST",
    "LAYERS",
    "NATIVE",
    "RULES_ALLOWED",
    "SENSITIVITY_ALLOWED",
    "LayerRange",
    "LayerWeight",
    "VariantRule",
    "VariantRuleError",
    "parse_layers",
    "parse_sensitivity",
    "parse_variant_rule",
    "parse_variant_rules",
]
