"""Models of well-known shapes with random weights, for benchmarks: nothing has to be there but the device."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax import sharding
from poss_jax.config import BlockConfig, RopeConfig, TargetConfig
from poss_jax.llama import ParameterSpec
from poss_jax.objective import Params

SHAPES = {
    "smollm2-135m": TargetConfig(
        BlockConfig(576, 1536, 9, 3, 64, 1e-5, RopeConfig(theta=100_000.0)), 49_152, 30, 8192, tie_embeddings=True
    ),
    "llama3-8b": TargetConfig(
        BlockConfig(4096, 14_336, 32, 8, 128, 1e-5, RopeConfig(theta=500_000.0)), 128_256, 32, 8192
    ),
    "llama2-13b": TargetConfig(BlockConfig(5120, 13_824, 40, 40, 128, 1e-5, RopeConfig()), 32_000, 40, 4096),
    "llama3-70b": TargetConfig(
        BlockConfig(8192, 28_672, 64, 8, 128, 1e-5, RopeConfig(theta=500_000.0)), 128_256, 80, 8192
    ),
}


def random_params(specs: Params, mesh: Mesh, dtype: jnp.dtype) -> Params:
    """Small random parameters, made on the mesh."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def make(index, shape: tuple[int, ...], place):
        scale = 0.02 if len(shape) > 1 else 1.0
        random = scale * jax.random.normal(jax.random.fold_in(jax.random.key(0), index), shape, dtype)
        return jax.lax.with_sharding_constraint(random, place)

    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    places = [sharding.parameter_sharding(mesh, spec) for spec in leaves]
    made = [make(index, spec.shape, place) for index, (spec, place) in enumerate(zip(leaves, places, strict=True))]
    return jax.tree.unflatten(tree, made)
