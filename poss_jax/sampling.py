"""From logits to the law that a token is drawn from: temperature, top-k, top-p, in transformers' order."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp

from poss_jax.errors import InputError

LOWEST_TEMPERATURE = 1e-6  # logits divided by much less overflow float32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} must be 0 (greedy) or from {LOWEST_TEMPERATURE} up")
        if not isinstance(self.top_k, numbers.Integral) or self.top_k < 0:
            raise InputError(f"top_k {self.top_k} must be 0 (off) or a positive whole number")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} must be above 0 and at most 1 (off)")


def warp(sampling: Sampling, logits: jax.Array) -> jax.Array:
    """Unnormalised log-probabilities [v], float32, of the law to draw from; what is filtered is minus infinity.

    Temperature must not be 0. As in transformers, top-k keeps everything that ties with the k-th logit, and
    top-p keeps the most probable token whatever its probability.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][-1]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p < 1:
        ascending = jnp.argsort(logits)
        cumulative = jnp.cumsum(jax.nn.softmax(logits[ascending]))
        unlikely = (cumulative <= 1 - sampling.top_p).at[-1].set(False)
        removed = jnp.zeros((vocab,), bool).at[ascending].set(unlikely)
        logits = jnp.where(removed, -jnp.inf, logits)
    return logits
