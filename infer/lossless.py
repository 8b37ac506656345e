"""How close the target's call was where two texts part: in half precision a near-tie falls either way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from infer.batch import bucket
from infer.loading import Models, precise
from poss_jax import cache, llama


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first place at which two token lists differ, None if they do not."""
    pairs = zip(left, right, strict=False)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    return None if place == len(left) == len(right) else place


def logit_gap(models: Models, prompt: list[int], left: list[int], right: list[int]) -> float | None:
    """The difference of the target's logits for the two tokens with which two answers to a prompt part.

    None if they do not part at a token: they are the same, or one is the beginning of the other.
    """
    place = first_difference(left, right)
    if place is None or place >= min(len(left), len(right)):
        return None
    ids = [*prompt, *left[:place]]
    tokens = np.zeros((1, bucket(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    with precise(models.dtype):
        logits = _logits(models.target.params, models.target.config, tokens, np.array([len(ids)], np.int32))
    return abs(float(logits[left[place]] - logits[right[place]]))


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, config, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Logits [v], float32, after the first `length` [1] of `tokens` [1, t]."""
    positions = jnp.arange(tokens.shape[1])[None]
    lengths = jnp.broadcast_to(length[:, None], tokens.shape)
    features, _ = llama.forward(params, config, tokens, positions, lengths, None)
    return llama.head(params, cache.read_rows(features, length - 1, 1))[0, 0]
