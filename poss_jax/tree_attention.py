"""Attention of a token tree over a KV cache's filled slots and the tree's own rows, as one Hopper kernel.

Pallas, Mosaic GPU backend (H100). A block takes 64 rows of one query head and one share (`splits`) of the keys, which
come in blocks of `block` slots: first the filled ones of the cache, then those of the tree. Nothing beyond the filled
blocks is read and their number is known to the kernel only, so a growing cache compiles nothing anew. Each block has
an online softmax over its share; the shares are merged in shared memory, by the blocks of a cluster (`merge`
"cluster"), or by XLA ("xla").
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

from poss_jax.attention import KERNEL_HEAD_SIZES, KERNEL_TILE, Filled, KeyValues, Part

ROWS = 64  # query rows of a block: what one warpgroup multiplies at once
LOWEST = -1e30  # running maximum before any key: finite, so that no difference of maxima is NaN
MASKED = float("-inf")
SWIZZLE_BYTES, NARROWEST_SWIZZLE = 128, 32
LOGARITHM_COLUMNS = 8  # a row's logarithm is sent that many times over: the narrowest matrix of that layout
MAX_CLUSTER = 8  # the largest cluster that every Hopper accepts
MULTIPROCESSORS = 132
DTYPES = (jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that change speed, not results. `splits` None: as many as fill the device, see `default_splits`."""

    splits: int | None = None
    block: int = 64  # key slots per step: 64 or 128
    stages: int = 3  # key blocks in flight
    merge: str = "cluster"  # or "xla"
    partial: jnp.dtype | None = None  # dtype of a share's result in "xla"; None: the query's


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
    tuning = Tuning(merge="cluster" if query.shape[1] == 1 or query.shape[0] > 4 else "xla")
    return tree_attention(query, prefix.rows, prefix.mask.length, rows, tree_bias(mask, query.shape[3]), tuning)


def tree_bias(mask: jax.Array, group: int, block: int = Tuning.block) -> jax.Array:
    """What `tree_attention` adds to scores of tree rows: 0 where `mask` [b or 1, t, r] is true, else minus infinity.

    [b or 1, t padded to 8, r padded to `block`], bfloat16; the same for all layers, so computed once a pass. A lone
    query row (t = 1) is repeated `group` times, since its query heads share a block.
    """
    if mask.shape[1] == 1:
        mask = jnp.repeat(mask, group, axis=1)
    padded = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % KERNEL_TILE), (0, -mask.shape[2] % block)))
    return jnp.where(padded, 0.0, MASKED).astype(jnp.bfloat16)


def default_splits(blocks: int, slots: int, block: int, merge: str = Tuning.merge) -> int:
    """Shares of the keys: a power of two such that `blocks` (without shares) times shares is at most one wave."""
    most = min(MAX_CLUSTER if merge == "cluster" else 32, pl.cdiv(slots, block) + 1)
    splits = 1
    while splits * 2 <= most and blocks * splits * 2 <= MULTIPROCESSORS:
        splits *= 2
    return splits


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))  # the layers share one lowering
def tree_attention(
    query: jax.Array,
    prefix: KeyValues,
    prefix_length: jax.Array,
    rows: KeyValues,
    bias: jax.Array,
    tuning: Tuning = Tuning(),
    interpret: object = None,
) -> jax.Array:
    """One softmax over the first prefix_length[b] slots of `prefix` [b, k, s, d] and `rows` [b, k, r, d] as masked.

    `query` [b, t, k, g, d], rotated, gives [b, t, k, g, d] in its dtype. `bias` is `tree_bias` of the mask with
    `tuning.block`; every query row must see a key. Slots from prefix_length[b] (int32, 0 to s) on may hold anything
    finite. `interpret`: parameters of the CPU interpreter, for tests.
    """
    batch, count, heads, group, size = query.shape
    _check(query, prefix, prefix_length, rows, bias, tuning)
    by_head = query.reshape(batch, count, heads * group, size)
    if count == 1:  # a block of 64 rows for all heads of a group, instead of one for each: [b * k as b, g as t, 1, d]
        by_head = query.reshape(batch * heads, group, 1, size)
        prefix, rows = (KeyValues(*(_each_head(side) for side in pair)) for pair in (prefix, rows))
        prefix_length = jnp.repeat(prefix_length, heads)
        bias = bias if bias.shape[0] == 1 else jnp.repeat(bias, heads, axis=0)
    splits = tuning.splits
    if splits is None:
        blocks = by_head.shape[0] * by_head.shape[2] * pl.cdiv(by_head.shape[1], ROWS)
        splits = default_splits(blocks, prefix.keys.shape[2], tuning.block, tuning.merge)
    run = _attend_in_clusters if tuning.merge == "cluster" else _attend_and_merge
    inputs = (_pad(by_head, 1), *prefix, prefix_length, *(_pad(side, 2) for side in rows), bias)
    attended = run(inputs, by_head.shape[1], dataclasses.replace(tuning, splits=splits), interpret)
    return attended.reshape(query.shape)


