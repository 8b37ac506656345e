"""Walking the tree, and the laws that tokens are drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax import verify
from poss_jax.errors import InputError
from poss_jax.sampling import Sampling, warp
from poss_jax.tree import Tree, ancestor_mask

#        0:7
#       /   \
#     1:4   2:5
#    /   \     \
#  3:5   4:6   5:4
TOKENS, PARENTS, DEPTHS = [7, 4, 5, 5, 6, 4], [-1, 0, 0, 1, 1, 2], [0, 1, 1, 2, 2, 2]
TREE = Tree(
    jnp.array(TOKENS),
    jnp.array(PARENTS),
    jnp.array(DEPTHS),
    jnp.zeros(6),
    ancestor_mask(jnp.array([PARENTS]), 2)[0],
)


@pytest.mark.parametrize(
    ("choices", "path", "length", "next_token"),
    [
        ([9, 0, 0, 0, 0, 0], [0, 0, 0], 0, 9),
        ([4, 9, 0, 0, 0, 0], [0, 1, 1], 1, 9),
        ([4, 6, 0, 0, 8, 0], [0, 1, 4], 2, 8),
        ([5, 4, 4, 0, 0, 5], [0, 2, 5], 2, 5),
        ([5, 0, 5, 0, 0, 0], [0, 2, 2], 1, 5),  # token 5 is a child of node 1, not of node 2
        ([7, 0, 0, 0, 0, 0], [0, 0, 0], 0, 7),  # the root is not its own child
    ],
)
def test_walk_follows_the_targets_choices(choices, path, length, next_token):
    accepted = verify.walk(TREE, lambda node, depth: jnp.array(choices)[node], levels=2)
    assert (accepted.path.tolist(), int(accepted.length), int(accepted.next_token)) == (path, length, next_token)


def test_walk_asks_each_depth_once_for_its_own_draw():
    asked = []

    def choose(node, depth):
        asked.append(depth)
        return jnp.int32(4)

    verify.walk(TREE, choose, levels=2)
    assert asked == [0, 1, 2]


def test_greedy_takes_the_lowest_of_equal_tokens():
    choose = verify.greedy(jnp.array([[0.0, 2.0, 2.0]]), jax.random.key(0), jnp.int32(5))
    assert int(choose(jnp.int32(0), 0)) == 1


def test_a_draw_depends_on_seed_and_position_and_not_on_where_the_round_began():
    """The token at position 12 is the same as depth 0 after a root at 11 and as depth 3 after a root at 8."""
    logits = jnp.zeros((4, 50))
    rule = verify.rule_for(Sampling(temperature=1.0))
    key = jax.random.key(3)
    draws = [int(rule(logits, key, jnp.int32(11 - depth))(jnp.int32(depth), depth)) for depth in range(4)]
    assert len(set(draws)) == 1
    others = {int(rule(logits, key, jnp.int32(position))(jnp.int32(0), 0)) for position in range(20)}
    assert len(others) > 10


@pytest.mark.slow
def test_rare_tokens_are_drawn_as_often_as_they_are_probable():
    """131,071 tokens of 3e-8 each: 3.9 of 1,000 draws. JAX's usual noise hardly ever reaches them."""
    law = jnp.full(131072, 3e-8).at[7].set(1 - 131071 * 3e-8)
    choose = verify.rule_for(Sampling(temperature=1.0))(jnp.log(law)[None], jax.random.key(0), jnp.int32(0))
    every = jax.jit(lambda: jax.lax.map(lambda depth: choose(0, depth), jnp.arange(1000), batch_size=16))
    draws = every.lower().compile({"xla_backend_optimization_level": 3})()
    assert 2 <= int((draws != 7).sum()) <= 10


LOGITS = np.random.default_rng(0).normal(0, 2, (6, 40)).astype(np.float32)
LOGITS[3, :20] = LOGITS[3, 20:]  # every logit twice
LOGITS[4] = 0.0
LOGITS[5] *= 5e3  # gaps of 1e4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.05, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.91, 0.31, 1e-6])
def test_warped_law_equals_transformers(temperature, top_k, top_p):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    theirs = torch.tensor(LOGITS)
    theirs = process.TemperatureLogitsWarper(temperature)(None, theirs)
    if top_k:
        theirs = process.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = process.TopPLogitsWarper(top_p)(None, theirs)
    ours = jax.vmap(lambda row: warp(Sampling(temperature, top_k, top_p), row))(LOGITS)
    theirs = theirs.softmax(-1).numpy()
    ours = np.asarray(jax.nn.softmax(ours))
    assert np.isfinite(ours).all()
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if row in (3, 4) and top_p < 1:  # which of equal tokens top-p drops is left open: compare as multisets
            a, b = np.sort(a), np.sort(b)
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_huge_gaps_and_low_temperature_give_no_nan(dtype):
    """EAGLE #45: logit gaps of 1e4 in half precision at T=0.05."""
    logits = jnp.array([1e4, 0.0, -1e4, 9.9e3], dtype)
    law = jax.nn.softmax(warp(Sampling(0.05, 3, 0.9), logits))
    assert law.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)
