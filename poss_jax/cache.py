"""KV caches of static shape: allocate, write and read rows."""

import functools

import jax
import jax.numpy as jnp

from poss_jax.attention import KeyValues
from poss_jax.config import BlockConfig


def empty(block: BlockConfig, batch: int, slots: int, dtype: jnp.dtype) -> KeyValues:
    """Zeroed keys and values [b, k, slots, d] of one layer."""
    shape = (batch, block.num_kv_heads, slots, block.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


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
