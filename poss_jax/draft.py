"""Drafting a tree: each level of nodes goes through the specialist whose span holds its position."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poss_jax import cache, llama, tree
from poss_jax.attention import Filled, KeyValues, Part, attention
from poss_jax.config import DraftConfig
from poss_jax.int8 import cast
from poss_jax.specialist import BoundDrafter
from poss_jax.top_k import top_k
from poss_jax.tree import Beam, Level, Tree, TreeShape

Params = dict[str, Any]
Caches = tuple[KeyValues, ...]  # one per specialist in use


class Fresh(NamedTuple):
    """Draft input rows that the prefix caches may not hold yet, because their tokens were just accepted.

    x [b, t, h]: inputs of rows start[b] .. start[b] + t - 1, of which the first `count` [b] are real.
    """

    x: jax.Array
    start: jax.Array
    count: jax.Array

    @property
    def positions(self) -> jax.Array:
        """Rotary positions [b, t]; the real rows end at row n - 1 where n tokens are committed."""
        return self.start[:, None] + jnp.arange(self.x.shape[1])


class Functions(NamedTuple):
    """A drafter with its parameters and what it borrows from the target: embedding unless it has one, head unless it
    has one under `vocab`: `head`, and `ids` if that is a `trim_head`.
    """

    config: DraftConfig
    params: Params
    target: llama.Params

    @property
    def drafter(self) -> BoundDrafter:
        return BoundDrafter(self.config, self.params)

    def inputs(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """x [b, t, h] of rows with `tokens` [b, t] (each one after its feature) and `features` [b, t, h]."""
        embed = self.params.get("embed", self.target["embed"])
        return self.drafter.inputs(embed[tokens], features)

    def best_tokens(self, predicted: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """The `width` most probable tokens after predicted features [b, t, h] and their log-probabilities, among those
        that the drafter may propose.
        """
        vocab = self.params.get("vocab", {})
        head = {"head": cast(vocab["head"], predicted)} if vocab else self.target
        logits = llama.head(head, predicted)
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)  # of a drafter that overflows
        values, tokens = top_k(logits, width)
        tokens = vocab["ids"][tokens] if "ids" in vocab else tokens
        return tokens, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def trim_head(target: llama.Params, ids: jax.Array) -> Params:
    """The target's head for the tokens `ids` [n] alone: `head` [h, n], and `ids`, int32. As `vocab` among a drafter's
    parameters it leaves the other tokens to the target, which still chooses among all.
    """
    head = target["head"][:, ids] if "head" in target else target["embed"][ids].T
    return {"head": head, "ids": jnp.asarray(ids, jnp.int32)}


def fill_prefix(functions: Functions, tokens: jax.Array, features: jax.Array, caches: Caches) -> Caches:
    """Writes the rows of a whole prompt into every specialist's cache, from slot 0.

    `tokens` [b, t] are those that follow each feature; rows of padding are written too and never seen.
    """
    x = functions.inputs(tokens, features)
    batch, rows = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    start = jnp.zeros((batch,), jnp.int32)
    return tuple(
        cache.write(rows_cache, functions.drafter.project(index, x, positions)[1], start)
        for index, rows_cache in enumerate(caches)
    )


def draft_tree(
    functions: Functions, shape: TreeShape, root: jax.Array, fresh: Fresh, caches: Caches, kernel: str = "plain"
) -> tuple[Tree, Caches]:
    """Drafts the tree under the tokens `root` [b], and brings every cache up to date with `fresh`. `kernel`: see
    `attention`.

    Position 0 asks from the last real fresh row; a node of depth p is expanded at position p, from the feature
    predicted when its parent was. Keys and values that a position sees all come from its own specialist, so a
    specialist whose span begins also projects the nodes that earlier ones drafted in this round.
    """
    committed = fresh.start + fresh.count
    caches = list(caches)
    levels: list[Level] = []
    beam: Beam | None = None
    drafted: list[jax.Array] = []  # x [b, w, h] of each expanded level so far
    rows = predicted = None
    for position in range(shape.levels):
        specialist = functions.config.specialist_at(position)
        if beam is not None:
            drafted.append(functions.inputs(beam.tokens, _parent_features(predicted, beam)))
        if position in functions.config.starts:
            query, caches[specialist], rows = _begin_span(
                functions, specialist, drafted, fresh, caches[specialist], committed
            )
        else:
            query, new = functions.drafter.project(
                specialist, drafted[-1], _positions(committed, position, drafted[-1])
            )
            rows = _append(rows, new)
        parts = [Part(caches[specialist], Filled(committed))]
        if beam is not None:
            parts.append(Part(rows, beam.ancestors))
        x = _last_fresh(fresh.x, fresh.count) if beam is None else drafted[-1]
        predicted = functions.drafter.finish(specialist, x, attention(query, parts, kernel))
        tokens, log_probs = functions.best_tokens(predicted, shape.top_k)
        if beam is None:
            level, beam = tree.first_level(tokens[:, 0], log_probs[:, 0])
        else:
            first_number = sum(level.tokens.shape[1] for level in levels)
            level, beam = tree.next_level(beam, tokens, log_probs, first_number)
        levels.append(level)
    return tree.assemble(root, levels, shape), tuple(caches)


def _begin_span(
    functions: Functions,
    specialist: int,
    drafted: list[jax.Array],
    fresh: Fresh,
    prefix: KeyValues,
    committed: jax.Array,
) -> tuple[jax.Array, KeyValues, KeyValues | None]:
    """One projection of the fresh rows and of every expanded level, so that the weights are read once.

    Returns the query rows of this position, the prefix cache with the fresh rows, and the rows of the levels.
    """
    positions = [fresh.positions] + [_positions(committed, depth + 1, x) for depth, x in enumerate(drafted)]
    query, rows = functions.drafter.project(
        specialist, jnp.concatenate([fresh.x, *drafted], axis=1), jnp.concatenate(positions, axis=1)
    )
    count = fresh.x.shape[1]
    prefix = cache.write(prefix, KeyValues(*(part[:, :, :count] for part in rows)), fresh.start)
    if not drafted:
        return _last_fresh(query, fresh.count), prefix, None
    return query[:, -drafted[-1].shape[1] :], prefix, KeyValues(*(part[:, :, count:] for part in rows))


def _positions(committed: jax.Array, depth: int, x: jax.Array) -> jax.Array:
    """Rotary positions [b, w] of the expanded nodes of a depth: n - 1 + depth."""
    return jnp.broadcast_to((committed - 1 + depth)[:, None], x.shape[:2])


def _parent_features(predicted: jax.Array, beam: Beam) -> jax.Array:
    """The feature [b, w, h] predicted when each node's parent was expanded; the first level has one parent."""
    return jnp.take_along_axis(predicted, jnp.maximum(beam.parents, 0)[..., None], axis=1)


def _append(rows: KeyValues | None, new: KeyValues) -> KeyValues:
    if rows is None:
        return new
    return KeyValues(*(jnp.concatenate(pair, axis=2) for pair in zip(rows, new, strict=True)))


def _last_fresh(rows: jax.Array, count: jax.Array) -> jax.Array:
    """The last real one of fresh rows [b, t, ...], as [b, 1, ...]."""
    return cache.read_rows(rows, count - 1, 1)
