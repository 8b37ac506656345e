"""Caches of layers apart, and of all layers in one array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax import cache, decode
from poss_jax.attention import KeyValues
from poss_jax.config import BlockConfig, RopeConfig
from tests.test_program import batch_of

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
    assert stacked.keys.shape == (batch, LAYERS, 2, SLOTS, 8)
    for index, layer in enumerate(apart):
        of_stack = cache.layer(stacked, index)
        assert cache.layer(apart, index) is layer
        np.testing.assert_array_equal(of_stack.keys[:, of_stack.index], layer.keys)
        np.testing.assert_array_equal(of_stack.values[:, of_stack.index], layer.values)
    for row in range(batch):  # by hand: the second rows lie over the first ones, and nothing behind them
        place = int(start[row])
        np.testing.assert_array_equal(apart[1].keys[row, :, place : place + 4], then[1].keys[row])
        np.testing.assert_array_equal(apart[1].keys[row, :, : min(place, 5)], first[1].keys[row, :, : min(place, 5)])
        assert not apart[1].keys[row, :, max(place + 4, 5) :].any()


def test_a_stack_grows_like_layers_apart(tiny):
    batch = batch_of(tiny, [[0, 5]], max_new_tokens=4)
    batch.start()
    apart = batch.state.target_caches
    slots = apart[0].keys.shape[2] + 8
    stack = cache.Stack(*(jnp.stack(side, axis=1) for side in zip(*apart, strict=True)))
    grown = decode.grow(batch.state, slots).target_caches
    of_stack = decode.grow(batch.state.replace(target_caches=stack), slots).target_caches
    for index, layer in enumerate(grown):
        assert layer.keys.shape[2] == slots
        np.testing.assert_array_equal(of_stack.keys[:, index], layer.keys)
        np.testing.assert_array_equal(of_stack.values[:, index], layer.values)


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("batch", [1, 3])
def test_rounds_write_in_place(batch, stacked):
    """A loop that is given caches and may keep them needs memory for the rows that it writes, and for nothing else."""
    caches = cache.fill(BLOCK, random_rows(batch, 2, 0), 4096, stacked)
    rows = random_rows(batch, 3, 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def rounds(caches, start):
        def one_more(carry):
            caches, start = carry
            return cache.write_layers(caches, rows, start), start + 3

        return jax.lax.while_loop(lambda carry: carry[1][0] < 3000, one_more, (caches, start))

    memory = rounds.lower(caches, jnp.full(batch, 2)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < jax.tree.leaves(caches)[0].nbytes / 4
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
