"""Which drafted nodes the target accepts: pure functions of logits and tree.

The target chooses a token after the root; if that token is a child of the root, the walk goes on from there, and
so on until it chooses something that was not drafted. So every emitted token is the target's own choice, whatever
the tree: at temperature 0 its argmax, above 0 a draw from its law. Drawing first and looking for the draw among
the children accepts a child x with probability p(x), exactly as verifying certain proposals one after the other
(SpecInfer, arXiv 2305.09781) does, and the token after full acceptance needs no special case.

A rule is a function (logits [n, v], key, position) -> choose, and choose(node, depth) gives the token [] that the
target says after that node. A new rule is a new function of that form. All functions here are for one batch row.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax.sampling import Sampling, warp
from poss_jax.tree import Tree

Choose = Callable[[jax.Array, int], jax.Array]
Rule = Callable[[jax.Array, jax.Array, jax.Array], Choose]


class Acceptance(NamedTuple):
    """`path` [levels + 1]: accepted nodes, root first, then the last one repeated; `length` []: how many were
    accepted below the root; `next_token` []: the target's choice after the last one.
    """

    path: jax.Array
    length: jax.Array
    next_token: jax.Array


def greedy(logits: jax.Array, key: jax.Array, position: jax.Array) -> Choose:
    """The most probable token; of equals the lowest id. `key` and `position` are not used."""
    del key, position
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return lambda node, depth: choices[node]


def sampled(sampling: Sampling, logits: jax.Array, key: jax.Array, position: jax.Array) -> Choose:
    """A draw from the warped law. `position` is the sequence position of the root.

    The randomness of a token is fixed by `key` and by its position alone. So with one seed the text does not
    depend on the tree, on batch companions, or on whether there is a drafter at all.
    """

    def choose(node: jax.Array, depth: int) -> jax.Array:
        token_key = jax.random.fold_in(key, position + depth + 1)
        # By default JAX's noise ends at 16 in float32: tokens of less than 1e-7 each would hardly ever be drawn, and
        # hold a thousandth of the law together where there are 128,000 tokens.
        return jax.random.categorical(token_key, warp(sampling, logits[node]), mode="high").astype(jnp.int32)

    return choose


def rule_for(sampling: Sampling) -> Rule:
    """Greedy at temperature 0, sampling above."""
    return greedy if sampling.temperature == 0 else functools.partial(sampled, sampling)


def walk(tree: Tree, choose: Choose, levels: int) -> Acceptance:
    """Follows the target's choices down the tree, whose arrays are of one batch row: tokens [n] and so on."""
    node = jnp.int32(0)
    length = jnp.int32(0)
    walking = jnp.bool_(True)
    next_token = tree.tokens[0]
    path = [node]
    for depth in range(levels + 1):  # no node lies deeper than `levels`: the last step only chooses
        choice = choose(node, depth)
        next_token = jnp.where(walking, choice, next_token)
        matches = (tree.parents == node) & (tree.tokens == choice)
        walking = walking & jnp.any(matches)
        node = jnp.where(walking, jnp.argmax(matches).astype(jnp.int32), node)
        length = length + walking.astype(jnp.int32)
        path.append(node)
    return Acceptance(jnp.stack(path[:-1]), length, next_token)
