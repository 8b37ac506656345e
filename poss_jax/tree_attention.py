"""Attention of a token tree over a KV cache's filled slots and the tree's own rows, by a Hopper kernel.

What the kernel of `tree_attention_kernel` is given and where it finds it, into how many shares the keys are cut, and
how XLA merges what came of them, in one kernel more.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from poss_jax.attention import KERNEL_HEAD_SIZES, KERNEL_TILE, Filled, KeyValues, Part, StackedLayer, as_rows
from poss_jax.tree_attention_kernel import MASKED, ROWS, Heads, Lying, Prefix, Tuning, run

MOST_SPLITS = 32
MULTIPROCESSORS = 132
DTYPES = (jnp.bfloat16, jnp.float16)
BEST = Tuning()


def prefix_of(part: Part) -> Prefix:
    """Of a part that is `Filled`. Of a layer among others the whole array is passed on, and no slice copied."""
    rows, length = part.rows, part.mask.length
    places = np.arange(length.shape[0], dtype=np.int32)  # constants: otherwise a kernel in every layer
    if not isinstance(rows, StackedLayer):
        return Prefix(*rows, jnp.asarray(places), length)
    sides = (side.reshape(-1, *side.shape[2:]) for side in (rows.keys, rows.values))
    return Prefix(*sides, jnp.asarray(places * rows.keys.shape[1] + rows.index), length)


def attend(query: jax.Array, parts: Sequence[Part]) -> jax.Array:
    """`attention` over one part that is `Filled` and at most one with a mask, for heads of 64 or 128 in bfloat16 or
    float16 on a Hopper GPU.
    """
    (prefix,) = (part for part in parts if isinstance(part.mask, Filled))
    masked = [part for part in parts if part is not prefix]
    if not masked:  # a row that nobody sees
        batch, count, heads, _, size = query.shape
        none = jnp.zeros((batch, heads, 1, size), query.dtype)
        masked = [Part(KeyValues(none, none), jnp.zeros((1, count, 1), bool))]
    ((rows, mask),) = masked
    return tree_attention(query, prefix_of(prefix), rows, tree_bias(mask, query.shape[3]))


def attend_to_themselves(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, prefix: Part
) -> tuple[jax.Array, KeyValues]:
    """`attention.self_attention`. The kernel finds queries, keys and values in one array [b, t, k, g + 2, d]: that is
    one small kernel in front of it and not one for each. What is kept of keys and values is read from there too; the
    barrier is there because the compiler knows that they are `key` and `value`, and would compute those once more.
    """
    fused = jnp.concatenate([query, key[..., None, :], value[..., None, :]], axis=3)
    fused = lax.optimization_barrier(fused)
    attended = fused_tree_attention(fused, prefix_of(prefix), tree_bias(mask, query.shape[3]))
    return attended, as_rows(fused[..., -2, :], fused[..., -1, :])


def tree_bias(mask: jax.Array, group: int, block: int = BEST.block) -> jax.Array:
    """What `tree_attention` adds to scores of tree rows: 0 where `mask` [b or 1, t, r] is true, else minus infinity.

    [b or 1, t padded to 8, r padded to `block`], bfloat16; the same for all layers, so computed once a pass. A lone
    query row (t = 1) is repeated `group` times, since its query heads share a block.
    """
    if mask.shape[1] == 1:
        mask = jnp.repeat(mask, group, axis=1)
    padded = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % KERNEL_TILE), (0, -mask.shape[2] % block)))
    return jnp.where(padded, 0.0, MASKED).astype(jnp.bfloat16)


def default_splits(blocks: int, slots: int, block: int) -> int:
    """Shares of the keys: a power of two such that `blocks` (without shares) times shares is at most one wave."""
    most = min(MOST_SPLITS, pl.cdiv(slots, block) + 1)
    splits = 1
    while splits * 2 <= most and blocks * splits * 2 <= MULTIPROCESSORS:
        splits *= 2
    return splits


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))  # the layers share one lowering
def tree_attention(
    query: jax.Array,
    prefix: Prefix,
    rows: KeyValues,
    bias: jax.Array,
    tuning: Tuning = BEST,
    interpret: object = None,
) -> jax.Array:
    """One softmax over `prefix` and `rows` [b, k, r, d] as masked.

    `query` [b, t, k, g, d], rotated, gives [b, t, k, g, d] in its dtype. `bias` is `tree_bias` of the mask with
    `tuning.block`; every query row must see a key. `interpret`: parameters of the CPU interpreter, for tests.
    """
    batch, count, heads, group, size = query.shape
    _check(query.shape, query.dtype, prefix, bias, rows.keys.shape[2], tuning)
    for side in rows:
        if side.shape != (expected := (batch, heads, rows.keys.shape[2], size)) or side.dtype != query.dtype:
            raise ValueError(f"rows are {side.dtype} {side.shape}, expected {query.dtype} {expected}")
    if count == 1:
        queries = Lying(query.reshape(batch * heads, group, 1, size), Heads(0, 0))
        sides = [Lying(side.reshape(batch * heads, -1, 1, size), Heads(0, 0)) for side in rows]
    else:
        queries = Lying(query.reshape(batch, count, heads * group, size), Heads(group, 0))
        sides = [Lying(jnp.swapaxes(side, 1, 2), Heads(1, 0)) for side in rows]
    return _attend(queries, sides, prefix, bias, query.shape, tuning, interpret)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def fused_tree_attention(
    fused: jax.Array,
    prefix: Prefix,
    bias: jax.Array,
    tuning: Tuning = BEST,
    interpret: object = None,
) -> jax.Array:
    """`tree_attention` of rows to themselves: `fused` [b, t, k, g + 2, d] has for each KV head its g queries, then its
    key, then its value. Gives [b, t, k, g, d].
    """
    batch, count, heads, each, size = fused.shape
    group = each - 2
    shape = (batch, count, heads, group, size)
    _check(shape, fused.dtype, prefix, bias, count, tuning)
    if count == 1:  # beyond the queries come two rows that are none: what they gather is left out
        queries = Lying(fused.reshape(batch * heads, each, 1, size), Heads(0, 0))
        sides = [Lying(fused.reshape(batch * heads, 1, each, size), Heads(0, side)) for side in (group, group + 1)]
    else:
        queries = Lying(fused.reshape(batch, count, heads * each, size), Heads(each, 0))
        sides = [queries._replace(heads=Heads(each, side)) for side in (group, group + 1)]
    return _attend(queries, sides, prefix, bias, shape, tuning, interpret)


def _attend(
    queries: Lying,
    rows: Sequence[Lying],
    prefix: Prefix,
    bias: jax.Array,
    shape: tuple[int, ...],
    tuning: Tuning,
    interpret: object,
) -> jax.Array:
    """[b, t, k, g, d] = `shape`. A lone row comes with every KV head as a batch row, and its query heads as rows: one
    block for the heads of a group, instead of one for each.
    """
    batch, count, heads, group, size = shape
    if count == 1:
        prefix = _each_head(prefix, heads)
        bias = bias if bias.shape[0] == 1 else jnp.repeat(bias, heads, axis=0)
        batch, count, heads, group = batch * heads, group, 1, 1
    splits = tuning.splits
    if splits is None:
        blocks = batch * heads * group * pl.cdiv(count, ROWS)
        splits = default_splits(blocks, prefix.keys.shape[2], tuning.block)
    queries, *rows = (source._replace(array=_on_its_own(_pad(source.array))) for source in (queries, *rows))
    tuning = dataclasses.replace(tuning, splits=splits)
    attended, highest, total = run(
        queries, rows, prefix, bias, (batch, count, heads * group, size), group, tuning, interpret
    )
    if splits == 1:
        return attended[0, :, :count].reshape(shape)
    shares = attended[..., :count, :], highest[..., :count], total[..., :count]
    return jnp.swapaxes(_merge(*map(tuple, shares)), 1, 2).reshape(shape)


def _each_head(prefix: Prefix, heads: int) -> Prefix:
    """With every KV head as a row of its own."""
    sides = (side.reshape(-1, 1, *side.shape[2:]) for side in (prefix.keys, prefix.values))
    places = (prefix.places[:, None] * heads + np.arange(heads, dtype=np.int32)).reshape(-1)
    return Prefix(*sides, places, jnp.repeat(prefix.length, heads))


def _on_its_own(array: jax.Array) -> jax.Array:
    """No part of another array. The kernel wants addresses that are multiples of 256 bytes, and of rows cut out of
    others XLA passes on the address of the first: row 7 of [47, 3, 64] in bfloat16 begins at byte 2,688.
    """
    return lax.optimization_barrier(array)


def _pad(array: jax.Array) -> jax.Array:
    """Zeros after the last row of [b, rows, heads, d], to whole tiles; no copy if there is one tile or nothing to add.

    Of a single tile, what lies beyond the array reads as zeros, as do all tiles beyond it.
    """
    size = array.shape[1]
    if size <= KERNEL_TILE or size % KERNEL_TILE == 0:
        return array
    return jnp.pad(array, ((0, 0), (0, -size % KERNEL_TILE), (0, 0), (0, 0)))


def _check(shape, dtype, prefix: Prefix, bias: jax.Array, drafted: int, tuning: Tuning) -> None:
    """Raises ValueError for what the kernel is not written for; `shape` [b, t, k, g, d], and `drafted` rows besides."""
    batch, count, heads, group, size = shape
    if size not in KERNEL_HEAD_SIZES:
        raise ValueError(f"head size {size} is not one of {KERNEL_HEAD_SIZES}")
    dtypes = {jnp.dtype(each) for each in (dtype, prefix.keys.dtype, prefix.values.dtype)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(each) for each in DTYPES}:
        raise ValueError(f"query, keys and values must all be bfloat16 or all float16, not {sorted(map(str, dtypes))}")
    slots = prefix.keys.shape[2]
    if slots % KERNEL_TILE:
        raise ValueError(f"{slots} cache slots are not a multiple of {KERNEL_TILE}")
    for side in (prefix.keys, prefix.values):
        if side.shape != (expected := (prefix.keys.shape[0], heads, slots, size)):
            raise ValueError(f"prefix has shape {side.shape}, expected {expected}")
    for name in ("places", "length"):
        each = getattr(prefix, name)
        if each.shape != (batch,) or each.dtype != jnp.int32:
            raise ValueError(f"{name} of the prefix must be int32 [{batch}], not {each.dtype} {each.shape}")
    bias_rows = group if count == 1 else count
    expected = (pl.cdiv(bias_rows, KERNEL_TILE) * KERNEL_TILE, pl.cdiv(drafted, tuning.block) * tuning.block)
    if bias.shape[0] not in (1, batch) or bias.shape[1:] != expected or bias.dtype != jnp.bfloat16:
        raise ValueError(f"bias {bias.dtype} {bias.shape} is not tree_bias(mask, {group}, {tuning.block})")
    if count == 1 and group > ROWS:
        raise ValueError(f"{group} query heads per KV head exceed {ROWS}")
    if tuning.block not in (64, 128) or tuning.stages < 2 or tuning.splits == 0:
        raise ValueError(f"unsupported tuning: {tuning}")


def _merge(attended: Sequence[jax.Array], highest: Sequence[jax.Array], total: Sequence[jax.Array]) -> jax.Array:
    """The softmax over all shares [b, heads, t, d] from that of each, and from what its weights were counted from and
    their sum, both [b, heads, t].

    A difference of whole numbers goes into the exponent of a float as it is. Of exponentials XLA would make a kernel of
    its own, as of sums over an axis of shares.
    """
    top = functools.reduce(jnp.maximum, highest)  # every row sees a key in some share: one at least is near 0
    powers = [jnp.maximum(each - top, -126.0).astype(jnp.int32) for each in highest]
    exponentials = [lax.bitcast_convert_type((power + 127) << 23, jnp.float32) for power in powers]
    weights = [each * exponential for each, exponential in zip(total, exponentials, strict=True)]
    summed = sum(part * weight[..., None] for part, weight in zip(attended, weights, strict=True))
    return (summed / sum(weights)[..., None]).astype(attended[0].dtype)
