"""The recursive draft unroll of training: every row is drafted from, `sum(spans)` positions deep (HASS,
arXiv 2408.15766, with the specialists of arXiv 2506.03566).

Row i of step j asks with (embedding of token i + 1; q_j[i]), where q_0 are the target's features and q_{j+1}[i] is
what step j predicted at row i - 1. It sees the target's rows 0 .. i - j and then, for m = 1 .. j, row i - j + m of step
m: its own chain, as generation would have it in its cache. That last part is one key for each query row and step, a
diagonal, so a step costs t * t + j * t scores and not j * t * t. Gradients stop between steps.

Rows nearer than j to the beginning of their conversation have no such chain; what they predict means nothing.
Extra shape letters here: j steps, m earlier steps.
"""

import jax
import jax.numpy as jnp

from poss_jax.attention import KeyValues
from poss_jax.config import DraftConfig
from poss_jax.specialist import BoundDrafter


def unroll(
    config: DraftConfig,
    params: dict,
    embedded: jax.Array,
    features: jax.Array,
    offsets: jax.Array,
    segments: jax.Array,
) -> jax.Array:
    """Predicted features [j, b, t, h] of all steps; the one at row i of any step is to be feature i + 1.

    `embedded` [b, t, h]: embedding of token i + 1 at row i. `features` [b, t, h]: the target's feature i. `offsets`
    [b, t]: row number within its conversation, the rotary position. `segments` [b, t]: a number for each conversation
    of a packed row, 0 for padding; rows see their own conversation only.
    """
    drafter = BoundDrafter(config, params)
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
    x_target = drafter.inputs(embedded, features)
    query_features, inputs, predictions = features, [], []
    for specialist, (start, span) in enumerate(zip(config.starts, config.spans, strict=True)):
        target_rows = drafter.project(specialist, x_target, offsets)[1]
        chain = _project_chain(drafter, specialist, inputs, offsets, sum(config.spans), target_rows)

        def step(carry, index, specialist=specialist, target_rows=target_rows):
            query_features, chain = carry
            x = drafter.inputs(embedded, query_features)
            query, rows = drafter.project(specialist, x, offsets)
            chain = KeyValues(*(_shift(old, 3).at[index].set(new) for old, new in zip(chain, rows, strict=True)))
            attended = _attend(query, target_rows, visible, chain, index)
            predicted = drafter.finish(specialist, x, attended)
            following = jnp.where(offsets[..., None] == 0, features, _shift(predicted, 1))
            return (jax.lax.stop_gradient(following), chain), (predicted, x)

        steps = jnp.arange(start, start + span)
        (query_features, _), (predicted, x) = jax.lax.scan(
            jax.checkpoint(step, prevent_cse=False), (query_features, chain), steps
        )
        predictions.append(predicted)
        inputs += list(x)
    return jnp.concatenate(predictions)


def _project_chain(
    drafter: BoundDrafter, specialist: int, inputs: list, offsets: jax.Array, steps: int, like: KeyValues
) -> KeyValues:
    """Keys and values [j, b, k, t, d] of earlier steps through a specialist whose span begins, each shifted down by one
    row for every step that has passed since; slots of steps to come are zero.
    """
    empty = KeyValues(*(jnp.zeros((steps, *part.shape), part.dtype) for part in like))
    if not inputs:
        return empty
    keys, values = [], []
    for age, x in enumerate(reversed(inputs)):
        rows = drafter.project(specialist, x, offsets)[1]
        keys.insert(0, jnp.roll(rows.keys, age, axis=2))
        values.insert(0, jnp.roll(rows.values, age, axis=2))
    return KeyValues(
        empty.keys.at[: len(inputs)].set(jnp.stack(keys)), empty.values.at[: len(inputs)].set(jnp.stack(values))
    )


def _shift(array: jax.Array, axis: int) -> jax.Array:
    """Row i gets what row i - 1 had. The first row gets the last one's, which only meaningless rows ever see."""
    return jnp.roll(array, 1, axis=axis)


def _attend(query: jax.Array, target: KeyValues, visible: jax.Array, chain: KeyValues, step: jax.Array) -> jax.Array:
    """One softmax over the target's rows up to `step` rows back, and over the row's own chain of steps 1 .. `step`.

    `query` [b, t, k, g, d]; `chain` [j, b, k, t, d] holds at row t what query row t is to see of each step.
    """
    rows = jnp.arange(query.shape[1])
    far_enough = rows[:, None] - rows[None, :] >= step  # at step 0 a row sees itself among the target's
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("btkgd,bksd->bkgts", query, target.keys, preferred_element_type=jnp.float32)
    scores = jnp.where((visible & far_enough)[:, None, None], scores * scale, -jnp.inf)
    steps = jnp.arange(chain.keys.shape[0])
    chain_scores = jnp.einsum("btkgd,mbktd->bkgtm", query, chain.keys, preferred_element_type=jnp.float32)
    in_chain = (steps >= 1) & (steps <= step)
    chain_scores = jnp.where(in_chain, chain_scores * scale, -jnp.inf)
    # A padding row at step 0 sees nothing: 0 instead of -inf for all of its scores keeps it finite and harmless.
    nothing = ~(jnp.any(visible & far_enough, axis=-1) | (step > 0))[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(nothing, 0.0, jnp.concatenate([scores, chain_scores], axis=-1)), axis=-1)
    weights = weights.astype(query.dtype)
    count = target.keys.shape[2]
    attended = jnp.einsum("bkgts,bksd->btkgd", weights[..., :count], target.values, preferred_element_type=jnp.float32)
    attended += jnp.einsum("bkgtm,mbktd->btkgd", weights[..., count:], chain.values, preferred_element_type=jnp.float32)
    return attended.astype(query.dtype)
