"""The terms of the draft loss (arXiv 2506.03566 after EAGLE and HASS), and their weighted sum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROW_CHUNK = 256  # rows of a sequence whose logits exist at one time


class Losses(NamedTuple):
    """Each [j], float32: sums over supervised rows divided by their number (plus 1e-5), for each step.

    smooth_l1: between predicted and true features, mean over the hidden size. soft_cross_entropy: the target's law
    against the draft's, over the vocabulary. top_k_cross_entropy: the same over the target's k likeliest tokens only.
    agreement: share of rows where both have the same likeliest token; no loss, a figure to watch.
    """

    smooth_l1: jax.Array
    soft_cross_entropy: jax.Array
    top_k_cross_entropy: jax.Array
    agreement: jax.Array


def draft_losses(head, predicted: jax.Array, target: jax.Array, supervised: jax.Array, top_k: int) -> Losses:
    """`predicted` [j, b, t, h] against `target` [b, t, h] on rows where `supervised` [b, t] is 1.

    `head` gives logits [..., v] of features [..., h]. Supervised rows of each sequence are moved to its front and
    taken in chunks; chunks without any are skipped, and the logits of one chunk are all that is in memory.
    """
    order = jnp.argsort(-supervised, axis=1, stable=True)
    predicted = jnp.take_along_axis(predicted, order[None, ..., None], axis=2)
    target = jnp.take_along_axis(target, order[..., None], axis=1)
    supervised = jnp.take_along_axis(supervised, order, axis=1).astype(jnp.float32)
    rows = target.shape[1]
    size = min(ROW_CHUNK, rows)
    padding = -rows % size
    predicted = jnp.pad(predicted, ((0, 0), (0, 0), (0, padding), (0, 0)))
    target, supervised = jnp.pad(target, ((0, 0), (0, padding), (0, 0))), jnp.pad(supervised, ((0, 0), (0, padding)))
    chunks = (rows + padding) // size

    def split(array: jax.Array, axis: int) -> jax.Array:
        shape = (*array.shape[:axis], chunks, size, *array.shape[axis + 1 :])
        return jnp.moveaxis(array.reshape(shape), axis, 0)

    zero = Losses(*(jnp.zeros(predicted.shape[0], jnp.float32) for _ in Losses._fields))

    def add_chunk(total: Losses, chunk):
        sums = jax.lax.cond(
            jnp.any(chunk[2] > 0), lambda parts: _chunk_sums(head, *parts, top_k), lambda parts: zero, chunk
        )
        return jax.tree.map(jnp.add, total, sums), None

    parts = (split(predicted, 2), split(target, 1), split(supervised, 1))
    total, _ = jax.lax.scan(jax.checkpoint(add_chunk, prevent_cse=False), zero, parts)
    return jax.tree.map(lambda part: part / (supervised.sum() + 1e-5), total)


def _chunk_sums(head, predicted: jax.Array, target: jax.Array, supervised: jax.Array, top_k: int) -> Losses:
    """Sums over the supervised rows of a chunk: predicted [j, b, c, h], target [b, c, h], supervised [b, c]."""
    target_logits = jax.lax.stop_gradient(head(target))
    law = jax.nn.softmax(target_logits)
    log_draft = jax.nn.log_softmax(head(predicted))
    best = jax.lax.top_k(law, min(top_k, law.shape[-1]))[1]
    likely = jnp.take_along_axis(law * log_draft, best[None], axis=-1)
    error = jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5).mean(axis=-1)
    agree = jnp.argmax(log_draft, axis=-1) == jnp.argmax(target_logits, axis=-1)
    rows = (smooth, -(law * log_draft).sum(axis=-1), -likely.sum(axis=-1), agree)
    return Losses(*(jnp.where(supervised > 0, part, 0.0).sum(axis=(1, 2)) for part in rows))


def weighted_total(losses: Losses, feature: float = 1.0, token: float = 0.1, top_k: float = 1.0) -> jax.Array:
    """Loss [j] of each step. The defaults are the authors' weights; steps are added, not averaged."""
    return feature * losses.smooth_l1 + token * losses.soft_cross_entropy + top_k * losses.top_k_cross_entropy
