"""KV caches of static shape: allocate, write and read rows."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax.attention import KeyValues, StackedLayer
from poss_jax.config import BlockConfig


class Stack(NamedTuple):
    """Caches of all layers in one array each, [b, l, k, s, d], so that a round writes to all of them at once and not to
    each. For readers that find their layer themselves: XLA would copy it out.
    """

    keys: jax.Array
    values: jax.Array


Caches = tuple[KeyValues, ...] | Stack  # of the layers of a target


def layer(caches: Caches, index: int) -> KeyValues | StackedLayer:
    """Of a stack where it lies."""
    return StackedLayer(*caches, index) if isinstance(caches, Stack) else caches[index]


def empty(block: BlockConfig, batch: int, slots: int, dtype: jnp.dtype) -> KeyValues:
    """Zeroed keys and values [b, k, slots, d] of one layer."""
    shape = (batch, block.num_kv_heads, slots, block.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def fill(block: BlockConfig, rows: Sequence[KeyValues], slots: int, stacked: bool) -> Caches:
    """Caches of `slots` slots that begin with these rows, [b, k, t, d] for each layer."""
    batch, dtype = rows[0].keys.shape[0], rows[0].keys.dtype
    if not stacked:
        start = jnp.zeros((batch,), jnp.int32)
        return tuple(write(empty(block, batch, slots, dtype), some, start) for some in rows)
    shape = (batch, len(rows), block.num_kv_heads, slots, block.head_dim)
    caches = Stack(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for index, some in enumerate(rows):  # one after the other: all rows of a prompt once more would be a second cache
        sides = zip(caches, some, strict=True)
        caches = Stack(*(jax.lax.dynamic_update_slice(old, new[:, None], (0, index, 0, 0, 0)) for old, new in sides))
    return caches


def write_layers(caches: Caches, rows: Sequence[KeyValues], start: jax.Array) -> Caches:
    """`write` to every layer."""
    if not isinstance(caches, Stack):
        return tuple(write(old, new, start) for old, new in zip(caches, rows, strict=True))
    sides = zip(caches, zip(*rows, strict=True), strict=True)
    return Stack(*(write_rows(old, jnp.stack(new, axis=1), start, axis=2) for old, new in sides))


def write(cache: KeyValues, rows: KeyValues, start: jax.Array) -> KeyValues:
    """Puts `rows` [b, k, t, d] into slots start[b] .. start[b] + t - 1.

    The caller keeps start + t within the cache: an out-of-range start would be clamped and overwrite older rows.
    """
    return KeyValues(*(write_rows(old, new, start, axis=1) for old, new in zip(cache, rows, strict=True)))


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, axis: int = 0) -> jax.Array:
    """`dynamic_update_slice` along `axis` (batch not counted) at a place of its own in each batch row."""
    rows = rows.astype(buffer.dtype)
    if buffer.shape[0] == 1:  # a plain slice update; under vmap it becomes a scatter, which is slower
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis + 1)
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
    return jax.vmap(update)(buffer, rows, start)


def read_rows(buffer: jax.Array, start: jax.Array, count: int, axis: int = 0) -> jax.Array:
    """`count` rows along `axis` (batch not counted) from a place of its own in each batch row."""

    def read_one(row: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, first, count, axis)

    return jax.vmap(read_one)(buffer, start)
