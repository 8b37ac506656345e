"""The terms of the draft loss (arXiv 2506.03566 after EAGLE and HASS), their weighted sum, and its gradient.

With large vocabularies the head is what training spends most of its time and memory on. So logits exist only for
supervised rows, one chunk of them at a time; and since the head is frozen, the gradient of a chunk's features is
taken while its logits are there, instead of computing them a second time on the way back.
Extra shape letters here: j steps, g groups of rows, n rows of a group, c rows of a chunk.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import llama
from poss_jax.errors import InputError
from poss_jax.top_k import top_k

ROW_CHUNK = 512  # rows of a group whose logits exist at one time, for all steps together


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; the defaults are the authors'. `likeliest` is K of the top-K term.

    `steps`: a weight for each step of the unroll; empty weighs all with 1. Steps are added, not averaged.
    """

    feature: float = 1.0
    token: float = 0.1
    top_k: float = 1.0
    likeliest: int = 10
    steps: tuple[float, ...] = ()

    def __post_init__(self):
        weights = (self.feature, self.token, self.top_k, *self.steps)
        if not all(0 <= weight < float("inf") for weight in weights):
            raise InputError(f"loss weights {weights} must be numbers of at least 0")
        if self.likeliest < 1:
            raise InputError(f"top-K of the loss is {self.likeliest}; it must be at least 1")

    def by_step(self, steps: int) -> tuple[float, ...]:
        """A weight for each of `steps` steps. Raises InputError where another number of them was given."""
        if self.steps and len(self.steps) != steps:
            raise InputError(f"{len(self.steps)} step weights were given for {steps} steps of the unroll")
        return self.steps or (1.0,) * steps


class Losses(NamedTuple):
    """Each [j], float32, one for each step.

    smooth_l1: between predicted and true features, mean over the hidden size. soft_cross_entropy: the target's law
    against the draft's, over the vocabulary. top_k_cross_entropy: the same over the target's k likeliest tokens only.
    agreement: share of rows where both have the same likeliest token; no loss, a figure to watch.
    """

    smooth_l1: jax.Array
    soft_cross_entropy: jax.Array
    top_k_cross_entropy: jax.Array
    agreement: jax.Array


def mean(sums, supervised: jax.Array):
    """Sums over supervised rows divided by their number, with the authors' 1e-5, which makes no rows a loss of 0."""
    count = jnp.sum(supervised, dtype=jnp.float32) + 1e-5
    return jax.tree.map(lambda part: part / count, sums)


