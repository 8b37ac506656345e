"""One update of the drafter: gradients of a batch, in micro-batches if asked, and AdamW, as one compiled program."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from poss_jax import sharding
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec
from poss_jax.losses import Losses, mean
from poss_jax.objective import Objective, Params, Rows, batch_sums

CLIPPINGS = ("value", "norm", "none")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as the authors set it. The learning rate rises linearly over `warmup` (a share of all updates) to
    `learning_rate` and falls linearly to 0. `clip`: each gradient value at `clip_at` ("value"), the global norm
    ("norm"), or nothing ("none").
    """

    learning_rate: float = 3e-5
    warmup: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: str = "value"
    clip_at: float = 0.5

    def __post_init__(self):
        if self.clip not in CLIPPINGS:
            raise InputError(f"--clip {self.clip!r} is not supported; supported: {', '.join(CLIPPINGS)}")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(f"--learning-rate {self.learning_rate}: must be above 0")
        if not 0 <= self.warmup <= 1:
            raise InputError(f"--warmup {self.warmup}: must be a share from 0 to 1")
        if not 0 < self.clip_at < float("inf"):
            raise InputError(f"--clip-at {self.clip_at}: must be above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.weight_decay < float("inf")):
            raise InputError("--beta1 and --beta2 must be from 0 to below 1, --weight-decay at least 0")

    def rate(self, update: float, updates: float) -> float:
        """Learning rate of update 1, 2, ... of `updates`: the last one's is 0. Fractions of updates are fine, so a
        run limited by time can count in seconds.
        """
        warmup = max(1.0, math.ceil(self.warmup * updates))
        rising, falling = update / warmup, (updates - update) / max(updates - warmup, 1e-9)
        return self.learning_rate * max(0.0, min(1.0, rising, falling) if updates > warmup else min(1.0, rising))

    def transformation(self) -> optax.GradientTransformation:
        """Without the learning rate, which is an argument of each update."""
        clip = {
            "value": optax.clip(self.clip_at),
            "norm": optax.clip_by_global_norm(self.clip_at),
            "none": optax.identity(),
        }
        return optax.chain(
            clip[self.clip],
            optax.scale_by_adam(b1=self.beta1, b2=self.beta2),
            optax.add_decayed_weights(self.weight_decay),
        )


class TrainState(NamedTuple):
    """What an update changes. params: float32 masters. moments: optax state, float32. step: updates done, int32."""

    params: Params
    moments: Any
    step: jax.Array


class Metrics(NamedTuple):
    """Of one update, float32. loss: weighted, all steps added. terms: each [j], unweighted. gradient_norm: before
    clipping.
    """

    loss: jax.Array
    terms: Losses
    gradient_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled programs for one objective on one mesh. `specs`: of the drafter's parameters (`draft_specs`)."""

    objective: Objective
    optimizer: OptimizerConfig
    mesh: Mesh
    specs: Params
    seed: int = 0

    def state_shardings(self) -> TrainState:
        """How a state lies on the mesh: moments like their parameters."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        params = self._by_spec(lambda spec: sharding.parameter_sharding(self.mesh, spec))
        moments = optax.tree_utils.tree_map_params(
            self.optimizer.transformation(),
            lambda _, parameter: parameter,
            self._shapes().moments,
            params,
            transform_non_params=lambda _: whole,
        )
        return TrainState(params, moments, whole)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings, for restoring a checkpoint."""
        return jax.tree.map(
            lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
            self._shapes(),
            self.state_shardings(),
        )

    def _shapes(self) -> TrainState:
        return jax.eval_shape(self._fresh, self._by_spec(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))

    def _by_spec(self, make: Callable[[ParameterSpec], Any]) -> Params:
        return jax.tree.map(make, self.specs, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))

    def _fresh(self, params: Params) -> TrainState:
        return TrainState(params, self.optimizer.transformation().init(params), jnp.int32(0))

    def start(self, params: Params) -> TrainState:
        """The state before the first update, from parameters on the mesh; these are given away."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._fresh, out_shardings=self.state_shardings(), donate_argnums=0)(params)

    def update(self, state: TrainState, frozen: Params, rows: Rows, learning_rate: jax.Array):
        """One update from `rows` [a, b, t], a micro-batches: (TrainState, Metrics). To be compiled by `jit_update`.

        The loss is the mean over all supervised rows of all micro-batches, so accumulating is the same as one large
        batch.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        (loss, terms), gradients = self._gradients(state.params, frozen, rows, key)
        loss, terms, gradients = mean((loss, terms, gradients), rows.supervised)
        updates, moments = self.optimizer.transformation().update(gradients, state.moments, state.params)
        params = jax.tree.map(lambda old, change: old - learning_rate * change, state.params, updates)
        metrics = Metrics(loss, terms, optax.tree_utils.tree_norm(gradients))
        return TrainState(params, moments, state.step + 1), metrics

    def _gradients(self, params: Params, frozen: Params, rows: Rows, key: jax.Array):
        """Sums over all micro-batches: ((loss, terms), gradients)."""

        def one(index, micro: Rows):
            def sums(params: Params):
                return batch_sums(self.objective, params, frozen, micro, jax.random.fold_in(key, index))

            return jax.value_and_grad(sums, has_aux=True)(params)

        count = rows.tokens.shape[0]
        if count == 1:
            return one(0, _first(rows))
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(one, 0, _first(rows)))

        def add(total, item):
            return jax.tree.map(jnp.add, total, one(*item)), None

        return jax.lax.scan(add, zeros, (jnp.arange(count), rows))[0]

    def jit_update(self):
        """`update` compiled for the mesh. The state is given away; metrics are whole on every device."""
        whole, state = NamedSharding(self.mesh, PartitionSpec()), self.state_shardings()
        return jax.jit(self.update, out_shardings=(state, whole), donate_argnums=0)

    def put_rows(self, rows: Rows) -> Rows:
        """Host arrays [a, b, ...] onto the mesh. Every process has all of them and keeps its devices' part."""
        place = sharding.rows_sharding(self.mesh, axis=1)
        return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, place, array.__getitem__), rows)


def _first(rows: Rows) -> Rows:
    return jax.tree.map(lambda array: array[0], rows)
