"""The kernel of `tree_attention`, in Pallas with the Mosaic GPU backend (H100).

A block takes 64 rows of one query head and one share (`splits`) of the keys, which come in blocks of `block` slots:
first the filled ones of the cache, then those of the tree. Nothing beyond the filled blocks is read and their number is
known to the kernel only, so a growing cache compiles nothing anew. Each block has an online softmax over its share.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from poss_jax.attention import KERNEL_TILE

ROWS = 64  # query rows of a block: what one warpgroup multiplies at once
LOWEST = -1e30  # running maximum before any key: finite, so that no difference of maxima is NaN
MASKED = float("-inf")
SWIZZLE_BYTES, NARROWEST_SWIZZLE = 128, 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that change speed, not results. `splits` None: as many as fill the device, see `default_splits`."""

    splits: int | None = None
    block: int = 64  # key slots per step: 64 or 128
    stages: int = 3  # key blocks in flight


class Heads(NamedTuple):
    """Where heads lie along an axis: the j-th of KV head i at stride * i + first + j."""

    stride: int
    first: int


class Lying(NamedTuple):
    """An array [b, rows, heads, d], and where in it the heads in question lie."""

    array: jax.Array
    heads: Heads


class Prefix(NamedTuple):
    """Of `keys` and `values` [n, k, s, d], batch row b sees the first length[b] slots of row places[b]; int32 both.
    What lies behind them may be anything finite.
    """

    keys: jax.Array
    values: jax.Array
    places: jax.Array
    length: jax.Array


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype):
    """Shared memory for matrices, in the layout that matrix products and swizzled copies agree on."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(SWIZZLE_BYTES, shape[-1] * size)
    if swizzle < NARROWEST_SWIZZLE:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((KERNEL_TILE, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


class _Layout(NamedTuple):
    """What the kernel knows when it is compiled. `group`: query heads of a KV head."""

    queries: Heads
    rows: tuple[Heads, Heads]  # keys and values
    group: int
    tuning: Tuning


def _buffers(size: int, dtype: jnp.dtype, drafted: int, tuning: Tuning) -> dict:
    """Shared memory of `_share`: the query, rings of key blocks and, for those of the tree, biases; their barriers."""
    bias_stages = min(tuning.stages, drafted // tuning.block)
    return {
        "query": _tiled((ROWS, size), dtype),
        "keys": _tiled((tuning.stages, tuning.block, size), dtype),
        "values": _tiled((tuning.stages, tuning.block, size), dtype),
        "bias": _tiled((bias_stages, ROWS, tuning.block), jnp.bfloat16),
        "query_ready": plgpu.Barrier(),
        "keys_ready": plgpu.Barrier(num_barriers=tuning.stages),
        "values_ready": plgpu.Barrier(num_barriers=tuning.stages),
        "bias_ready": plgpu.Barrier(num_barriers=bias_stages),
    }


class _Place(NamedTuple):
    """Which part of the work a block does; all traced integers."""

    batch: jax.Array
    head: jax.Array
    first_row: jax.Array
    split: jax.Array


def _share(layout: _Layout, refs, place: _Place, buffers):
    """Attends 64 rows of one head to one share of the keys.

    Returns the unnormalised sum [64, d]; a whole number close to the maximum of scores times log2(e) [64], from which
    the exponents of weights are counted; and the sum of weights [64]. A share without keys gives 0, LOWEST, 0.
    """
    query, keys, values, places, lengths, row_keys, row_values, bias = refs
    tuning, size = layout.tuning, query.shape[-1]
    block, stages = tuning.block, tuning.stages
    kv_head, of_group = lax.div(place.head, jnp.int32(layout.group)), lax.rem(place.head, jnp.int32(layout.group))
    mask_batch = place.batch if bias.shape[0] > 1 else 0
    cached, length = places[place.batch], lengths[place.batch]
    filled = lax.div(length + jnp.int32(block - 1), jnp.int32(block))  # blocks of the cache
    total = filled + jnp.int32(bias.shape[2] // block)
    start = lax.div(total * place.split, jnp.int32(tuning.splits))
    stop = lax.div(total * (place.split + 1), jnp.int32(tuning.splits))

    def rows_at(heads: Heads, first, count: int, of_group=0):
        return place.batch, pl.ds(first, count), kv_head * heads.stride + heads.first + of_group

    def bias_of(index):
        slot = lax.rem(index - filled, jnp.int32(buffers["bias"].shape[0]))
        return buffers["bias"].at[slot], buffers["bias_ready"].at[slot]

    def load(index):
        slot = lax.rem(index - start, jnp.int32(stages))

        def copy(some_keys, some_values):
            plgpu.copy_gmem_to_smem(some_keys, buffers["keys"].at[slot], buffers["keys_ready"].at[slot])
            plgpu.copy_gmem_to_smem(some_values, buffers["values"].at[slot], buffers["values_ready"].at[slot])

        @pl.when(index < filled)
        def _():
            at = (cached, kv_head, pl.ds(index * block, block))
            copy(keys.at[at], values.at[at])

        @pl.when(index >= filled)
        def _():
            first = (index - filled) * block
            at = (mask_batch, pl.ds(place.first_row, ROWS), pl.ds(first, block))
            plgpu.copy_gmem_to_smem(bias.at[at], *bias_of(index))
            at = [rows_at(heads, first, block) for heads in layout.rows]
            copy(row_keys.at[at[0]], row_values.at[at[1]])

    at = rows_at(layout.queries, place.first_row, ROWS, of_group)
    plgpu.copy_gmem_to_smem(query.at[at], buffers["query"], buffers["query_ready"])
    for stage in range(stages):
        pl.when(start + stage < stop)(functools.partial(load, start + stage))
    plgpu.barrier_wait(buffers["query_ready"])

    scale = size**-0.5 * math.log2(math.e)  # exp2 is the device's own exponential

    def step(index, carry, of_tree):
        attended, highest, total_weight = carry
        slot = lax.rem(index - start, jnp.int32(stages))
        plgpu.barrier_wait(buffers["keys_ready"].at[slot])

        def multiply(result):
            plgpu.wgmma(result, buffers["query"], buffers["keys"].at[slot].transpose((1, 0)))
            return result[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, block), jnp.float32))
        if of_tree:
            mask, ready = bias_of(index)
            plgpu.barrier_wait(ready)
            scores = scores + _read(mask).astype(jnp.float32)
        else:
            columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(columns < length - index * block, scores, MASKED)
        # Whole, so that shares are merged by changing exponents: see `tree_attention._merge`.
        near = lax.round(scores.max(axis=1) * scale, lax.RoundingMethod.TO_NEAREST_EVEN)
        new_highest = jnp.maximum(highest, near)
        kept = jnp.exp2(highest - new_highest)
        # Scaled here, where it is one instruction with the subtraction.
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
        total_weight = total_weight * kept + weights.sum(axis=1)
        attended = attended * lax.broadcast_in_dim(kept, attended.shape, [0])
        weights = weights.astype(query.dtype)
        plgpu.barrier_wait(buffers["values_ready"].at[slot])
        attended = _accumulate(attended, weights, buffers["values"].at[slot])
        # The product has ended, so its slot may be overwritten.
        pl.when(index + stages < stop)(functools.partial(load, index + stages))
        return attended, new_highest, total_weight

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    carry = (
        full((ROWS, size), 0, plgpu.Layout.WGMMA),
        full((ROWS,), LOWEST, plgpu.Layout.WGMMA.reduce(1)),
        full((ROWS,), 0, plgpu.Layout.WGMMA.reduce(1)),
    )
    turn = lax.min(lax.max(filled, start), stop)  # from the cache to the tree
    carry = lax.fori_loop(start, turn, functools.partial(step, of_tree=False), carry)
    return lax.fori_loop(turn, stop, functools.partial(step, of_tree=True), carry)


def _read(matrix) -> jax.Array:
    """A matrix in shared memory, spread over threads like the results of matrix products."""
    return plgpu.layout_cast(matrix[...], plgpu.Layout.WGMMA)


def _accumulate(attended, weights, values):
    """attended + weights @ values, where `values` [block, d] are in shared memory; waits for the result."""

    def multiply(result):
        plgpu.wgmma(result, weights, values)

    return pl.run_state(multiply)(plgpu.ACC.init(attended))


def _place() -> _Place:
    batch, head, tile, split = (lax.axis_index(name) for name in ("batch", "head", "tile", "split"))
    return _Place(batch, head, tile * ROWS, split)


def run(
    queries: Lying,
    rows: Sequence[Lying],
    prefix: Prefix,
    bias: jax.Array,
    shape: tuple[int, ...],
    group: int,
    tuning: Tuning,
    interpret: object,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each share of the keys gives for `shape` [b, t, heads, d], `group` heads to a KV head: the softmax over it
    alone, and of every row what its weights were counted from and their sum, both float32 [splits, b, heads, t or
    more]. `rows`: keys and values.

    A single share is all: [1, b, t or more, heads, d]. Of several, heads come before rows, as in what belongs to rows,
    which XLA would transpose in kernels of their own.
    """
    batch, count, heads, size = shape
    splits, dtype = tuning.splits, queries.array.dtype
    padded = count if count <= KERNEL_TILE else pl.cdiv(count, KERNEL_TILE) * KERNEL_TILE
    tiles = pl.cdiv(padded, ROWS)
    layout = _Layout(queries.heads, tuple(side.heads for side in rows), group, tuning)

    def kernel(*refs, attended_buffer, highest_buffer, total_buffer, **buffers):
        *inputs, attended_out, highest_out, total_out = refs
        place = _place()
        attended, highest, total = _share(layout, inputs, place, buffers)
        inverse = 1.0 / jnp.maximum(total, 1e-30)  # there is a share without keys
        attended = attended * lax.broadcast_in_dim(inverse, attended.shape, [0])
        attended_buffer[...] = attended.astype(dtype)
        highest_buffer[...], total_buffer[...] = highest, total
        plgpu.commit_smem()
        some = pl.ds(place.first_row, ROWS)
        at = (place.head, some) if splits > 1 else (some, place.head)
        plgpu.copy_smem_to_gmem(attended_buffer, attended_out.at[(place.split, place.batch, *at)])
        for of_row, out in ((highest_buffer, highest_out), (total_buffer, total_out)):
            plgpu.copy_smem_to_gmem(of_row, out.at[place.split, place.batch, place.head, some])
        plgpu.wait_smem_to_gmem(0)

    by_head = (heads, padded) if splits > 1 else (padded, heads)
    of_rows = jax.ShapeDtypeStruct((splits, batch, heads, tiles * ROWS), jnp.float32)
    results = {
        "attended_buffer": _tiled((ROWS, size), dtype),
        "highest_buffer": plgpu.SMEM((ROWS,), jnp.float32),
        "total_buffer": plgpu.SMEM((ROWS,), jnp.float32),
    }
    call = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((splits, batch, *by_head, size), dtype), of_rows, of_rows),
        scratch_types=_buffers(size, dtype, bias.shape[2], tuning) | results,
        grid=(splits, heads, tiles, batch),
        grid_names=("split", "head", "tile", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(queries.array, *prefix, *(side.array for side in rows), bias)