def _each_head(rows: jax.Array) -> jax.Array:
    """Keys or values [b, k, s, d] with every head a batch row of its own, [b * k, 1, s, d]."""
    return rows.reshape(-1, 1, *rows.shape[2:])


def _pad(array: jax.Array, axis: int) -> jax.Array:
    """Zeros after the end of `axis`, to whole tiles; no copy if there is one tile or nothing to add.

    Of a single tile, what lies beyond the array reads as zeros, as do all tiles beyond it.
    """
    size = array.shape[axis]
    if size <= KERNEL_TILE or size % KERNEL_TILE == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -size % KERNEL_TILE)
    return jnp.pad(array, widths)


def _check(query, prefix, prefix_length, rows, bias, tuning):
    batch, count, heads, group, size = query.shape
    if size not in KERNEL_HEAD_SIZES:
        raise ValueError(f"head size {size} is not one of {KERNEL_HEAD_SIZES}")
    dtypes = {jnp.dtype(side.dtype) for side in (query, *prefix, *rows)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(dtype) for dtype in DTYPES}:
        raise ValueError(f"query, keys and values must all be bfloat16 or all float16, not {sorted(map(str, dtypes))}")
    slots, drafted = prefix.keys.shape[2], rows.keys.shape[2]
    if slots % KERNEL_TILE:
        raise ValueError(f"{slots} cache slots are not a multiple of {KERNEL_TILE}")
    for name, pair, length in (("prefix", prefix, slots), ("rows", rows, drafted)):
        for side in pair:
            if side.shape != (batch, heads, length, size):
                raise ValueError(f"{name} has shape {side.shape}, expected {(batch, heads, length, size)}")
    if prefix_length.shape != (batch,) or prefix_length.dtype != jnp.int32:
        raise ValueError(f"prefix_length must be int32 [{batch}], not {prefix_length.dtype} {prefix_length.shape}")
    bias_rows = group if count == 1 else count
    expected = (pl.cdiv(bias_rows, KERNEL_TILE) * KERNEL_TILE, pl.cdiv(drafted, tuning.block) * tuning.block)
    if bias.shape[0] not in (1, batch) or bias.shape[1:] != expected or bias.dtype != jnp.bfloat16:
        raise ValueError(f"bias {bias.dtype} {bias.shape} is not tree_bias(mask, {group}, {tuning.block})")
    if count == 1 and group > ROWS:
        raise ValueError(f"{group} query heads per KV head exceed {ROWS}")
    if tuning.block not in (64, 128) or tuning.stages < 2 or tuning.merge not in ("cluster", "xla"):
        raise ValueError(f"unsupported tuning: {tuning}")
    if tuning.merge == "cluster" and tuning.splits not in (None, 1, 2, 4, 8):
        raise ValueError(f"a cluster has 1, 2, 4 or 8 splits, not {tuning.splits}")


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype):
    """Shared memory for matrices, in the layout that matrix products and swizzled copies agree on."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(SWIZZLE_BYTES, shape[-1] * size)
    if swizzle < NARROWEST_SWIZZLE:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((KERNEL_TILE, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _buffers(query: jax.Array, bias: jax.Array, tuning: Tuning) -> dict:
    """Shared memory of `_share`: the query, rings of key blocks and, for those of the tree, biases; their barriers."""
    size, dtype = query.shape[-1], query.dtype
    bias_stages = min(tuning.stages, bias.shape[2] // tuning.block)
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


def _share(refs, place: _Place, buffers, tuning: Tuning):
    """Attends 64 rows of one head to one share of the keys.

    Returns the unnormalised sum [64, d], the maximum of scores times log2(e) [64] and the sum of exponentials [64].
    A share without keys gives 0, LOWEST, 0.
    """
    query, keys, values, lengths, row_keys, row_values, bias = refs
    block, stages, size = tuning.block, tuning.stages, query.shape[-1]
    kv_head = lax.div(place.head, jnp.int32(query.shape[2] // keys.shape[1]))
    mask_batch = place.batch if bias.shape[0] > 1 else 0
    length = lengths[place.batch]
    filled = lax.div(length + jnp.int32(block - 1), jnp.int32(block))  # blocks of the cache
    total = filled + jnp.int32(bias.shape[2] // block)
    start = lax.div(total * place.split, jnp.int32(tuning.splits))
    stop = lax.div(total * (place.split + 1), jnp.int32(tuning.splits))

    def bias_of(index):
        slot = lax.rem(index - filled, jnp.int32(buffers["bias"].shape[0]))
        return buffers["bias"].at[slot], buffers["bias_ready"].at[slot]

    def load(index):
        slot = lax.rem(index - start, jnp.int32(stages))

        def copy(source_keys, source_values, first):
            at = (place.batch, kv_head, pl.ds(first, block))
            plgpu.copy_gmem_to_smem(source_keys.at[at], buffers["keys"].at[slot], buffers["keys_ready"].at[slot])
            plgpu.copy_gmem_to_smem(source_values.at[at], buffers["values"].at[slot], buffers["values_ready"].at[slot])

        @pl.when(index < filled)
        def _():
            copy(keys, values, index * block)

        @pl.when(index >= filled)
        def _():
            first = (index - filled) * block
            at = (mask_batch, pl.ds(place.first_row, ROWS), pl.ds(first, block))
            plgpu.copy_gmem_to_smem(bias.at[at], *bias_of(index))
            copy(row_keys, row_values, first)

    at = (place.batch, pl.ds(place.first_row, ROWS), place.head)
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
        new_highest = jnp.maximum(highest, scores.max(axis=1) * scale)
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


def _normalised(attended, highest, total_weight):
    """Attended rows of a share [64, d] and the binary logarithm of its summed exponentials [64]; no keys: 0, -inf."""
    inverse = 1.0 / jnp.maximum(total_weight, 1e-30)
    return attended * lax.broadcast_in_dim(inverse, attended.shape, [0]), highest + jnp.log2(total_weight)


def _call(kernel, out_type, scratch, grid, splits, in_cluster, interpret):
    """`kernel` over `grid` (heads, tiles of rows, batch) times `splits`, the latter within a cluster or not."""
    names = ("head", "tile", "batch")
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid if in_cluster else (splits, *grid),
        grid_names=names if in_cluster else ("split", *names),
        cluster=(splits,) if in_cluster else (),
        cluster_names=("split",) if in_cluster else (),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _place() -> _Place:
    batch, head, tile, split = (lax.axis_index(name) for name in ("batch", "head", "tile", "split"))
    return _Place(batch, head, tile * ROWS, split)


def _attend_and_merge(inputs, count: int, tuning: Tuning, interpret) -> jax.Array:
    """[b, count, heads, d]; each share's result goes to memory, where XLA merges them."""
    query = inputs[0]
    batch, padded, heads, size = query.shape
    tiles, dtype = pl.cdiv(padded, ROWS), jnp.dtype(tuning.partial or query.dtype)

    def kernel(*refs, attended_buffer, logarithm_buffer, **buffers):
        *inputs, attended_out, logarithm_out = refs
        place = _place()
        attended, logarithm = _normalised(*_share(inputs, place, buffers, tuning))
        attended_buffer[...] = attended.astype(dtype)
        logarithm_buffer[...] = logarithm
        plgpu.commit_smem()
        some_rows = pl.ds(place.first_row, ROWS)
        plgpu.copy_smem_to_gmem(attended_buffer, attended_out.at[place.split, place.batch, some_rows, place.head])
        plgpu.copy_smem_to_gmem(logarithm_buffer, logarithm_out.at[place.split, place.batch, place.head, some_rows])
        plgpu.wait_smem_to_gmem(0)

    scratch = _buffers(query, inputs[-1], tuning) | {
        "attended_buffer": _tiled((ROWS, size), dtype),
        "logarithm_buffer": plgpu.SMEM((ROWS,), jnp.float32),
    }
    out_type = (
        jax.ShapeDtypeStruct((tuning.splits, batch, padded, heads, size), dtype),
        jax.ShapeDtypeStruct((tuning.splits, batch, heads, tiles * ROWS), jnp.float32),
    )
    run = _call(kernel, out_type, scratch, (heads, tiles, batch), tuning.splits, False, interpret)
    attended, logarithm = run(*inputs)
    attended, logarithm = attended[:, :, :count], logarithm[..., :count]
    weights = jnp.exp2(logarithm - logarithm.max(axis=0))  # every row sees a key: the maximum is finite
    weights = (weights / weights.sum(axis=0)).swapaxes(2, 3)[..., None]  # [splits, b, t, heads, 1]
    return (attended * weights).sum(axis=0).astype(query.dtype)


