"""Rotary position embeddings, half-split as Llama has them (arXiv 2104.09864), with Llama's scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config import RopeConfig


def rotary(rope: RopeConfig, head_dim: int, positions: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [b, t, d/2], float32, for rows at `positions` [b, t].

    `lengths` [b, t] is the length of the sequence when the row was fed to the model. Only `dynamic` scaling
    reads it: it stretches by the length seen so far, so a row keeps the rotation of its own time. Example: after
    a prompt of 100 tokens all its rows have length 100; the token generated at position 100 has length 101,
    whether it is fed alone or as a node of a tree.
    """
    if rope.kind == "dynamic":
        inverse = _dynamic_frequencies(rope, head_dim, lengths)  # [b, t, d/2]
    else:
        inverse = jnp.asarray(_frequencies(rope, head_dim))  # [d/2]
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x` [b, t, heads..., d] by [b, t, d/2]; computed in float32, returned in the dtype of `x`."""
    heads = tuple(range(2, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [d/2] of the kinds that do not depend on the length, float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        inverse = inverse / np.float32(rope.factor)
    if rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    if rope.frequency_factors:
        inverse = inverse / np.asarray(rope.frequency_factors, np.float32)
    return inverse.astype(np.float32)


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / inverse
    longest = rope.max_position / rope.low_frequency_factor
    shortest = rope.max_position / rope.high_frequency_factor
    spread = rope.high_frequency_factor - rope.low_frequency_factor
    blend = (rope.max_position / wavelength - rope.low_frequency_factor) / spread
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    scaled = np.where(wavelength > longest, inverse / rope.factor, inverse)
    return np.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)


def name_scaling(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The same rotation with its scaling by name, where it was given as factors and is that of Llama 3.1 or 3.2.

    GGUF files hold only the factors, which other programs than ours do not look for in a config. Other factors are
    left as they are.
    """
    if not rope.frequency_factors or rope.kind != "default":
        return rope
    named = RopeConfig("llama3", rope.theta, max(rope.frequency_factors), 1.0, 4.0, max_position=8192)
    factors = _frequencies(RopeConfig(theta=rope.theta), head_dim) / _frequencies(named, head_dim)
    return named if np.allclose(factors, rope.frequency_factors, rtol=1e-3) else rope


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, lengths: jax.Array) -> jax.Array:
    """NTK-aware scaling: the base grows with the length once that passes `max_position`."""
    length = jnp.maximum(lengths, rope.max_position).astype(jnp.float32)[..., None]
    stretch = rope.factor * length / rope.max_position - (rope.factor - 1)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / theta**exponents
