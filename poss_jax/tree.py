"""The dynamic draft tree (EAGLE-2, arXiv 2406.16858) with static shapes: grow, prune, ancestors, masks.

Candidates are numbered level by level, within a level by the rank of their parent among the expanded nodes
(best first), then by their rank under it. Ties go to the lower number, so to the shallower level: a
log-probability of exactly 0 makes a child as good as its parent, and must not push it out.

Extra shape letters here: n nodes of the tree (root included), w expanded nodes of a level, c candidates.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """How far a tree reaches: `levels` below the root, `total_nodes` root included, `top_k` nodes a level."""

    levels: int = 6
    total_nodes: int = 60
    top_k: int = 10

    def __post_init__(self):
        for name in ("total_nodes", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} must be at least 1")
        if self.levels < 0:
            raise InputError(f"levels {self.levels} must be at least 0")

    def clamp(self, vocab_size: int) -> "TreeShape":
        """The shape that can be filled: at most the vocabulary wide, no more nodes than candidates.

        A kept node's parent is kept, so n nodes reach at most n - 1 levels deep and deeper ones are not drafted.
        Example: top_k 2 and 2 levels give 2 + 4 candidates, so 60 nodes become 7.
        """
        top_k = min(self.top_k, vocab_size)
        candidates = top_k + max(self.levels - 1, 0) * top_k**2 if self.levels else 0
        nodes = min(self.total_nodes, 1 + candidates)
        return TreeShape(levels=min(self.levels, nodes - 1), total_nodes=nodes, top_k=top_k)


ROOT_ONLY = TreeShape(levels=0, total_nodes=1, top_k=1)


class Tree(NamedTuple):
    """Nodes in candidate order, the root first. The root has parent -1, depth 0 and score 0.

    tokens, parents, depths: [b, n] int32; scores: [b, n] float32, sums of log-probabilities in nats;
    mask: [b, n, n] bool, true where the second node is the first one or an ancestor of it.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    scores: jax.Array
    mask: jax.Array


class Level(NamedTuple):
    """Candidates of one level [b, c]: token, score, and the number of the parent candidate (-1: the root)."""

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


class Beam(NamedTuple):
    """Expanded nodes of one level [b, w]: token, score, candidate number, and place of the parent in the
    expanded level above. `ancestors` [b, w, depth * w]: which rows of all expanded levels a node sees, its own
    included.
    """

    tokens: jax.Array
    scores: jax.Array
    numbers: jax.Array
    parents: jax.Array
    ancestors: jax.Array


def _at_most_certain(log_probs: jax.Array) -> jax.Array:
    """Log-probabilities that keep a child from beating its parent, which would be pruned and orphan it.

    A drafter may overflow to NaN, which top-k takes for the largest number; and a sum of exponentials may come out a
    rounding error below its largest term.
    """
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, jnp.minimum(log_probs, 0.0))


def first_level(tokens: jax.Array, log_probs: jax.Array) -> tuple[Level, Beam]:
    """The `top_k` best tokens after the root [b, w] are all candidates and all expanded."""
    batch, width = tokens.shape
    log_probs = _at_most_certain(log_probs)
    numbers = jnp.broadcast_to(jnp.arange(width), (batch, width))
    root = jnp.full((batch, width), -1)
    itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    return Level(tokens, log_probs, root), Beam(tokens, log_probs, numbers, root, itself)


def next_level(beam: Beam, tokens: jax.Array, log_probs: jax.Array, first_number: int) -> tuple[Level, Beam]:
    """From the best tokens under each expanded node [b, w, w]: all are candidates, the best w are expanded.

    `first_number` is how many candidates the levels above hold.
    """
    batch, width, _ = tokens.shape
    scores = (beam.scores[..., None] + _at_most_certain(log_probs)).reshape(batch, -1)  # [b, w * w]
    tokens = tokens.reshape(batch, -1)
    level = Level(tokens, scores, jnp.repeat(beam.numbers, width, axis=1))
    best_scores, best = jax.lax.top_k(scores, width)  # the lower index wins ties
    parents = best // width
    inherited = jnp.take_along_axis(beam.ancestors, parents[..., None], axis=1)
    itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    return level, Beam(
        tokens=jnp.take_along_axis(tokens, best, axis=1),
        scores=best_scores,
        numbers=first_number + best,
        parents=parents,
        ancestors=jnp.concatenate([inherited, itself], axis=-1),
    )


def root_only(root: jax.Array) -> Tree:
    """The tree of plain decoding: the root tokens [b] and nothing below."""
    ones = jnp.ones((root.shape[0], 1), jnp.int32)
    return Tree(root[:, None], -ones, 0 * ones, jnp.zeros(ones.shape, jnp.float32), (ones == 1)[..., None])


def assemble(root: jax.Array, levels: list[Level], shape: TreeShape) -> Tree:
    """The root [b] and the `total_nodes - 1` best of all candidates."""
    batch = root.shape[0]
    depths = np.concatenate([np.full(level.tokens.shape[1], depth + 1) for depth, level in enumerate(levels)])
    tokens, scores, parents = (jnp.concatenate(column, axis=1) for column in zip(*levels, strict=True))
    kept = jnp.sort(jax.lax.top_k(scores, shape.total_nodes - 1)[1], axis=1)  # [b, n - 1], candidate order
    nodes = jnp.broadcast_to(jnp.arange(1, shape.total_nodes, dtype=jnp.int32), kept.shape)
    # Candidate number -> node; one slot more so that the root's -1 finds node 0.
    node_of = jnp.zeros((batch, len(depths) + 1), jnp.int32)
    node_of = jax.vmap(lambda table, places, values: table.at[places].set(values))(node_of, kept, nodes)
    parents = jnp.take_along_axis(node_of, jnp.take_along_axis(parents, kept, axis=1), axis=1)

    def with_root(first: jax.Array, rest: jax.Array, dtype=jnp.int32) -> jax.Array:
        return jnp.concatenate([jnp.broadcast_to(first, (batch,))[:, None], rest], axis=1).astype(dtype)

    parents = with_root(-1, parents)
    return Tree(
        tokens=with_root(root, jnp.take_along_axis(tokens, kept, axis=1)),
        parents=parents,
        depths=with_root(0, jnp.asarray(depths)[kept]),
        scores=with_root(0, jnp.take_along_axis(scores, kept, axis=1), jnp.float32),
        mask=ancestor_mask(parents, shape.levels),
    )


def pad(tree: Tree, multiple: int) -> Tree:
    """The tree with nodes behind it that nobody sees, up to a multiple of so many; one of the root alone as it is."""
    nodes = tree.tokens.shape[1]
    more = -nodes % multiple if nodes > 1 else 0

    def widen(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, 0), *[(0, more)] * (array.ndim - 1)])

    return Tree(*map(widen, tree))


def ancestor_mask(parents: jax.Array, levels: int) -> jax.Array:
    """[b, n, n] from parents [b, n]: each round lets a node see one generation further up."""
    itself = jnp.eye(parents.shape[1], dtype=bool)
    mask = jnp.broadcast_to(itself, (*parents.shape, parents.shape[1]))
    for _ in range(levels):
        mask = itself | jnp.take_along_axis(mask, jnp.maximum(parents, 0)[..., None], axis=1)
    return mask
