"""Position specialists (arXiv 2506.03566, section 3) and the drafter that a list of spans makes of them.

Draft input row i is x[i] = fc([embedding of token i + 1; feature i]) at rotary position i; a specialist turns it
into a prediction of feature i + 1. `fc` and the embedding are shared, so x is computed once whichever specialists
read it. How rows attend to each other differs between training and generation; what a specialist computes
before and after attention does not. So a specialist is two functions, `project` and `finish`, with the attention
of the caller in between.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from poss_jax import layers
from poss_jax.attention import KeyValues, Part, as_rows, attention
from poss_jax.config import BlockConfig, DraftConfig
from poss_jax.int8 import cast, input_rows
from poss_jax.llama import ParameterSpec
from poss_jax.rotary import rotary, rotate

# What a drafter has instead of the target's: an embedding, and a head for some of the tokens (`draft.trim_head`).
BORROWED = ("embed", "vocab")
# The variance is one over the product of all axes but the last, so of fused matrices queries, keys and values begin
# smaller than with one over the inputs ([hidden, heads, d], 3.9 times for SmolLM2) and gate_up 1.4 times smaller.
# Training both ways has these ahead in held-out loss, and nothing else apart (docs/results.md, settings).
_matrix = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=-1)


class Specialist(nn.Module):
    """One block without a norm in front of its attention and without one at its end.

    use_bias: of queries, keys and values, as drafters of Qwen2 have it.
    """

    block: BlockConfig
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        block = self.block
        hidden, inner = block.hidden_size, block.intermediate_size
        heads, group, size = block.num_kv_heads, block.queries_per_kv, block.head_dim
        self.query_key_value = self._parameter(
            "query_key_value", (hidden, heads, group + 2, size), ("hidden", "kv_heads", None, None)
        )
        bias = ("query_key_value_bias", (heads, group + 2, size), ("kv_heads", None, None), nn.initializers.zeros)
        self.query_key_value_bias = self._parameter(*bias) if self.use_bias else None
        self.attention_output = self._parameter(
            "attention_output", (heads, group, size, hidden), ("kv_heads", None, None, "hidden")
        )
        self.mlp_norm = self._parameter("mlp_norm", (hidden,), ("hidden",), nn.initializers.ones)
        self.gate_up = self._parameter("gate_up", (hidden, 2, inner), ("hidden", None, "intermediate"))
        self.down = self._parameter("down", (inner, hidden), ("intermediate", "hidden"))

    def _parameter(self, name, shape, axes, initializer=_matrix):
        return self.param(name, nn.with_logical_partitioning(initializer, axes), shape, self.dtype)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, KeyValues]:
        """Inputs [b, t, h] at rotary `positions` [b, t]: query [b, t, k, g, d], keys and values [b, k, t, d]."""
        query, key, value = layers.query_key_value(x, self.query_key_value, self.query_key_value_bias)
        cos, sin = rotary(self.block.rope, self.block.head_dim, positions, positions + 1)
        return rotate(query, cos, sin), as_rows(rotate(key, cos, sin), value)

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Inputs [b, t, h] and what their queries gathered [b, t, k, g, d]: predicted features [b, t, h]."""
        x = x + layers.attention_output(attended, self.attention_output)
        normed = layers.rms_norm(x, self.mlp_norm, self.block.norm_eps)
        return x + layers.mlp(normed, self.gate_up, self.down)


class InputLayer(nn.Module):
    """x from an embedded token and a feature: one matrix for both, the embedding's half first."""

    hidden_size: int
    use_bias: bool
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        hidden = self.hidden_size
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, "hidden"))
        self.kernel = self.param("kernel", kernel, (2 * hidden, hidden), self.dtype)
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("hidden",))
        self.bias = self.param("bias", bias, (hidden,), self.dtype) if self.use_bias else jnp.zeros((), self.dtype)

    def __call__(self, embedded: jax.Array, features: jax.Array) -> jax.Array:
        """Both [b, t, h] to x [b, t, h]."""
        return layers.product("bth,hi->bti", jnp.concatenate([embedded, features], axis=-1), self.kernel) + self.bias

    def tokens(self, embedded: jax.Array) -> jax.Array:
        """What embedded tokens contribute to x, float32."""
        half = input_rows(self.kernel, 0, self.hidden_size)
        return layers.product("bth,hi->bti", embedded, half, jnp.float32) + self.bias

    def features(self, features: jax.Array) -> jax.Array:
        """What features contribute to x."""
        half = input_rows(self.kernel, self.hidden_size, 2 * self.hidden_size)
        return layers.product("bth,hi->bti", features, half)


