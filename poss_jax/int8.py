"""Drafter weights as 8-bit integers with a scale for each output: half the bytes that a draft pass reads.

Rounding costs a little acceptance and never changes a text, since the target keeps its own weights.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import llama

LARGEST = 127
# How many leading axes of a matrix are its inputs; what is not named here (norms, biases) stays as it is.
INPUT_AXES = {"kernel": 1, "query_key_value": 1, "attention_output": 3, "gate_up": 1, "down": 1, "head": 1}


class Int8(NamedTuple):
    """A matrix `values` * `scale`: int8 of the matrix's shape, and float32 with size 1 where its inputs are."""

    values: jax.Array
    scale: jax.Array


def quantize(weight: jax.Array, input_axes: int) -> Int8:
    """The nearest of 255 values for each weight, the largest of each output being the last of them."""
    wide = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=tuple(range(input_axes)), keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Int8(jnp.round(wide / scale).astype(jnp.int8), scale)


def widen(leaf: jax.Array | Int8, factor: jax.Array) -> jax.Array:
    """A parameter in the dtype of `factor`, to multiply it with.

    What is the same in every round of the loop of rounds the compiler moves in front of it, and would read the wide
    weights in each; so integers are tied to the factor, which is another one each time.
    """
    if isinstance(leaf, Int8):
        values, _ = jax.lax.optimization_barrier((leaf.values, factor))
        return values.astype(factor.dtype) * leaf.scale.astype(factor.dtype)
    return leaf.astype(factor.dtype)


def widen_all(params: Any, factor: jax.Array) -> Any:
    """`widen` for each parameter in a tree."""
    return jax.tree.map(lambda leaf: widen(leaf, factor), params, is_leaf=lambda leaf: isinstance(leaf, Int8))


def quantize_draft(params: dict[str, Any], target: llama.Params) -> dict[str, Any]:
    """A drafter's parameters with all its matrices as `Int8`, and with a head of its own: that of its `vocab` if it has
    one, else the target's, of which the target keeps the unrounded one.
    """
    head = target["head"] if "head" in target else target["embed"].T
    params = {"vocab": {"head": head}, **params}

    def rounded(path: tuple, leaf: jax.Array) -> jax.Array | Int8:
        axes = INPUT_AXES.get(path[-1].key)
        return leaf if axes is None else quantize(leaf, axes)

    return jax.tree_util.tree_map_with_path(rounded, params)
