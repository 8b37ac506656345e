"""What one training step minimises: target features, noise, unroll and losses of a batch, as pure functions.

The same functions serve training and evaluation, online features (the frozen target runs in here) and stored ones.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import llama
from poss_jax.attention import causal
from poss_jax.config import DraftConfig, TargetConfig
from poss_jax.errors import InputError
from poss_jax.losses import Losses, LossWeights, loss_sums
from poss_jax.sharding import keep_rows_sharded
from poss_jax.unroll import unroll

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Everything static about a training step.

    `noise`: width of the uniform noise on the features that the unroll starts from (not on those it is compared with),
    for a conversation of 512 tokens; it shrinks with length (EAGLE, arXiv 2401.15077). `row_groups`: see `loss_sums`.
    `kernel`: of attention, see `attention`.
    """

    target: TargetConfig
    draft: DraftConfig
    weights: LossWeights = LossWeights()
    noise: float = 0.2
    row_groups: int = 1
    kernel: str = "plain"

    def __post_init__(self):
        if not 0 <= self.noise < float("inf"):
            raise InputError(f"feature noise {self.noise} must be a number of at least 0")
        self.weights.by_step(sum(self.draft.spans))


class Rows(NamedTuple):
    """A batch on the device; see `train.packing.Batch` for the first four, each [b, t] int32.

    features [b, t, h]: the target's, where they were stored; else None, and the target computes them.
    """

    tokens: jax.Array
    segments: jax.Array
    offsets: jax.Array
    supervised: jax.Array
    features: jax.Array | None = None


def target_features(config: TargetConfig, params: Params, rows: Rows, kernel: str = "plain") -> jax.Array:
    """Features [b, t, h] of packed conversations, in the dtype of the parameters. Those of padding mean nothing."""
    lengths, mask = _lengths(rows.segments), causal(rows.segments)
    return llama.forward(params, config, rows.tokens, rows.offsets, lengths, mask, kernel=kernel)[0]


def _lengths(segments: jax.Array) -> jax.Array:
    """For each row, the number of tokens of its conversation, [b, t]."""
    return jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1)


class Unrolled(NamedTuple):
    """predicted [j, b, t, h], and what it should have been: target [b, t, h], feature i + 1 at row i."""

    predicted: jax.Array
    target: jax.Array


def run_unroll(
    objective: Objective, params: Params, frozen: Params, rows: Rows, noise_key: jax.Array | None = None
) -> Unrolled:
    """Unrolls the drafter with `params` over a batch.

    frozen: {"target": the target's parameters, of which stored features need the embedding and the head only; "embed":
    the drafter's own token embedding, if it has one}. All computing is done in their dtype. `noise_key`: adds noise.
    """
    embedding = frozen.get("embed", frozen["target"]["embed"])
    if rows.features is None:
        features = target_features(objective.target, frozen["target"], rows, objective.kernel)
    else:
        features = rows.features.astype(embedding.dtype)
    features = keep_rows_sharded(jax.lax.stop_gradient(features))
    target = jnp.roll(features, -1, axis=1)
    if noise_key is not None:
        features = features + _noise(objective.noise, noise_key, features, rows.segments)
    embedded = keep_rows_sharded(embedding[jnp.roll(rows.tokens, -1, axis=1)])
    predicted = unroll(objective.draft, params, embedded, features, rows.offsets, rows.segments, objective.kernel)
    return Unrolled(keep_rows_sharded(predicted, axis=1), target)


def _noise(width: float, key: jax.Array, features: jax.Array, segments: jax.Array) -> jax.Array:
    """Uniform in +-width / 2 for a conversation of 512 tokens, narrower for longer ones, as EAGLE's training has it."""
    uniform = jax.random.uniform(key, features.shape, jnp.float32, -0.5, 0.5)
    return (uniform * width * 512 / _lengths(segments)[..., None]).astype(features.dtype)


def batch_sums(
    objective: Objective, params: Params, frozen: Params, rows: Rows, noise_key: jax.Array | None = None
) -> tuple[jax.Array, Losses]:
    """Sums over supervised rows, float32: the weighted loss of all steps (differentiable with respect to `params`),
    and the terms of each step. `losses.mean` makes means of them.
    """
    unrolled = run_unroll(objective, params, frozen, rows, noise_key)
    return loss_sums(
        frozen["target"],
        unrolled.predicted,
        unrolled.target,
        rows.supervised,
        objective.weights,
        objective.row_groups,
        rows.offsets,
    )
