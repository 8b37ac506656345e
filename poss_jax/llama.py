"""The target: Llama and its relatives (`config.FAMILIES`) as pure functions on a plain dictionary of arrays.

Features are the states after the final norm, the vectors that the head multiplies (the drafter's input).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import cache, layers
from poss_jax.attention import Filled, KeyValues, Part, self_attention
from poss_jax.config import TargetConfig
from poss_jax.rotary import rotary, rotate

Params = dict[str, Any]


class ParameterSpec(NamedTuple):
    """Shape of a parameter and the logical name of each axis (None: never sharded)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def parameter_specs(config: TargetConfig) -> Params:
    """The tree of parameters that `forward` and `head` take; loading and sharding are derived from it."""
    hidden, vocab = config.block.hidden_size, config.vocab_size
    specs: Params = {
        "embed": ParameterSpec((vocab, hidden), ("vocab", "hidden")),
        "layers": [_layer_specs(config) for _ in range(config.num_layers)],
        "final_norm": ParameterSpec((hidden,), ("hidden",)),
    }
    if not config.tie_embeddings:
        specs["head"] = ParameterSpec((hidden, vocab), ("hidden", "vocab"))
    return specs


def _layer_specs(config: TargetConfig) -> dict[str, ParameterSpec]:
    block = config.block
    hidden, inner = block.hidden_size, block.intermediate_size
    heads, group, size = block.num_kv_heads, block.queries_per_kv, block.head_dim
    specs = {
        "attention_norm": ParameterSpec((hidden,), ("hidden",)),
        "query_key_value": ParameterSpec((hidden, heads, group + 2, size), ("hidden", "kv_heads", None, None)),
        "attention_output": ParameterSpec((heads, group, size, hidden), ("kv_heads", None, None, "hidden")),
        "mlp_norm": ParameterSpec((hidden,), ("hidden",)),
        "gate_up": ParameterSpec((hidden, 2, inner), ("hidden", None, "intermediate")),
        "down": ParameterSpec((inner, hidden), ("intermediate", "hidden")),
    }
    if config.query_key_value_bias:
        specs["query_key_value_bias"] = ParameterSpec((heads, group + 2, size), ("kv_heads", None, None))
    if config.attention_output_bias:
        specs["attention_output_bias"] = ParameterSpec((hidden,), ("hidden",))
    if config.query_key_norm:
        specs["query_norm"] = specs["key_norm"] = ParameterSpec((size,), (None,))
    if config.mlp_bias:
        specs["gate_up_bias"] = ParameterSpec((2, inner), (None, "intermediate"))
        specs["down_bias"] = ParameterSpec((hidden,), ("hidden",))
    return specs


def forward(
    params: Params,
    config: TargetConfig,
    tokens: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    mask: jax.Array | None,
    prefix: cache.Caches | None = None,
    prefix_length: jax.Array | None = None,
    kernel: str = "plain",
) -> tuple[jax.Array, tuple[KeyValues, ...]]:
    """Runs `tokens` [b, t] at `positions` [b, t]; one function serves prompt, plain token and tree.

    `mask` [b or 1, t, t] says which of these rows a row sees, itself included (None: causal); all see the first
    `prefix_length` [b] rows of `prefix`, one cache per layer. `lengths` [b, t]: see `rotary`;
    `kernel`: see `attention`.

    Returns features [b, t, h] and, per layer, the keys and values [b, k, t, d] of these rows. The caches are only
    read: which of the rows are worth keeping is known after verification.
    """
    block = config.block
    x = params["embed"][tokens]
    cos, sin = rotary(block.rope, block.head_dim, positions, lengths)
    new_rows = []
    for index, layer in enumerate(params["layers"]):
        normed = layers.rms_norm(x, layer["attention_norm"], block.norm_eps)
        query, key, value = layers.query_key_value(normed, layer["query_key_value"], layer.get("query_key_value_bias"))
        if config.query_key_norm:  # of each head alone, before the rotation
            query = layers.rms_norm(query, layer["query_norm"], block.norm_eps)
            key = layers.rms_norm(key, layer["key_norm"], block.norm_eps)
        before = None if prefix is None else Part(cache.layer(prefix, index), Filled(prefix_length))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended, rows = self_attention(query, key, value, mask, before, kernel)
        x = x + layers.attention_output(attended, layer["attention_output"], layer.get("attention_output_bias"))
        normed = layers.rms_norm(x, layer["mlp_norm"], block.norm_eps)
        x = x + layers.mlp(normed, layer["gate_up"], layer["down"], layer.get("gate_up_bias"), layer.get("down_bias"))
        new_rows.append(rows)
    return layers.rms_norm(x, params["final_norm"], block.norm_eps), tuple(new_rows)


def head(params: Params, features: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Logits [..., v] in `dtype`, summed in float32, of features [..., h]."""
    if "head" in params:
        return layers.product("...h,hv->...v", features, params["head"], dtype)
    return jnp.einsum("...h,vh->...v", features, params["embed"], preferred_element_type=dtype)


def head_gradient(params: Params, slopes: jax.Array) -> jax.Array:
    """The head backwards: gradients of logits [..., v] give those of features [..., h], float32."""
    if "head" in params:
        return jnp.einsum("...v,hv->...h", slopes, params["head"], preferred_element_type=jnp.float32)
    return jnp.einsum("...v,vh->...h", slopes, params["embed"], preferred_element_type=jnp.float32)
