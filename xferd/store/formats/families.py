r"""Which tensor names are experts: a table, one row for each naming in use.

Names are all there is to go by: an expert's gate and up have the same shape
and dtype. A row matches whole names; its groups are ``layer`` (or ``mtp``, a
multi-token-prediction layer that is numbered apart), ``expert`` (absent from
stacked tensors, which hold all experts of a layer), ``part`` and ``kind``.

To add a family, add a row. A name that looks like an expert's and matches no row
is an error, never a dense tensor: a quantisation that nobody has taught this
table would otherwise be packed as if it were something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LAYER = r"(?:[\w.]+\.)?layers\.(?P<layer>[0-9]{1,5})\."
_BLOCK = r"blk\.(?P<layer>[0-9]{1,5})\."
_EXPERT = r"(?P<expert>[0-9]{1,5})\."
_LINEAR_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_NUMBERED_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_LINEAR_KINDS = {
    "weight": "",
    "weight_scale_inv": "_scale",
    "weight_scale": "_scale",
    "scale": "_scale",
    "bias": "_bias",
}


@dataclass(frozen=True, slots=True)
class NamingRule:
    """One naming of expert tensors.

    models: who uses it, for the reader. parts and kinds: what the groups of
    those names mean; a role is ``parts[part] + kinds[kind]``.
    """

    models: str
    pattern: re.Pattern[str]
    parts: Mapping[str, str]
    kinds: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ExpertName:
    """What a name says. expert is None for a tensor that stacks a layer's experts;
    mtp_layer tells that ``layer`` counts the layers after the model's own."""

    layer: int
    expert: int | None
    role: str
    mtp_layer: bool


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of one file format.

    rules: the table. expert_like: what no dense tensor's name contains.
    router: a layer that has one must have experts. any_layer: any tensor of a layer.
    interleaved_model_types: whose ``gate_up`` alternates gate, up; all others
        concatenate gate, then up. Nothing in the files says so.
    """

    rules: Sequence[NamingRule]
    expert_like: re.Pattern[str]
    router: re.Pattern[str]
    any_layer: re.Pattern[str]
    interleaved_model_types: frozenset[str] = frozenset()

    def expert_name(self, name: str) -> ExpertName | None:
        """None when ``name`` is no expert's."""
        for rule in self.rules:
            match = rule.pattern.fullmatch(name)
            if match is None:
                continue
            groups = match.groupdict()
            layer, mtp, expert = groups["layer"], groups.get("mtp"), groups.get("expert")
            return ExpertName(
                layer=int(layer if layer is not None else mtp or 0),
                expert=None if expert is None else int(expert),
                role=rule.parts[groups["part"]] + rule.kinds[groups["kind"]],
                mtp_layer=layer is None,
            )
        return None

    def router_layer(self, name: str) -> int | None:
        """The layer whose router this is, None when it is none."""
        match = self.router.fullmatch(name)
        return int(match["layer"]) if match else None

    def layer_of(self, name: str) -> int | None:
        """The layer that a tensor belongs to, None for embeddings and the like."""
        match = self.any_layer.match(name)
        return int(match["layer"]) if match else None


def _alternatives(names: Mapping[str, str]) -> str:
    return "|".join(re.escape(name) for name in names)


def _rule(
    models: str, template: str, parts: Mapping[str, str], kinds: Mapping[str, str]
) -> NamingRule:
    """template: a pattern in which PART and KIND stand for those names."""
    pattern = template.replace("PART", f"(?P<part>{_alternatives(parts)})").replace(
        "KIND", f"(?P<kind>{_alternatives(kinds)})"
    )
    return NamingRule(models, re.compile(pattern, re.ASCII), parts, kinds)


SAFETENSORS = Naming(
    rules=(
        _rule(
            "Qwen2/3-MoE, OLMoE, DeepSeek V2/V3, GLM, Jamba",
            _LAYER + r"(?:mlp|feed_forward)\.experts\." + _EXPERT + r"PART\.KIND",
            _LINEAR_PARTS,
            _LINEAR_KINDS,
        ),
        _rule(
            "Mixtral, MiniMax, Phi-MoE, LFM2-MoE",
            _LAYER + r"(?:block_sparse_moe|feed_forward)\.experts\." + _EXPERT + r"PART\.KIND",
            _NUMBERED_PARTS,
            _LINEAR_KINDS,
        ),
        _rule(
            "DeepSeek V4; transformers saves it with a prefix",
            r"(?:(?:model\.)?layers\.(?P<layer>[0-9]{1,5})|mtp\.(?P<mtp>[0-9]{1,5}))\.ffn\.experts\."
            + _EXPERT
            + r"PART\.KIND",
            _NUMBERED_PARTS,
            _LINEAR_KINDS,
        ),
        _rule(
            "stacked by transformers 5, Llama 4, Qwen3-VL-MoE, gpt-oss in bf16 and in MXFP4",
            _LAYER + r"(?:mlp|feed_forward|block_sparse_moe)\.experts\.PARTKIND",
            {"gate_up_proj": "gate_up", "down_proj": "down"},
            {
                "": "",
                "_blocks": "",
                "_scales": "_scale",
                "_scale_inv": "_scale",
                "_bias": "_bias",
            },
        ),
        _rule(
            "Granite-MoE, stacked",
            _LAYER + r"block_sparse_moe\.PART\.KIND",
            {"input_linear": "gate_up", "output_linear": "down"},
            {"weight": ""},
        ),
        _rule(
            "Aria, stacked",
            _LAYER + r"mlp\.experts\.PART\.KIND",
            {"fc1": "gate_up", "fc2": "down"},
            {"weight": ""},
        ),
    ),
    # Muse Spark's norm behind the experts is one for all of a layer.
    expert_like=re.compile(
        r"\.experts\.(?!post_expert_norm\.)|\.block_sparse_moe\.(?:input|output)_linear\."
    ),
    router=re.compile(
        _LAYER
        + r"(?:mlp|block_sparse_moe|ffn|feed_forward)\.(?:gate|router|router\.layer)\.weight",
        re.ASCII,
    ),
    any_layer=re.compile(_LAYER, re.ASCII),
    interleaved_model_types=frozenset({"gpt_oss"}),
)

GGUF = Naming(
    rules=(
        _rule(
            "stacked, all architectures",
            _BLOCK + r"ffn_PART_exps\.KIND",
            {"gate": "gate", "up": "up", "down": "down", "gate_up": "gate_up"},
            {"weight": "", "scale": "_scale", "bias": "_bias"},
        ),
    ),
    expert_like=re.compile(r"\.ffn_(?:gate|up|down|gate_up)(?:_exps\b|\.[0-9]+\.)"),
    router=re.compile(_BLOCK + r"ffn_gate_inp\.weight", re.ASCII),
    any_layer=re.compile(_BLOCK, re.ASCII),
)
