"""The table of conversions: which tensors of a checkpoint each parameter of ours lies in, and how.

Shapes and logical axes are those of `llama.parameter_specs` and `specialist.draft_specs`; names are here. `{}` in a
name stands for the number of the layer. Where a layout has several parts and one name is given, the parts lie in that
tensor one after another, as Phi-3 stores them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from convert.layout import (
    AttentionOutput,
    GateUp,
    GateUpBias,
    Layout,
    QueryKeyValue,
    QueryKeyValueBias,
    Same,
    Transposed,
    part_shapes,
)
from poss_jax.config import BlockConfig, DraftConfig, TargetConfig
from poss_jax.llama import ParameterSpec, parameter_specs
from poss_jax.specialist import draft_specs

BLOCK_NAMES: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm.weight",),
    "query_key_value": tuple(f"self_attn.{kind}_proj.weight" for kind in "qkv"),
    "query_key_value_bias": tuple(f"self_attn.{kind}_proj.bias" for kind in "qkv"),
    "query_norm": ("self_attn.q_norm.weight",),
    "key_norm": ("self_attn.k_norm.weight",),
    "attention_output": ("self_attn.o_proj.weight",),
    "attention_output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
# Families of targets whose layers have other names than Llama's.
FAMILY_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"query_key_value": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)},
}
EMBEDDING, HEAD, DRAFT_EMBEDDING = "model.embed_tokens.weight", "lm_head.weight", "embed_tokens.weight"
TARGET_NAMES = {"embed": (EMBEDDING,), "final_norm": ("model.norm.weight",), "head": (HEAD,)}
DRAFT_NAMES = {"fc": {"kernel": ("fc.weight",), "bias": ("fc.bias",)}, "embed": (DRAFT_EMBEDDING,)}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter: its place in our tree, its shape and axes, and the tensors it lies in."""

    path: tuple[str | int, ...]
    spec: ParameterSpec
    layout: Layout
    names: tuple[str, ...]

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts that the layout joins."""
        return part_shapes(self.layout, self.spec.shape)

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, which may hold all parts one after another."""
        shapes = self.part_shapes
        if len(self.names) < len(shapes):
            shapes = ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)
        return dict(zip(self.names, shapes, strict=True))


def target_entries(config: TargetConfig) -> list[Entry]:
    """All parameters of a target."""
    specs = parameter_specs(config)
    names = BLOCK_NAMES | FAMILY_NAMES.get(config.family, {})
    entries = [
        Entry((key,), specs[key], Transposed() if key == "head" else Same(), TARGET_NAMES[key])
        for key in TARGET_NAMES
        if key in specs
    ]
    for index, layer in enumerate(specs["layers"]):
        entries += _block_entries(("layers", index), f"model.layers.{index}.", layer, names, config.block)
    return entries


def draft_entries(config: DraftConfig, *, embed: bool) -> list[Entry]:
    """All parameters of a drafter. `embed`: with an embedding of its own."""
    specs = draft_specs(config)
    entries = [
        Entry(("fc", key), spec, Transposed() if key == "kernel" else Same(), DRAFT_NAMES["fc"][key])
        for key, spec in specs["fc"].items()
    ]
    for index in range(len(config.spans)):
        specialist = f"specialist_{index}"
        entries += _block_entries((specialist,), f"layers.{index}.", specs[specialist], BLOCK_NAMES, config.block)
    if embed:
        spec = ParameterSpec((config.vocab_size, config.block.hidden_size), ("vocab", "hidden"))
        entries.append(Entry(("embed",), spec, Same(), DRAFT_NAMES["embed"]))
    return entries


def _block_entries(
    path: tuple[str | int, ...],
    prefix: str,
    specs: Mapping[str, ParameterSpec],
    names: Mapping[str, tuple[str, ...]],
    block: BlockConfig,
) -> Iterator[Entry]:
    layouts: dict[str, Layout] = {
        "query_key_value": QueryKeyValue(block.queries_per_kv, block.head_dim),
        "query_key_value_bias": QueryKeyValueBias(block.queries_per_kv, block.head_dim),
        "attention_output": AttentionOutput(block.queries_per_kv, block.head_dim),
        "gate_up": GateUp(),
        "gate_up_bias": GateUpBias(),
        "down": Transposed(),
    }
    for key in names:
        if key in specs:
            stored = tuple(prefix + name for name in names[key])
            yield Entry((*path, key), specs[key], layouts.get(key, Same()), stored)


def tree_of(leaves: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """{("layers", 0, "down"): x} gives {"layers": [{"down": x}]}."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    if "layers" in tree:
        tree["layers"] = [tree["layers"][index] for index in range(len(tree["layers"]))]
    return tree


def leaves_of(tree: dict[str, Any]) -> dict[tuple[str | int, ...], Any]:
    """The inverse of `tree_of`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict | list))
    return {tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path): leaf for path, leaf in leaves}
