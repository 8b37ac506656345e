"""The draft tree against golden/README section 3 spelled out over Python lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poss_jax import tree
from poss_jax.errors import InputError
from poss_jax.tree import TreeShape


def grow(log_probs: np.ndarray, root: int, shape: TreeShape) -> tree.Tree:
    """A tree for a law that depends on the last token only: `log_probs` [v, v]."""
    table = jnp.asarray(log_probs)

    def best(tokens):
        values, best_tokens = jax.lax.top_k(table[tokens], shape.top_k)
        return best_tokens, values

    level, beam = tree.first_level(*best(jnp.array([root])))
    levels = [level]
    for _ in range(shape.levels - 1):
        first_number = sum(level.tokens.shape[1] for level in levels)
        level, beam = tree.next_level(beam, *best(beam.tokens), first_number)
        levels.append(level)
    return tree.assemble(jnp.array([root]), levels, shape)


grow_jitted = functools.partial(jax.jit, static_argnums=2)(grow)


def expected_paths(log_probs: np.ndarray, root: int, shape: TreeShape) -> list[tuple[tuple[int, ...], float]]:
    """Kept nodes as (path, score) in candidate order."""
    expanded = [((), np.float32(0))]
    candidates = []
    for _ in range(shape.levels):
        level = []
        for path, score in expanded:
            law = log_probs[path[-1] if path else root]
            best = sorted(range(len(law)), key=lambda token: (-law[token], token))[: shape.top_k]
            level += [((*path, token), np.float32(score + law[token])) for token in best]
        candidates += level
        order = sorted(range(len(level)), key=lambda index: (-level[index][1], index))
        expanded = [level[index] for index in order[: shape.top_k]]
    order = sorted(range(len(candidates)), key=lambda index: (-candidates[index][1], index))
    return [candidates[index] for index in sorted(order[: shape.total_nodes - 1])]


def paths_of(grown: tree.Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(grown.tokens[0].tolist(), grown.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    levels=st.integers(1, 5),
    total_nodes=st.integers(2, 40),
    top_k=st.integers(1, 5),
    step=st.sampled_from([0.0, 0.5]),
)
def test_tree_is_the_best_of_all_candidates(seed, levels, total_nodes, top_k, step):
    """`step` rounds log-probabilities, so that ties are everywhere, log-probabilities of 0 among them."""
    random = np.random.default_rng(seed)
    log_probs = -random.exponential(1.0, (7, 7)).astype(np.float32)
    if step:
        log_probs = (np.round(log_probs / step) * step).astype(np.float32)
    shape = TreeShape(levels, total_nodes, top_k).clamp(7)
    grown = grow_jitted(log_probs, 3, shape)
    expected = expected_paths(log_probs, 3, shape)
    paths = paths_of(grown)
    assert paths == [(), *(path for path, _ in expected)]
    np.testing.assert_allclose(grown.scores[0, 1:], [score for _, score in expected], rtol=1e-6)
    assert grown.depths[0].tolist() == [len(path) for path in paths]
    for node, path in enumerate(paths):
        ancestors = [paths.index(path[:depth]) for depth in range(len(path) + 1)]
        assert np.flatnonzero(grown.mask[0, node]).tolist() == sorted(ancestors)


def test_a_child_as_good_as_its_parent_does_not_push_it_out():
    """Token 0 is followed by token 0 with certainty: scores 0 all the way down."""
    log_probs = np.full((4, 4), -20.0, np.float32)
    log_probs[:, 0] = 0.0
    grown = grow(log_probs, 0, TreeShape(levels=4, total_nodes=4, top_k=3))
    assert paths_of(grown) == [(), (0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("asked", "vocab", "filled"),
    [
        (TreeShape(6, 60, 10), 128256, TreeShape(6, 60, 10)),
        (TreeShape(2, 60, 2), 64, TreeShape(2, 7, 2)),  # G09: 2 + 4 candidates and the root
        (TreeShape(6, 60, 10), 8, TreeShape(6, 60, 8)),
        (TreeShape(6, 1, 10), 64, TreeShape(0, 1, 10)),
        (TreeShape(6, 3, 10), 64, TreeShape(2, 3, 10)),
        (TreeShape(1, 60, 4), 64, TreeShape(1, 5, 4)),
        (TreeShape(3, 60, 1), 64, TreeShape(3, 4, 1)),
    ],
)
def test_shapes_are_clamped_to_what_can_be_filled(asked, vocab, filled):
    assert asked.clamp(vocab) == filled


@pytest.mark.parametrize("wrong", [(-1, 60, 10), (6, 0, 10), (6, 60, 0)])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(InputError, match="must be at least"):
        TreeShape(*wrong)


def test_ancestors_of_a_small_tree():
    parents = jnp.array([[-1, 0, 0, 1, 3]])
    mask = tree.ancestor_mask(parents, 3)[0].astype(int).tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


@pytest.mark.parametrize("broken", [np.nan, np.inf, 1e-7], ids=["NaN", "infinite", "a rounding error above certainty"])
def test_a_drafter_that_overflows_orphans_no_node(broken):
    """NaN would rank above every number, and a child above its parent would be kept without it."""
    random = np.random.default_rng(0)
    log_probs = -random.exponential(1.0, (6, 6)).astype(np.float32)
    log_probs[1:4] = broken
    grown = grow(log_probs, 0, TreeShape(levels=4, total_nodes=12, top_k=3))
    depths, parents = grown.depths[0].tolist(), grown.parents[0].tolist()
    assert depths == [0 if parent < 0 else depths[parent] + 1 for parent in parents]
    assert not np.isnan(grown.scores).any()