class Drafter(nn.Module):
    """`fc` and one specialist per span. Parameters: `fc/kernel`, `fc/bias`, `specialist_N/...`.

    The token embedding is not among them: callers pass embedded tokens, from the drafter's own table where its
    checkpoint holds one and from the target's where not.
    """

    config: DraftConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.fc = InputLayer(self.config.block.hidden_size, self.config.fc_bias, self.dtype)
        self.specialists = [
            Specialist(self.config.block, self.config.query_key_value_bias, self.dtype, name=f"specialist_{index}")
            for index in range(len(self.config.spans))
        ]

    def inputs(self, embedded: jax.Array, features: jax.Array) -> jax.Array:
        """x [b, t, h] from embedded tokens and features, both [b, t, h]; the embedding comes first."""
        return self.fc(embedded, features)

    def token_inputs(self, embedded: jax.Array) -> jax.Array:
        """The part of x that embedded tokens [b, t, h] give, float32, for callers that need it more than once."""
        return self.fc.tokens(embedded)

    def join_inputs(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """x [b, t, h] in the dtype of `features` from `token_inputs` and features, both [b, t, h]."""
        return (tokens + self.fc.features(features)).astype(features.dtype)

    def project(self, specialist: int, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, KeyValues]:
        """`Specialist.project` of one specialist."""
        return self.specialists[specialist].project(x, positions)

    def finish(self, specialist: int, x: jax.Array, attended: jax.Array) -> jax.Array:
        """`Specialist.finish` of one specialist."""
        return self.specialists[specialist].finish(x, attended)

    def __call__(self, embedded: jax.Array, features: jax.Array, positions: jax.Array) -> jax.Array:
        """Every specialist on the same true rows, causally: [specialists, b, t, h]. Touches every parameter."""
        x = self.inputs(embedded, features)
        predictions = []
        for index in range(len(self.specialists)):
            query, rows = self.project(index, x, positions)
            attended = attention(query, [Part(rows, None)])
            predictions.append(self.finish(index, x, attended))
        return jnp.stack(predictions)


class BoundDrafter(NamedTuple):
    """A drafter with its parameters (`BORROWED` ones among them are left to the caller): `Drafter`'s methods as
    functions.

    They compute in the dtype of their inputs. Parameters of another dtype (float32 masters in training) are cast where
    they are used, so that what several uses add to their gradients is added in the dtype of the parameters.
    """

    config: DraftConfig
    params: dict[str, Any]

    def _apply(self, factor: jax.Array, *arguments, method: str):
        modules = {name: value for name, value in self.params.items() if name not in BORROWED}
        return Drafter(self.config, factor.dtype).apply({"params": cast(modules, factor)}, *arguments, method=method)

    def inputs(self, embedded: jax.Array, features: jax.Array) -> jax.Array:
        """See `Drafter.inputs`."""
        return self._apply(features, embedded, features, method="inputs")

    def token_inputs(self, embedded: jax.Array) -> jax.Array:
        """See `Drafter.token_inputs`."""
        return self._apply(embedded, embedded, method="token_inputs")

    def join_inputs(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """See `Drafter.join_inputs`."""
        return self._apply(features, tokens, features, method="join_inputs")

    def project(self, specialist: int, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, KeyValues]:
        """See `Specialist.project`."""
        return self._apply(x, specialist, x, positions, method="project")

    def finish(self, specialist: int, x: jax.Array, attended: jax.Array) -> jax.Array:
        """See `Specialist.finish`."""
        return self._apply(x, specialist, x, attended, method="finish")


def draft_specs(config: DraftConfig) -> dict[str, Any]:
    """Shapes and logical axes of the drafter's parameters, from the modules themselves."""
    boxed = jax.eval_shape(functools.partial(_init, config), jax.random.key(0))
    return jax.tree.map(lambda box: ParameterSpec(box.value.shape, box.names), boxed, is_leaf=_is_box)


def init_draft(config: DraftConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters, float32, as the modules initialise them."""
    return jax.tree.map(lambda box: box.value, _init(config, key), is_leaf=_is_box)


def _init(config: DraftConfig, key: jax.Array) -> dict[str, Any]:
    row = jnp.zeros((1, 1, config.block.hidden_size), jnp.float32)
    return Drafter(config).init(key, row, row, jnp.zeros((1, 1), jnp.int32))["params"]


def _is_box(leaf: Any) -> bool:
    return hasattr(leaf, "names")