def _attend_in_clusters(inputs, count: int, tuning: Tuning, interpret) -> jax.Array:
    """[b, count, heads, d]; the shares of a head and 64 rows are a cluster, where each merges a strip of columns."""
    query = inputs[0]
    batch, padded, heads, size = query.shape
    splits = tuning.splits
    strip = size // splits

    def kernel(*refs, strips, logarithms, sent, merged_buffer, **buffers):
        *inputs, out = refs
        place = _place()
        attended, logarithm = _normalised(*_share(inputs, place, buffers, tuning))
        if splits > 1:
            logarithm = lax.broadcast_in_dim(logarithm, (ROWS, LOGARITHM_COLUMNS), [0])
            for peer in range(splits):
                send = functools.partial(plgpu.async_store_smem, cluster_idx=jnp.int32(peer), cluster_dim="split")
                send(attended[:, peer * strip : (peer + 1) * strip], strips.at[place.split], sent)
                send(logarithm, logarithms.at[place.split], sent)
            # Every block waits for all that is sent to it, so none ends while others write to its memory.
            plgpu.barrier_wait(sent)
            attended = _merge(strips, logarithms, splits)
        merged_buffer[...] = attended.astype(query.dtype)
        plgpu.commit_smem()
        at = (place.batch, pl.ds(place.first_row, ROWS), place.head, pl.ds(place.split * strip, strip))
        plgpu.copy_smem_to_gmem(merged_buffer, out.at[at])
        plgpu.wait_smem_to_gmem(0)

    scratch = _buffers(query, inputs[-1], tuning) | {
        "strips": _tiled((splits, ROWS, strip), jnp.float32),
        "logarithms": _tiled((splits, ROWS, LOGARITHM_COLUMNS), jnp.float32),
        "sent": plgpu.Barrier(num_arrivals=2 * splits),
        "merged_buffer": _tiled((ROWS, strip), query.dtype),
    }
    out_type = jax.ShapeDtypeStruct(query.shape, query.dtype)
    grid = (heads, pl.cdiv(padded, ROWS), batch)
    return _call(kernel, out_type, scratch, grid, splits, True, interpret)(*inputs)[:, :count]


def _merge(strips, logarithms, splits: int) -> jax.Array:
    """The strip [64, d / splits] of the softmax over all shares, of each share's strip and logarithm."""
    each = [_read(logarithms.at[split]).max(axis=1) for split in range(splits)]
    highest = functools.reduce(jnp.maximum, each)  # finite, as every row sees a key
    weights = [jnp.exp2(logarithm - highest) for logarithm in each]
    inverse = 1.0 / sum(weights)
    merged = 0.0
    for split, weight in enumerate(weights):
        part = _read(strips.at[split])
        merged += part * lax.broadcast_in_dim(weight * inverse, part.shape, [0])
    return merged