def loss_sums(
    head_params: llama.Params,
    predicted: jax.Array,
    target: jax.Array,
    supervised: jax.Array,
    weights: LossWeights,
    groups: int = 1,
    offsets: jax.Array | None = None,
) -> tuple[jax.Array, Losses]:
    """The weighted loss and its unweighted terms, summed over rows where `supervised` [b, t] is 1; float32.

    `predicted` [j, b, t, h] is compared with `target` [b, t, h], whose law is the frozen `llama.head` of
    `head_params`. Only the weighted loss can be differentiated, and only with respect to `predicted`; the terms are
    figures to report. `offsets` [b, t]: rows at an offset below a step count as 0 there, since no chain reaches them.
    `groups`: into so many equal parts the batch is cut, each compacted for itself (one for each set of devices that
    holds rows of its own, so that no row has to travel).
    """
    reached = len(predicted) if offsets is None else jnp.minimum(offsets + 1, len(predicted))
    steps = jnp.where(supervised > 0, reached, 0)
    return _weighted_sums(head_params, predicted, target, steps, weights, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _weighted_sums(head_params, predicted, target, steps, weights, groups):
    """`loss_sums`, where `steps` [b, t] int32 says how many steps count of each row."""
    return _sum_over_chunks(head_params, predicted, target, steps, weights, groups, with_gradient=False)[0]


def _forward(head_params, predicted, target, steps, weights, groups):
    return _sum_over_chunks(head_params, predicted, target, steps, weights, groups, with_gradient=True)


def _backward(weights, groups, gradient, cotangents):
    return None, (cotangents[0] * gradient).astype(gradient.dtype), None, None


_weighted_sums.defvjp(_forward, _backward)


def _sum_over_chunks(head_params, predicted, target, counting, weights, groups, *, with_gradient):
    """(total, terms), and the gradient [j, b, t, h] of the total in the dtype of `predicted`, or an empty array."""
    steps, batch, rows, hidden = predicted.shape
    predicted_rows = predicted.reshape(steps, groups, batch // groups * rows, hidden)
    target = target.reshape(groups, -1, hidden)
    counting = counting.reshape(groups, -1)
    count = target.shape[1]
    size = min(ROW_CHUNK, count)
    # Supervised rows first. Of the other rows only those are touched that fill up the last chunk; those that the last
    # chunk is short of are row `count`, which is no row: reading it gives anything, writing it does nothing.
    order = jnp.argsort(counting == 0, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, -count % size)), constant_values=count)
    chunks = -(-jnp.max(jnp.sum(counting > 0, axis=1)) // size)
    group = jnp.arange(groups)[:, None]

    def add_chunk(index, sums):
        total, terms, gradient = sums
        chosen = jax.lax.dynamic_slice_in_dim(order, index * size, size, axis=1)  # [g, c]
        chosen_steps = jnp.where(chosen < count, jnp.take_along_axis(counting, chosen, axis=1, mode="clip"), 0)
        chunk_total, chunk_terms, chunk_gradient = _chunk_sums(
            head_params,
            jnp.take_along_axis(predicted_rows, chosen[None, ..., None], axis=2, mode="clip"),
            jnp.take_along_axis(target, chosen[..., None], axis=1, mode="clip"),
            jnp.arange(steps)[:, None, None] < chosen_steps,
            weights,
            with_gradient,
        )
        if with_gradient:
            gradient = gradient.at[:, group, chosen].set(chunk_gradient, mode="drop", unique_indices=True)
        return total + chunk_total, jax.tree.map(jnp.add, terms, chunk_terms), gradient

    terms = Losses(*(jnp.zeros(steps, jnp.float32) for _ in Losses._fields))
    gradient = jnp.zeros_like(predicted_rows if with_gradient else predicted_rows[:0])
    total, terms, gradient = jax.lax.fori_loop(0, chunks, add_chunk, (jnp.float32(0), terms, gradient))
    return (total, terms), gradient.reshape(-1, batch, rows, hidden)


def _chunk_sums(head_params, predicted, target, counts, weights, with_gradient):
    """Of predicted [j, g, c, h], target [g, c, h] and which of them count [j, g, c]: total, terms, and gradient
    [j, g, c, h].
    """
    # All steps of a row lie together from here on, so that the row of the target's law that they share is read once.
    predicted, counts = jnp.moveaxis(predicted, 0, 2), jnp.moveaxis(counts, 0, 2)  # [g, c, j, h], [g, c, j]
    # [rows, vocab] arrays are read several times, so they are stored in the computing dtype, and sums over them are
    # float32. That of the target's logits is there once for all steps.
    logits = llama.head(head_params, predicted, predicted.dtype).astype(jnp.float32)  # [g, c, j, v]
    law = _target_law(llama.head(head_params, target), weights.likeliest, predicted.dtype)
    expected = law.whole.astype(jnp.float32)[:, :, None] * logits
    highest, exponentials, expected = _one_pass(logits, expected)  # each [g, c, j]
    log_norm = highest + jnp.log(exponentials)
    best_logits = jnp.take_along_axis(logits, law.best[:, :, None], axis=-1)  # [g, c, j, k]
    best_law, mass = law.of_best[:, :, None], law.of_best.sum(axis=-1)[..., None]
    error = predicted.astype(jnp.float32) - target.astype(jnp.float32)[:, :, None]
    distance = jnp.abs(error)
    rows = Losses(
        smooth_l1=jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(axis=-1),
        # -sum p log q with log q = logits - log_norm
        soft_cross_entropy=log_norm - expected,
        top_k_cross_entropy=mass * log_norm - jnp.sum(best_law * best_logits, axis=-1),
        agreement=best_logits[..., 0] >= highest,
    )
    by_step = jnp.asarray(weights.by_step(predicted.shape[2]), jnp.float32)
    terms = Losses(*(jnp.where(counts, part, 0.0).sum(axis=(0, 1)) for part in rows))
    total = jnp.sum(by_step * weighted_total(terms, weights))
    if not with_gradient:
        return total, terms, None
    scale = by_step * counts
    pull = _add_at(weights.token * law.whole, law.best, weights.top_k * law.of_best)[:, :, None]
    push = scale * (weights.token + weights.top_k * mass)
    slope = push[..., None] * jnp.exp(logits - log_norm[..., None]) - scale[..., None] * pull
    gradient = llama.head_gradient(head_params, slope.astype(predicted.dtype))
    gradient += (weights.feature / error.shape[-1]) * scale[..., None] * jnp.clip(error, -1, 1)
    # A row that does not count may hold anything, infinities too, and 0 times those is no 0.
    gradient = jnp.where(counts[..., None], gradient, 0.0)
    return total, terms, jnp.moveaxis(gradient.astype(predicted.dtype), 2, 0)


class _Law(NamedTuple):
    """The target's law of a chunk. whole [g, c, v] in the computing dtype; of its likeliest tokens `best` [g, c, k],
    likeliest first, also in float32: of_best [g, c, k].
    """

    whole: jax.Array
    best: jax.Array
    of_best: jax.Array


def _target_law(logits: jax.Array, likeliest: int, dtype: jnp.dtype) -> _Law:
    best_logits, best = top_k(logits, min(likeliest, logits.shape[-1]))
    highest, exponentials = _one_pass(logits)
    log_norm = (highest + jnp.log(exponentials))[..., None]
    return _Law(jnp.exp(logits - log_norm).astype(dtype), best, jnp.exp(best_logits - log_norm))


def _add_at(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """`array` [g, c, v] with `values` [g, c, k] added at `indices` [g, c, k], none of which occurs twice."""
    groups, rows, _ = indices.shape
    place = (jnp.arange(groups)[:, None, None], jnp.arange(rows)[:, None], indices)
    return array.at[place].add(values.astype(array.dtype), unique_indices=True)


def _one_pass(logits: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """Over the last axis, reading the arrays once: the maximum of `logits`, the sum of exp(logits - maximum), and the
    sums of `others`.
    """

    def join(left, right):
        highest = jnp.maximum(left[0], right[0])
        summed = left[1] * jnp.exp(left[0] - highest) + right[1] * jnp.exp(right[0] - highest)
        return highest, summed, *(a + b for a, b in zip(left[2:], right[2:], strict=True))

    # The lowest finite number and not -inf, whose difference with itself is no number.
    start = (jnp.finfo(jnp.float32).min, *[jnp.float32(0)] * (1 + len(others)))
    return jax.lax.reduce((logits, jnp.ones_like(logits), *others), start, join, [logits.ndim - 1])


def weighted_total(losses: Losses, weights: LossWeights) -> jax.Array:
    """Loss [j] of each step, without the weights of steps."""
    return (
        weights.feature * losses.smooth_l1
        + weights.token * losses.soft_cross_entropy
        + weights.top_k * losses.top_k_cross_entropy
    )
