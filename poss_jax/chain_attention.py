"""Attention of the training unroll: over the target's rows, and over each chain's own drafted ones.

Its gradient is written out, because it needs so little: from the sum of a row's exponentials all weights come back in
one pass, where differentiating a softmax would keep or recompute several arrays of t * t. Queries are taken in chunks
that see no key behind them, which saves up to half of the products.
Extra shape letters here: m steps of the chain, c query rows of a chunk, s key rows that a chunk may see.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from poss_jax.attention import KeyValues, causal, fused_attention

QUERY_CHUNK = 256
MOST_CHUNKS = 8  # each is compiled for itself
KEPT = ("attended", "log_sum")  # worth keeping for the backward pass where the rest is recomputed


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def chain_attention(
    query: jax.Array,
    target: KeyValues,
    chain: KeyValues,
    segments: jax.Array,
    step: jax.Array,
    kernel: str = "plain",
) -> jax.Array:
    """One softmax for each query row: over the target's rows of its segment up to itself, from which its chain
    started, and over its chain's own rows of steps 1 .. `step`.

    `query` [b, t, k, g, d], `target` [b, k, t, d], `chain` [m, b, k, t, d], of which row t belongs to query row t.
    Returns [b, t, k, g, d] in the dtype of `query`; scores and softmax are float32. Segment 0 is padding, whose rows
    see each other and mean nothing. `kernel`: of the forward pass over the target's rows, see `attention`.
    """
    return _forward(query, target, chain, segments, step, kernel)[0]


def _forward(query, target, chain, segments, step, kernel):
    attend = _attend_fused if kernel == "cudnn" else _attend_in_chunks
    attended, log_sum = attend(query, target, chain, segments, step)
    attended = checkpoint_name(attended.astype(query.dtype), "attended")
    log_sum = checkpoint_name(log_sum, "log_sum")
    return attended, (query, target, chain, segments, step, attended, log_sum)


def _attend_in_chunks(query, target, chain, segments, step):
    """Attended [b, t, k, g, d] float32, and the logarithm of each row's summed exponentials [b, k, g, t]."""
    attended, log_sum = [], []
    for first, last in _chunks(query.shape[1]):
        some = _by_head(query[:, first:last])  # [b, k, g, c, d]
        scores, chain_scores = _scores(some, target, chain, segments, step, first, last)
        highest = jnp.maximum(scores.max(axis=-1), chain_scores.max(axis=0))  # [b, k, g, c]
        total = jnp.exp(scores - highest[..., None]).sum(axis=-1) + jnp.exp(chain_scores - highest).sum(axis=0)
        log_sum.append(highest + jnp.log(total))
        weights, chain_weights = _weights(scores, chain_scores, log_sum[-1], query.dtype)
        mixed = _matrix("bkms,bksd->bkmd", weights, target.values[:, :, :last], some.shape)
        own = chain.values[:, :, :, None, first:last].astype(jnp.float32)
        attended.append(_by_row(mixed + jnp.sum(chain_weights[..., None] * own, axis=0)))
    return jnp.concatenate(attended, axis=1), jnp.concatenate(log_sum, axis=-1)


def _attend_fused(query, target, chain, segments, step):
    """The same from a fused kernel over the target's rows and its sums of exponentials."""
    seen = causal(segments)[:, None]
    mixed, target_log_sum = fused_attention(query, target, seen, return_residual=True)
    target_log_sum = target_log_sum.reshape(query.shape[:-1]).transpose(0, 2, 3, 1)  # [b, k, g, t]
    chain_scores = _chain_scores(_by_head(query), chain, step, 0, query.shape[1])
    log_sum = jnp.logaddexp(target_log_sum, jax.nn.logsumexp(chain_scores, axis=0))
    own = chain.values[:, :, :, None].astype(jnp.float32)
    own = jnp.sum(jnp.exp(chain_scores - log_sum)[..., None] * own, axis=0)
    share = jnp.exp(target_log_sum - log_sum)[..., None]
    return _by_row(share * _by_head(mixed.astype(jnp.float32)) + own), log_sum


