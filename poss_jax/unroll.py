"""The recursive draft unroll of training: from every row a chain is drafted, `sum(spans)` positions deep (HASS,
arXiv 2408.15766, with the specialists of arXiv 2506.03566).

The chain that starts at row r asks in step j with (embedding of token r + j + 1; q_j[r]), where q_0 are the target's
features and q_{j+1}[r] is what step j predicted for this chain. It sees the target's rows 0 .. r and its own rows of
steps 1 .. j, as generation would have them in its cache. All chains run at once, each kept at the row where it starts,
so the mask is causal in every step, nothing has to be shifted, and a step costs t * t + j * t scores and not j * t * t.
Gradients stop between steps.
Extra shape letters here: j steps.
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
    kernel: str = "plain",
) -> jax.Array:
    """Predicted features [j, b, t, h] of all steps; the one at row i of any step is to be feature i + 1.

    `embedded` [b, t, h]: embedding of token i + 1 at row i. `features` [b, t, h]: the target's feature i. `offsets`
    [b, t]: row number within its conversation, the rotary position. `segments` [b, t]: a number for each conversation
    of a packed row, 0 for padding; rows see their own conversation only. `kernel`: see `attention`.

    Row i of step j is of the chain that started at row i - j. Rows at an offset below j have no such chain; what stands
    there means nothing.
    """
    drafter, steps = BoundDrafter(config, params), sum(config.spans)
    tokens = drafter.token_inputs(embedded)
    x_target = drafter.join_inputs(tokens, features)
    # Row r of step j takes what row r + j has; beyond the end of a row there is no token, and no chain that counts.
    tokens = jnp.pad(tokens, ((0, 0), (0, steps - 1), (0, 0)))
    query_features, inputs, predictions = features, [], []
    kept = jax.checkpoint_policies.save_only_these_names("projected", *KEPT)
    for specialist, (start, span) in enumerate(zip(config.starts, config.spans, strict=True)):
        target_rows = drafter.project(specialist, x_target, offsets)[1]
        chain = _project_chain(drafter, specialist, inputs, offsets, steps, target_rows)

        def step(carry, index, specialist=specialist, target_rows=target_rows):
            query_features, chain = carry
            x = drafter.join_inputs(
                jax.lax.dynamic_slice_in_dim(tokens, index, offsets.shape[1], axis=1), query_features
            )
            # Kept and not recomputed: attention's gradient needs just the numbers that its forward pass had, and a
            # matrix product of the backward pass may round otherwise.
            query, rows = checkpoint_name(drafter.project(specialist, x, offsets + index), "projected")
            chain = KeyValues(*(old.at[index].set(new) for old, new in zip(chain, rows, strict=True)))
            attended = chain_attention(query, target_rows, chain, segments, index, kernel)
            predicted = drafter.finish(specialist, x, attended)
            return (jax.lax.stop_gradient(predicted), chain), (predicted, x)

        # The compiler unrolls a loop of one step, and would merge what is to be recomputed with what was computed.
        step = jax.checkpoint(step, prevent_cse=span == 1, policy=kept)
        indices = jnp.arange(start, start + span)
        (query_features, _), (predicted, x) = jax.lax.scan(step, (query_features, chain), indices)
        predictions += list(predicted)
        inputs += list(x)
    return jnp.stack([jnp.roll(predicted, step, axis=1) for step, predicted in enumerate(predictions)])


def _project_chain(
    drafter: BoundDrafter, specialist: int, inputs: list, offsets: jax.Array, steps: int, like: KeyValues
) -> KeyValues:
    """Keys and values [j, b, k, t, d] of earlier steps through a specialist whose span begins; slots of steps to come
    are zero.
    """
    earlier = [drafter.project(specialist, x, offsets + step)[1] for step, x in enumerate(inputs)]
    to_come = [jax.tree.map(jnp.zeros_like, like)] * (steps - len(earlier))
    return jax.tree.map(lambda *parts: jnp.stack(parts), *earlier, *to_come)
