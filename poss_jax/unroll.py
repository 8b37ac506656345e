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
from jax.ad_checkpoint import checkpoint_name

from poss_jax.attention import KeyValues
from poss_jax.chain_attention import KEPT, chain_attention
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
    x_target = drafter.inputs(embedded, features)
    query_features, inputs, predictions = features, [], []
    kept = jax.checkpoint_policies.save_only_these_names("projected", *KEPT)
    for specialist, (start, span) in enumerate(zip(config.starts, config.spans, strict=True)):
        target_rows = drafter.project(specialist, x_target, offsets)[1]
        chain = _project_chain(drafter, specialist, inputs, offsets, sum(config.spans), target_rows)

        def step(carry, index, specialist=specialist, target_rows=target_rows):
            query_features, chain = carry
            x = drafter.inputs(embedded, query_features)
            # Kept and not recomputed: attention's gradient needs just the numbers that its forward pass had, and a
            # matrix product of the backward pass may round otherwise.
            query, rows = checkpoint_name(drafter.project(specialist, x, offsets), "projected")
            chain = KeyValues(*(_shift(old, 3).at[index].set(new) for old, new in zip(chain, rows, strict=True)))
            attended = chain_attention(query, target_rows, chain, segments, index)
            predicted = drafter.finish(specialist, x, attended)
            following = jnp.where(offsets[..., None] == 0, features, _shift(predicted, 1))
            return (jax.lax.stop_gradient(following), chain), (predicted, x)

        steps = jnp.arange(start, start + span)
        (query_features, _), (predicted, x) = jax.lax.scan(
            jax.checkpoint(step, prevent_cse=False, policy=kept), (query_features, chain), steps
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
