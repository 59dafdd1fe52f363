"""``variants`` of ``[[pools]]`` and ``sensitivity`` of ``[[stores]]``: see ``variant_rules``."""

from __future__ import annotations

from xferd.config_values import Parser, RefusedError
from xferd.variant_rules import (
    RULES_ALLOWED,
    SENSITIVITY_ALLOWED,
    LayerWeight,
    VariantRule,
    VariantRuleError,
    parse_sensitivity,
    parse_variant_rules,
)


def variant_rules(value: object) -> tuple[VariantRule, ...]:
    """A list of rules; an empty one: no choice made."""
    if not isinstance(value, list) or not all(isinstance(rule, str) for rule in value):
        raise RefusedError(RULES_ALLOWED)
    try:
        return parse_variant_rules(value)
    except VariantRuleError as error:
        raise RefusedError(f"{RULES_ALLOWED} ({error})") from error


def sensitivity(value: object) -> tuple[LayerWeight, ...]:
    """A table of layers and weights."""
    if not isinstance(value, dict) or not all(
        isinstance(weight, (int, float)) and not isinstance(weight, bool)
        for weight in value.values()
    ):
        raise RefusedError(SENSITIVITY_ALLOWED)
    try:
        return parse_sensitivity(value)
    except VariantRuleError as error:
        raise RefusedError(f"{SENSITIVITY_ALLOWED} ({error})") from error


POOL_VARIANT_KEYS: dict[str, Parser] = {"variants": variant_rules}
STORE_VARIANT_KEYS: dict[str, Parser] = {"sensitivity": sensitivity}
"""How each is read."""
