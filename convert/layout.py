"""Hugging Face's separate [out, in] matrices and our fused [in, out] ones (`poss_jax.layers`), both ways.

h: hidden size, k: key/value heads, g: queries that share one, d: head size, i: inner size of the MLP.
"""

import numpy as np

from poss_jax.config import BlockConfig


def fuse_query_key_value(block: BlockConfig, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Matrices [k * g * d, h], [k * d, h], [k * d, h] to [h, k, g + 2, d]; biases without h to [k, g + 2, d]."""
    heads, size = block.num_kv_heads, block.head_dim
    parts = (
        query.reshape(heads, block.queries_per_kv, size, *query.shape[1:]),
        key.reshape(heads, 1, size, *key.shape[1:]),
        value.reshape(heads, 1, size, *value.shape[1:]),
    )
    fused = np.concatenate(parts, axis=1)  # [k, g + 2, d, (h)]
    return np.moveaxis(fused, -1, 0) if query.ndim == 2 else fused


def unfuse_query_key_value(block: BlockConfig, fused: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `fuse_query_key_value`: query, key and value matrices, or their biases."""
    group = block.queries_per_kv
    rows_first = np.moveaxis(fused, 0, -1) if fused.ndim == 4 else fused  # [k, g + 2, d, (h)]
    parts = rows_first[:, :group], rows_first[:, group], rows_first[:, group + 1]
    return tuple(part.reshape(-1, *rows_first.shape[3:]) for part in parts)


def split_attention_output(block: BlockConfig, output: np.ndarray) -> np.ndarray:
    """[h, k * g * d] to [k, g, d, h]."""
    return output.T.reshape(block.num_kv_heads, block.queries_per_kv, block.head_dim, -1)


def join_attention_output(output: np.ndarray) -> np.ndarray:
    """The inverse of `split_attention_output`: [k, g, d, h] to [h, k * g * d]."""
    return output.reshape(-1, output.shape[-1]).T


def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Two matrices [i, h] to [h, 2, i]; two biases [i] to [2, i]."""
    fused = np.stack([gate, up])
    return np.moveaxis(fused, -1, 0) if gate.ndim == 2 else fused


def unfuse_gate_up(fused: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `fuse_gate_up`: gate and up matrices, or their biases."""
    gate, up = np.moveaxis(fused, 0, -1) if fused.ndim == 3 else fused
    return gate, up
