"""Figures on held-out conversations: losses, acceptance by draft position, similarity of features."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from poss_jax.acceptance import acceptance
from poss_jax.losses import mean, weighted_total
from poss_jax.objective import Params, Rows, batch_sums
from train.feed import stack
from train.packing import Batches
from train.step import Trainer


class Evaluation:
    """Evaluates drafters on the same held-out batches again and again."""

    def __init__(self, trainer: Trainer, batches: Batches):
        self._trainer, self._batches, self._first = trainer, batches, _first_met(batches)
        self._compiled = None

    def compile(self, params: Params, frozen: Params) -> None:
        """Compiles for parameters like these; otherwise the first call does."""
        whole = NamedSharding(self._trainer.mesh, PartitionSpec())
        with jax.set_mesh(self._trainer.mesh):
            sums = jax.jit(self._batch_sums, out_shardings=whole)
            self._compiled = sums.lower(params, frozen, self._rows(0)).compile()

    def _batch_sums(self, params: Params, frozen: Params, rows: Rows):
        rows = jax.tree.map(lambda array: array[0], rows)
        terms = batch_sums(self._trainer.objective, params, frozen, rows)[1]
        return terms, jnp.sum(rows.supervised), acceptance(self._trainer.objective, params, frozen, rows)

    def __call__(self, params: Params, frozen: Params) -> dict[str, float | list[float]]:
        """`loss`, the terms, `agreement`, `acceptance` (each position given that all before it were accepted), `cosine`
        by draft position, and `tokens_per_round` of a chain.
        """
        if self._compiled is None:
            self.compile(params, frozen)
        totals = _add([self._compiled(params, frozen, self._rows(index)) for index in range(self._batches.count(0))])
        terms, supervised, accepted = totals
        terms = mean(terms, supervised)
        by_step = np.array(self._trainer.objective.weights.by_step(len(terms.smooth_l1)))
        return {
            "loss": float((by_step * np.asarray(weighted_total(terms, self._trainer.objective.weights))).sum()),
            **{name: np.asarray(part).tolist() for name, part in terms._asdict().items()},
            "tokens_per_round": float(accepted.tokens_per_round),
            "acceptance": np.asarray(accepted.by_position).tolist(),
            "cosine": np.asarray(accepted.mean_cosine).tolist(),
        }

    def _rows(self, index: int) -> Rows:
        batch = self._batches.batch(0, index)
        supervised = batch.supervised * self._first[index][:, None]
        return self._trainer.put_rows(stack([dataclasses.replace(batch, supervised=supervised)]))


def _first_met(batches: Batches) -> list[np.ndarray]:
    """For each batch, 1 for each row whose examples come for the first time: the last batch may be filled up with rows
    of others, which would count twice.
    """
    met, found = set(), []
    for index in range(batches.count(0)):
        rows = batches.members(0, index)
        found.append(np.zeros(len(rows), np.int32))
        for row, numbers in enumerate(rows):
            found[-1][row] = not met.issuperset(numbers)
            met.update(numbers)
    return found


def _add(parts: Sequence):
    return jax.tree.map(lambda *arrays: sum(map(np.asarray, arrays)), *parts)