def _backward(kernel, kept, slope):
    query, target, chain, segments, step, attended, log_sum = kept
    scale = query.shape[-1] ** -0.5
    query_slopes, chain_slopes = [], []
    target_slopes = KeyValues(*(jnp.zeros(part.shape, jnp.float32) for part in target))
    for first, last in _chunks(query.shape[1]):
        some, some_slope = _by_head(query[:, first:last]), _by_head(slope[:, first:last])
        scores, chain_scores = _scores(some, target, chain, segments, step, first, last)
        weights, chain_weights = _weights(scores, chain_scores, log_sum[..., first:last], query.dtype)
        wide, wide_slope = some.astype(jnp.float32), some_slope.astype(jnp.float32)
        # What all scores of a row share: sum over keys of weight * slope of weight, which is slope . attended.
        shared = jnp.sum(wide_slope * _by_head(attended[:, first:last]), axis=-1)
        weight_slopes = _matrix("bkmd,bksd->bkms", some_slope, target.values[:, :, :last], scores.shape)
        score_slopes = (scale * weights * (weight_slopes - shared[..., None])).astype(query.dtype)
        own_keys, own_values = (part[:, :, :, None, first:last].astype(jnp.float32) for part in chain)
        own_slopes = scale * chain_weights * (jnp.sum(wide_slope * own_values, axis=-1) - shared)  # [m, b, k, g, c]
        query_slope = _matrix("bkms,bksd->bkmd", score_slopes, target.keys[:, :, :last], some.shape)
        query_slopes.append(_by_row(query_slope + jnp.sum(own_slopes[..., None] * own_keys, axis=0)))
        target_slopes = KeyValues(
            target_slopes.keys.at[:, :, :last].add(_gathered("bkms,bkmd->bksd", score_slopes, some)),
            target_slopes.values.at[:, :, :last].add(_gathered("bkms,bkmd->bksd", weights, some_slope)),
        )
        chain_slopes.append(
            KeyValues(
                jnp.sum(own_slopes[..., None] * wide, axis=3), jnp.sum(chain_weights[..., None] * wide_slope, axis=3)
            )
        )
    cast = lambda array: array.astype(query.dtype)  # noqa: E731
    chain_slope = KeyValues(*(jnp.concatenate(parts, axis=3) for parts in zip(*chain_slopes, strict=True)))
    query_slope = jnp.concatenate(query_slopes, axis=1)
    return cast(query_slope), jax.tree.map(cast, target_slopes), jax.tree.map(cast, chain_slope), None, None


chain_attention.defvjp(_forward, _backward)


def _chunks(rows: int) -> list[tuple[int, int]]:
    """(first, last) of each chunk of query rows; its keys are rows 0 to `last`."""
    size = max(QUERY_CHUNK, -(-rows // MOST_CHUNKS))
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _scores(query, target, chain, segments, step, first, last):
    """Of a chunk [b, k, g, c, d]: scores [b, k, g, c, s] of the target's rows, and [m, b, k, g, c] of the chain."""
    scores = _matrix("bkmd,bksd->bkms", query, target.keys[:, :, :last], (*query.shape[:-1], last))
    seen = causal(segments, first, last)[:, None, None]
    scores = jnp.where(seen, query.shape[-1] ** -0.5 * scores, -jnp.inf)
    return scores, _chain_scores(query, chain, step, first, last)


def _chain_scores(query, chain, step, first, last):
    own = chain.keys[:, :, :, None, first:last].astype(jnp.float32)
    scores = query.shape[-1] ** -0.5 * jnp.sum(query.astype(jnp.float32) * own, axis=-1)
    steps = jnp.arange(chain.keys.shape[0])[:, None, None, None, None]
    return jnp.where((steps >= 1) & (steps <= step), scores, -jnp.inf)


def _weights(scores, chain_scores, log_sum, dtype):
    """Softmax weights from scores and the logarithm of their summed exponentials; the large part in `dtype`.

    No weight is above 1. What cuDNN gives as logarithms is rounded to bfloat16, and so off by up to 128 where scores
    are 40,000, as of a drafter that diverges: exp(128) is infinite.
    """
    weights = jnp.exp(jnp.minimum(scores - log_sum[..., None], 0.0))
    return weights.astype(dtype), jnp.exp(jnp.minimum(chain_scores - log_sum, 0.0))


def _matrix(products: str, rows: jax.Array, other: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`rows` [b, k, g, c, ...] times `other`, as one matrix product for each KV head; float32, in `shape`."""
    return jnp.einsum(products, _joined(rows), other, preferred_element_type=jnp.float32).reshape(shape)


def _gathered(products: str, rows: jax.Array, others: jax.Array) -> jax.Array:
    """Sums over the query rows of a chunk: [b, k, s, d], float32."""
    return jnp.einsum(products, _joined(rows), _joined(others), preferred_element_type=jnp.float32)


def _joined(rows: jax.Array) -> jax.Array:
    """[b, k, g, c, ...] to [b, k, g * c, ...]."""
    return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])


def _by_head(rows: jax.Array) -> jax.Array:
    """[b, c, k, g, d] to [b, k, g, c, d]."""
    return rows.transpose(0, 2, 3, 1, 4)


def _by_row(rows: jax.Array) -> jax.Array:
    """[b, k, g, c, d] to [b, c, k, g, d]."""
    return rows.transpose(0, 3, 1, 2, 4)
