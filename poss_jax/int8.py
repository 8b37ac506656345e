"""Drafter weights as 8-bit integers with a scale for each output: half the bytes that a draft pass reads.

Rounding costs a little acceptance and never changes a text, since the target keeps its own weights.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 127
# How many leading axes of a matrix are its inputs; what is not named here (norms, biases) stays as it is.
INPUT_AXES = {"kernel": 1, "query_key_value": 1, "attention_output": 3, "gate_up": 1, "down": 1, "head": 1}


class Int8(NamedTuple):
    """A matrix `values` * `scale`: int8 of the matrix's shape, inputs first, and float32 of the shape of its outputs.

    `layers.product` multiplies with it. The scales are for the results: a matrix that is scaled before it is multiplied
    with is a wide one in memory, on GPUs at least, and reading 8 bits has brought nothing.
    """

    values: jax.Array
    scale: jax.Array


def quantize(weight: jax.Array, input_axes: int) -> Int8:
    """The nearest of 255 values for each weight, the largest of each output being the last of them."""
    wide = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=tuple(range(input_axes)))
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Int8(jnp.round(wide / scale).astype(jnp.int8), scale)


def is_int8(leaf: Any) -> bool:
    """For `jax.tree` functions that are to see an `Int8` as one leaf."""
    return isinstance(leaf, Int8)


def cast(params: Any, factor: jax.Array) -> Any:
    """Parameters in the dtype of `factor`, to multiply it with; the integers stay integers.

    What is the same in every round of the loop of rounds the compiler moves in front of it, such as widening integers,
    and would read the wide weights in each; so they are tied to the factor, which is another one each time.
    """

    def cast_leaf(leaf: jax.Array | Int8) -> jax.Array | Int8:
        if is_int8(leaf):
            return leaf._replace(values=jax.lax.optimization_barrier((leaf.values, factor))[0])
        return leaf.astype(factor.dtype)

    return jax.tree.map(cast_leaf, params, is_leaf=is_int8)


def input_rows(weight: jax.Array | Int8, first: int, last: int) -> jax.Array | Int8:
    """The part of a matrix that belongs to its inputs `first` to `last`."""
    if is_int8(weight):
        return weight._replace(values=weight.values[first:last])
    return weight[first:last]


def quantize_draft(params: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """A drafter's parameters with all its matrices as `Int8`, and with a head of its own: that of its `vocab` if it has
    one, else the target's, of which the target keeps the unrounded one.
    """
    head = target["head"] if "head" in target else target["embed"].T
    params = {"vocab": {"head": head}, **params}

    def rounded(path: tuple, leaf: jax.Array) -> jax.Array | Int8:
        axes = INPUT_AXES.get(path[-1].key)
        return leaf if axes is None else quantize(leaf, axes)

    return jax.tree_util.tree_map_with_path(rounded, params)
