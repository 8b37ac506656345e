"""Products of rows and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax import layers

DOWN = "bti,ih->bth"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_products_are_added_before_they_are_rounded(rows):
    """(1 + 1/128)^2 is 1 + 1/64 + 1/16384, which bfloat16 rounds to 1 + 1/64: then the pairs below would cancel."""
    pairs = 2048
    x = jnp.tile(jnp.array([1 + 2**-7, 1], jnp.bfloat16), (1, rows, pairs))
    column = np.tile([1 + 2**-7, -(1 + 2**-6)], pairs)
    weight = jnp.asarray(np.stack([column, -column], axis=1), jnp.bfloat16)
    made = jax.jit(lambda x, weight: layers.product(DOWN, x, weight))(x, weight)
    assert made.dtype == jnp.bfloat16
    assert made.tolist() == [[[0.125, -0.125]] * rows]


@pytest.mark.parametrize(
    ("dtype", "batch", "rows", "multiplied"),
    [("bfloat16", 1, 1, 2), ("bfloat16", 1, 3, 3), ("bfloat16", 2, 1, 1), ("float32", 1, 1, 1)],
)
def test_only_a_lone_row_in_half_precision_is_doubled(dtype, batch, rows, multiplied):
    x, weight = jnp.ones((batch, rows, 8), dtype), jnp.ones((8, 4), dtype)
    program = jax.make_jaxpr(lambda x, weight: layers.product(DOWN, x, weight))(x, weight)
    (dot,) = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "dot_general"]
    assert dot.invars[0].aval.shape == (batch, multiplied, 8)
    assert program.out_avals[0].shape == (batch, rows, 4)


def test_a_lone_row_of_a_large_weight_is_as_it_is():
    """Such a weight a GPU reads at full speed for one row."""
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, 2048), (2048, 8192)))
    program = jax.make_jaxpr(lambda x, weight: layers.product(DOWN, x, weight))(x, weight)
    assert [equation.primitive.name for equation in program.jaxpr.eqns] == ["dot_general"]
