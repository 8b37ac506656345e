"""The pieces of a Llama block that the target and the specialists share, on plain arrays.

Weights are [in, out] and fused: one matrix gives queries, keys and values, one gives gate and up. The fused
axes keep their parts apart as [k, g + 2, d] (for each KV head its g query heads, its key, its value) and [2, i],
so that sharding over k or i never cuts across them.
"""

import jax
import jax.numpy as jnp

from poss_jax.int8 import Int8, is_int8

SMALL_WEIGHT = 10_000_000  # XLA does not give a lone row times less than this to a GPU's matrix kernels


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def product(equation: str, x: jax.Array, weight: jax.Array | Int8, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x` [b, t, ...] times a weight whose leading axes are its inputs; in `dtype`, or that of `x`."""
    dtype = x.dtype if dtype is None else dtype
    if is_int8(weight):
        sums = jnp.einsum(equation, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (sums * weight.scale).astype(dtype)
    if _is_lone(x) and x.dtype == jnp.bfloat16 and weight.size < SMALL_WEIGHT:
        # Multiplied element by element, every single product would be rounded to bfloat16 before it is added.
        return jnp.einsum(equation, jnp.concatenate([x, x], axis=1), weight, preferred_element_type=dtype)[:, :1]
    return jnp.einsum(equation, x, weight, preferred_element_type=dtype)


def _is_lone(x: jax.Array) -> bool:
    """Whether `x` is one row [1, 1, ...]."""
    return x.ndim > 2 and x.shape[:2] == (1, 1)


def query_key_value(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """`x` [b, t, h], `weight` [h, k, g + 2, d]: query [b, t, k, g, d], key and value [b, t, k, d]."""
    fused = product("bth,hkgd->btkgd", x, weight)
    if bias is not None:
        fused = fused + bias
    return fused[..., :-2, :], fused[..., -2, :], fused[..., -1, :]


def attention_output(attended: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`attended` [b, t, k, g, d], `weight` [k, g, d, h]: [b, t, h]."""
    output = product("btkgd,kgdh->bth", attended, weight)
    return output if bias is None else output + bias


def mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """SiLU-gated MLP: `x` [b, t, h], `gate_up` [h, 2, i], `down` [i, h]."""
    fused = product("bth,hzi->btzi", x, gate_up)  # z: gate, up
    if gate_up_bias is not None:
        fused = fused + gate_up_bias
    output = product("bti,ih->bth", jax.nn.silu(fused[:, :, 0]) * fused[:, :, 1], down)
    return output if down_bias is None else output + down_bias
