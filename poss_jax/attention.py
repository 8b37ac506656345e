"""Grouped attention over keys that lie in several places: the cache, and the rows being processed."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

TRAINING_KERNELS, DECODING_KERNELS = ("plain", "cudnn"), ("plain", "mosaic")
KERNEL_HEAD_SIZES = (64, 128)  # that "mosaic" is written for
KERNEL_TILE = 8  # rows that "mosaic" copies together: slots of its caches are a multiple, nodes of a tree best are too
QUERY_CHUNK = 512  # long prompts are attended in chunks of this many rows, so scores stay [b, k, g, 512, s]


class KeyValues(NamedTuple):
    """Keys and values [b, k, s, d] of one layer."""

    keys: jax.Array
    values: jax.Array


class StackedLayer(NamedTuple):
    """One layer of caches that lie in one array, [b, l, k, s, d] each. "mosaic" reads it there; others copy it out."""

    keys: jax.Array
    values: jax.Array
    index: int


class Filled(NamedTuple):
    """The first `length` [b] key rows, seen by every query row; what lies behind them may be anything finite."""

    length: jax.Array


class Part(NamedTuple):
    """Keys and values to attend to. `mask` [b or 1, t or 1, s] is true where query row t may see key row s; None is
    causal: the keys are those of the query rows, of which each sees itself and the ones before it.
    """

    rows: KeyValues | StackedLayer
    mask: jax.Array | Filled | None


def as_rows(key: jax.Array, value: jax.Array) -> KeyValues:
    """Key and value [b, t, k, d] in the layout of a cache, [b, k, t, d]."""
    return KeyValues(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))


def self_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, prefix: Part | None, kernel: str
) -> tuple[jax.Array, KeyValues]:
    """Rows attend to themselves and to a prefix: `query` [b, t, k, g, d], `key` and `value` [b, t, k, d] give what was
    attended [b, t, k, g, d], and the rows for a cache, [b, k, t, d].

    `mask` [b or 1, t, t]: see `Part`. "mosaic" needs it, and a prefix that is `Filled`.
    """
    if kernel == "mosaic":
        from poss_jax import tree_attention

        return tree_attention.attend_to_themselves(query, key, value, mask, prefix)
    rows = as_rows(key, value)
    parts = [Part(rows, mask)]
    return attention(query, parts if prefix is None else [prefix, *parts], kernel), rows


def attention(query: jax.Array, parts: Sequence[Part], kernel: str = "plain") -> jax.Array:
    """One softmax over all `parts`; `query` [b, t, k, g, d] gives [b, t, k, g, d] in its dtype.

    Scores and softmax are float32, forbidden scores minus infinity. Every query row must see at least one key.
    Two kernels never write scores to memory, and round the weights of values differently: "cudnn" takes one part, in
    bfloat16 or float16, and can be traced on an NVIDIA GPU only; "mosaic" is `tree_attention.attend`.
    """
    if kernel == "mosaic":
        from poss_jax import tree_attention  # Pallas' part for GPUs, which nothing else needs

        return tree_attention.attend(query, parts)
    parts = [Part(_copied(part.rows), part.mask) for part in parts]
    if kernel == "cudnn":
        ((keys_and_values, mask),) = parts
        return fused_attention(query, keys_and_values, None if mask is None else mask[:, None])
    rows = query.shape[1]
    chunks = rows // QUERY_CHUNK
    if chunks < 2 or rows % QUERY_CHUNK:
        return _attend(query, [Part(part.rows, _mask_of(part, 0, rows)) for part in parts])

    def attend_chunk(index: jax.Array) -> jax.Array:
        first = index * QUERY_CHUNK
        some = jax.lax.dynamic_slice_in_dim(query, first, QUERY_CHUNK, axis=1)
        return _attend(some, [Part(part.rows, _mask_of(part, first, QUERY_CHUNK)) for part in parts])

    attended = jax.lax.map(attend_chunk, jnp.arange(chunks))  # [chunks, b, QUERY_CHUNK, k, g, d]
    return jnp.moveaxis(attended, 0, 1).reshape(query.shape)


def _copied(rows: KeyValues | StackedLayer) -> KeyValues:
    """A layer by itself."""
    if isinstance(rows, StackedLayer):
        return KeyValues(rows.keys[:, rows.index], rows.values[:, rows.index])
    return rows


def fused_attention(query: jax.Array, rows: KeyValues, mask: jax.Array | None, *, return_residual: bool = False):
    """cuDNN's attention, in the layouts of `attention`; `mask` [b or 1, 1, t, s], None for causal. With
    `return_residual` also the logarithms of summed exponentials, [b, t, k * g], float32.
    """
    batch, count, heads, group, size = query.shape
    attended = jax.nn.dot_product_attention(
        query.reshape(batch, count, heads * group, size),
        *(jnp.swapaxes(side, 1, 2) for side in rows),  # [b, s, k, d]
        mask=mask,
        is_causal=mask is None,
        implementation="cudnn",
        return_residual=return_residual,
    )
    if return_residual:
        return attended[0].reshape(query.shape), attended[1]
    return attended.reshape(query.shape)


def causal(segments: jax.Array, first: int = 0, last: int | None = None) -> jax.Array:
    """[b, c, s]: whether query rows `first` to `last` (of all t if None) may see key rows up to `last`, where rows see
    themselves and those before them of the same segment. `segments` [b, t].
    """
    last = segments.shape[1] if last is None else last
    behind = jnp.arange(first, last)[:, None] >= jnp.arange(last)[None, :]
    return (segments[:, first:last, None] == segments[:, None, :last]) & behind


def _mask_of(part: Part, first: jax.Array | int, count: int) -> jax.Array:
    """The mask of `count` query rows from `first` on; a causal one is never whole in memory."""
    if part.mask is None:
        return (first + jnp.arange(count)[:, None] >= jnp.arange(part.rows.keys.shape[2]))[None]
    if isinstance(part.mask, Filled):
        return (jnp.arange(part.rows.keys.shape[2]) < part.mask.length[:, None])[:, None]
    if part.mask.shape[1] == 1:
        return part.mask
    return jax.lax.dynamic_slice_in_dim(part.mask, first, count, axis=1)


def _attend(query: jax.Array, parts: Sequence[Part]) -> jax.Array:
    batch, rows, heads, group, size = query.shape
    # [b, k, g * t, d]: both products become one matrix product per KV head, with keys and values as they lie.
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, heads, group * rows, size)
    scores = [_scores(query, part, group) for part in parts]  # m below: g * t
    # Joined by maximum and sum, since scores that are put beside each other would be written once more.
    highest = functools.reduce(jnp.maximum, (jnp.max(each, axis=-1, keepdims=True) for each in scores))
    attended, total = 0.0, 0.0
    for part, each in zip(parts, scores, strict=True):
        weights = jnp.exp(each - highest)
        total += jnp.sum(weights, axis=-1, keepdims=True)
        attended += _weighted(weights.astype(part.rows.values.dtype), part.rows.values)
    attended = (attended / total).reshape(batch, heads, group, rows, size).transpose(0, 3, 1, 2, 4)
    return attended.astype(query.dtype)


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sums [b, k, m, d], float32, of `values` [b, k, s, d] with `weights` [b, k, m, s].

    A lone row is multiplied twice. Of one, XLA for GPUs makes a sum over slots that wants values transposed, so that a
    program of rounds copies every cache of values when it begins and when it ends.
    """
    rows = weights.shape[2]
    if rows == 1:
        weights = jnp.concatenate([weights, weights], axis=2)
    summed = jnp.einsum("bkms,bksd->bkmd", weights, values, preferred_element_type=jnp.float32)
    return summed[:, :, :rows]


def _scores(query: jax.Array, part: Part, group: int) -> jax.Array:
    """[b, k, g * t, s], float32, of `query` [b, k, g * t, d]."""
    scores = jnp.einsum("bkmd,bksd->bkms", query, part.rows.keys, preferred_element_type=jnp.float32)
    batch, heads, queries, slots = scores.shape
    grouped = scores.reshape(batch, heads, group, queries // group, slots) * query.shape[-1] ** -0.5
    return jnp.where(part.mask[:, None, None], grouped, -jnp.inf).reshape(scores.shape)
