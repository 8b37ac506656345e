"""Caches of layers apart, and of all layers in one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax import cache
from poss_jax.attention import KeyValues
from poss_jax.config import BlockConfig, RopeConfig

BLOCK = BlockConfig(16, 32, 4, 2, 8, 1e-5, RopeConfig())  # 2 KV heads of 8
SLOTS, LAYERS = 12, 3


def random_rows(batch, count, seed):
    """For each layer."""
    normal = np.random.default_rng(seed).normal
    return [KeyValues(*jnp.asarray(normal(size=(2, batch, 2, count, 8)), jnp.float32)) for _ in range(LAYERS)]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_stack_holds_what_layers_apart_hold(batch):
    first, then = random_rows(batch, 5, 0), random_rows(batch, 4, 1)
    start = jnp.array([5, 2, 8][:batch])
    apart, stacked = (
        cache.write_layers(cache.fill(BLOCK, first, SLOTS, stacked), then, start) for stacked in (False, True)
    )
    assert stacked.keys.shape == (LAYERS, batch, 2, SLOTS, 8)
    for index, layer in enumerate(apart):
        of_stack = stacked[index]
        np.testing.assert_array_equal(of_stack.keys[of_stack.index], layer.keys)
        np.testing.assert_array_equal(of_stack.values[of_stack.index], layer.values)
    for row in range(batch):  # by hand: the second rows lie over the first ones, and nothing behind them
        place = int(start[row])
        np.testing.assert_array_equal(apart[1].keys[row, :, place : place + 4], then[1].keys[row])
        np.testing.assert_array_equal(apart[1].keys[row, :, : min(place, 5)], first[1].keys[row, :, : min(place, 5)])
        assert not apart[1].keys[row, :, max(place + 4, 5) :].any()


@pytest.mark.parametrize("batch_axis", [0, 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_are_written_along_any_axis(batch, batch_axis):
    buffer = jnp.zeros((batch, 3, 6)) if batch_axis == 0 else jnp.zeros((3, batch, 6))
    rows = jnp.ones((*buffer.shape[:2], 2))
    written = cache.write_rows(buffer, rows, jnp.array([4, 1][:batch]), axis=1, batch_axis=batch_axis)
    expected = [[0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    for row in range(batch):
        of_row = jax.lax.index_in_dim(written, row, batch_axis, keepdims=False)
        np.testing.assert_array_equal(of_row, np.array([expected[row]] * 3))
