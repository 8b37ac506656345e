"""How far drafts would be accepted, from the training unroll: no generation, and every position of a text is a trial.

A chain drafted from row r predicts token r + 2 + p at position p. It is accepted there if it is the target's likeliest
token and all before it were. What the drafter reads at p > 0 is the text's token, so a trial goes on only while the
text itself says what the target would (always so in texts that the target wrote greedily).
Extra shape letters here: j steps or positions, n rows of the whole batch, c rows of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import llama
from poss_jax.objective import Objective, Params, Rows, run_unroll

ROW_CHUNK = 512


class Acceptance(NamedTuple):
    """Sums over the supervised rows of a batch, each [j], float32; batches are added, then divided.

    reached: chains whose drafts up to a position were all accepted; accepted: those that were there too. cosine:
    summed similarity of predicted and true features of `rows` rows, whether reached or not.
    """

    reached: jax.Array
    accepted: jax.Array
    cosine: jax.Array
    rows: jax.Array

    @property
    def by_position(self) -> jax.Array:
        """Acceptance [j] of each position, given that all before it were accepted."""
        return self.accepted / jnp.maximum(self.reached, 1)

    @property
    def tokens_per_round(self) -> jax.Array:
        """Expected tokens that a round commits with one drafted chain: 1 + a0 + a0 a1 + ... A tree commits more."""
        return 1 + jnp.sum(jnp.cumprod(self.by_position))

    @property
    def mean_cosine(self) -> jax.Array:
        """Cosine similarity [j] of each position."""
        return self.cosine / jnp.maximum(self.rows, 1)


def acceptance(objective: Objective, params: Params, frozen: Params, rows: Rows) -> Acceptance:
    """Of one batch; arguments as for `objective.batch_sums`."""
    unrolled = run_unroll(objective, params, frozen, rows)
    predicted, target = unrolled
    drafted = _best_tokens(frozen["target"], predicted)  # [j, b, t]: of row i, what is token i + 2
    chosen = _best_tokens(frozen["target"], target[None])[0]  # [b, t]: what the target has there
    said = jnp.roll(rows.tokens, -2, axis=1)
    counted = rows.supervised > 0
    reached, accepted, alive = [], [], counted
    for step in range(predicted.shape[0]):
        # Row i now stands for the chain that began at row i - step, of the same conversation.
        alive = alive & counted & (rows.offsets >= step)
        reached.append(jnp.sum(alive, dtype=jnp.float32))
        agreed = alive & (drafted[step] == chosen)
        accepted.append(jnp.sum(agreed, dtype=jnp.float32))
        alive = jnp.roll(agreed & (said == chosen), 1, axis=1)
    in_chain = counted & (rows.offsets >= jnp.arange(predicted.shape[0])[:, None, None])
    cosine = jnp.where(in_chain, _cosine(predicted, target[None]), 0.0)
    return Acceptance(
        jnp.stack(reached), jnp.stack(accepted), cosine.sum(axis=(1, 2)), in_chain.sum(axis=(1, 2)).astype(jnp.float32)
    )


def _best_tokens(head_params: Params, features: jax.Array) -> jax.Array:
    """The head's likeliest tokens [j, b, t] of features [j, b, t, h], a chunk of rows at a time."""
    steps, batch, rows, hidden = features.shape
    size = max(1, min(rows, ROW_CHUNK // batch))
    padded = jnp.pad(features, ((0, 0), (0, 0), (0, -rows % size), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(steps, batch, -1, size, hidden), 2, 0)
    best = jax.lax.map(lambda chunk: jnp.argmax(llama.head(head_params, chunk), axis=-1), chunks)  # [chunks, j, b, c]
    return jnp.moveaxis(best, 0, 2).reshape(steps, batch, -1)[..., :rows]


def _cosine(left: jax.Array, right: jax.Array) -> jax.Array:
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    norms = jnp.linalg.norm(left, axis=-1) * jnp.linalg.norm(right, axis=-1)
    return jnp.sum(left * right, axis=-1) / jnp.maximum(norms, 1e-9)
