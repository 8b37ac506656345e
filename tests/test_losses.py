"""The draft loss and its written-out gradient against plain formulas and autodiff; and the two-stage top-k in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from poss_jax import losses
from poss_jax.errors import InputError
from poss_jax.losses import Losses, LossWeights, loss_sums, mean, weighted_total
from poss_jax.top_k import top_k
from tests.test_unroll import equations, quick_jit

STEPS, BATCH, ROWS, HIDDEN, VOCAB = 3, 4, 10, 8, 50
DEFAULT = LossWeights()


def plain_loss(head_params, predicted, target, supervised, weights, groups=1, offsets=None):
    """`loss_sums` with whole logits, from library functions, to be differentiated by JAX; `groups` change nothing."""
    matrix = head_params["head"] if "head" in head_params else head_params["embed"].T
    logits, target_logits = predicted @ matrix, target @ matrix
    cross = optax.softmax_cross_entropy
    law, log_law = jax.nn.softmax(target_logits), jax.nn.log_softmax(logits)
    _, best = jax.lax.top_k(target_logits, min(weights.likeliest, matrix.shape[1]))
    of_best = functools.partial(jnp.take_along_axis, indices=best, axis=-1)
    steps = jnp.arange(len(predicted))[:, None, None]
    counts = (supervised > 0) & (steps <= (len(predicted) if offsets is None else offsets))
    rows = Losses(
        optax.huber_loss(predicted, jnp.broadcast_to(target, predicted.shape)).mean(-1),
        cross(logits, jnp.broadcast_to(law, logits.shape)),
        jnp.stack([-(of_best(law) * of_best(step)).sum(-1) for step in log_law]),
        logits.argmax(-1) == target_logits.argmax(-1),
    )
    terms = Losses(*(jnp.where(counts, part, 0).sum(axis=(1, 2)) for part in rows))
    by_step = jnp.asarray(weights.steps or (1.0,) * len(predicted))
    return jnp.sum(by_step * weighted_total(terms, weights)), terms


def with_gradient(function):
    """`function` giving total, terms, and the gradient of 0.7 * total for predicted features; not compiled before."""

    def run(head_params, predicted, target, supervised, offsets=None, *, weights=DEFAULT, groups=1):
        def total(predicted):
            total, terms = function(head_params, predicted, target, supervised, weights, groups, offsets)
            return 0.7 * total, (total, terms)

        gradient, (total, terms) = jax.grad(total, has_aux=True)(predicted)
        return total, terms, gradient

    return run


def compiled(function):
    return quick_jit(with_gradient(function), static_argnames=("weights", "groups"))


_plain_compiled = compiled(plain_loss)


def plain(*given, weights=DEFAULT):
    """The plain formulas in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype(np.float64) if array.dtype == np.float32 else array, given)
        return jax.tree.map(np.asarray, _plain_compiled(*wide, weights=weights))


def arrays(vocab: int = VOCAB, tied: bool = False) -> tuple:
    """Head, predicted and target features; some predictions are near their target, and some far off."""
    random = np.random.default_rng(0)
    target = random.normal(size=(BATCH, ROWS, HIDDEN))
    width = random.choice([0.1, 2], (BATCH, ROWS, 1))
    predicted = target + random.normal(size=(STEPS, BATCH, ROWS, HIDDEN)) * width
    head = random.normal(size=(HIDDEN, vocab))
    head, predicted, target = (array.astype(np.float32) for array in (head, predicted, target))
    return {"embed": head.T} if tied else {"head": head}, predicted, target


def assert_same(got, expected, name=""):
    for one, other in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, err_msg=name)
        assert one.dtype == jnp.float32
    scale = max(1, np.abs(expected[2]).max())  # a gradient is a difference of numbers that are near 1 even if it is not
    np.testing.assert_allclose(got[2], expected[2], atol=3e-6 * scale, rtol=0, err_msg=name)


ONE_ROW = np.zeros((BATCH, ROWS), np.int32)
ONE_ROW[2, 7] = 1
SUPERVISED = {
    "none": 0 * ONE_ROW,
    "one row": ONE_ROW,
    "all": 0 * ONE_ROW + 1,
    "one group only": np.repeat([0, 1, 0, 0], ROWS).reshape(BATCH, ROWS).astype(np.int32),
} | {
    f"{share} of them": (np.random.default_rng(1).random((BATCH, ROWS)) < share).astype(np.int32)
    for share in (0.1, 0.5, 0.9)
}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_terms_and_gradient_are_those_of_plain_formulas(groups):
    """Whatever is supervised, however the batch is cut; steps that no chain reaches and steps of weight 0."""
    ours = compiled(loss_sums)
    offsets = np.broadcast_to(np.r_[0:6, 0:4], (BATCH, ROWS))  # two conversations in each row
    weights = LossWeights(steps=(1.0, 0.0, 0.25))
    for name, supervised in SUPERVISED.items():
        given = (*arrays(), supervised, offsets)
        got = ours(*given, weights=weights, groups=groups)
        assert_same(got, plain(*given, weights=weights), name)
        assert np.any(got[2]) == (name != "none")
        assert not np.any(got[2][1])
    assert float(ours(*arrays(), SUPERVISED["none"], offsets, weights=weights, groups=groups)[0]) == 0.0


@pytest.mark.parametrize(("chunk", "groups"), [(1, 4), (7, 1), (7, 2), (10, 4), (39, 1)])
def test_logits_exist_for_a_chunk_of_rows_at_a_time(monkeypatch, chunk, groups):
    """40 rows, or 20 or 10 of each group; the last chunk is rarely full."""
    monkeypatch.setattr(losses, "ROW_CHUNK", chunk)
    ours = compiled(loss_sums)
    for name, supervised in SUPERVISED.items():
        given = (*arrays(), supervised)
        assert_same(ours(*given, groups=groups), plain(*given), name)
    program = jax.make_jaxpr(functools.partial(with_gradient(loss_sums), groups=groups))(*given)
    shapes = {variable.aval.shape for equation in equations(program.jaxpr) for variable in equation.outvars}
    rows = {int(np.prod(shape[:-1])) for shape in shapes if shape[-1:] == (VOCAB,)}
    assert max(rows) == STEPS * groups * chunk


@pytest.mark.parametrize(
    "weights",
    [
        LossWeights(feature=0.0),
        LossWeights(token=0.0),
        LossWeights(top_k=0.0),
        LossWeights(0.0, 0.0, 0.0),
        LossWeights(0.5, 0.25, 2.0, 1, (0.5, 2.0, 3.0)),
        LossWeights(likeliest=64),  # of 50 tokens
    ],
    ids=lambda weights: repr(weights).removeprefix("LossWeights"),
)
def test_weights(weights):
    given = (*arrays(), SUPERVISED["0.5 of them"])
    assert_same(compiled(loss_sums)(*given, weights=weights), plain(*given, weights=weights))


@pytest.mark.parametrize("vocab", [50, 1543], ids=["small", "vocabulary of two-stage top-k"])
def test_a_tied_embedding_is_the_head(vocab):
    given = (*arrays(vocab, tied=True), SUPERVISED["0.5 of them"])
    got = compiled(loss_sums)(*given, weights=LossWeights(likeliest=3))
    assert_same(got, plain(*given, weights=LossWeights(likeliest=3)))


def test_rows_that_do_not_count_may_hold_anything():
    """Also those rows that a chunk takes along to be full, and steps that no chain reaches."""
    head, predicted, target = arrays()
    supervised, offsets = SUPERVISED["0.5 of them"], np.broadcast_to(np.arange(ROWS), (BATCH, ROWS))
    counts = (supervised > 0) & (np.arange(STEPS)[:, None, None] <= offsets)
    ours = compiled(loss_sums)
    clean = ours(head, predicted, target, supervised, offsets)
    for anything in (np.nan, np.inf, -np.inf, 1e38):
        bad_target = np.where(supervised[..., None] > 0, target, np.float32(anything))
        bad = ours(head, np.where(counts[..., None], predicted, np.float32(anything)), bad_target, supervised, offsets)
        jax.tree.map(np.testing.assert_array_equal, bad, clean)
    assert not np.any(clean[2][~counts])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits(size):
    """Single tokens have all of the probability. At 1e4 neighbouring float32 numbers are 0.001 apart, so a probability
    that comes from a difference of such may be off by a thousandth.
    """
    head, predicted, target = arrays()
    head = {"head": head["head"] * np.float32(size / np.abs(target @ head["head"]).max())}
    given = (head, predicted, target, SUPERVISED["all"])
    got, expected = compiled(loss_sums)(*given), plain(*given)
    assert np.abs(predicted @ head["head"]).max() > 1e4
    for one, other in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    np.testing.assert_allclose(got[2], expected[2], atol=1e-3 * np.abs(expected[2]).max(), rtol=0)


def test_bfloat16_rows_have_float32_sums_and_a_bfloat16_gradient():
    """A logit of 4 to 8 is off by up to 2 ** -6 = 0.016 in bfloat16, and so is the probability of its token."""
    head, *rows = arrays()
    narrow = [jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), part) for part in (head, *rows)]
    total, terms, gradient = compiled(loss_sums)(*narrow, SUPERVISED["all"])
    expected = plain(*jax.tree.map(lambda array: np.asarray(array, np.float32), narrow), SUPERVISED["all"])
    assert (total.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    assert {term.dtype for term in terms} == {jnp.dtype("float32")}
    np.testing.assert_allclose(total, expected[0], rtol=2e-3)
    error = jnp.linalg.norm(gradient - expected[2]) / jnp.linalg.norm(expected[2])
    assert error < 0.01


def test_means_and_weighted_totals():
    supervised = jnp.asarray([[1, 1, 0, 1]])
    np.testing.assert_allclose(mean(jnp.float32(6), supervised), 6 / 3.00001, rtol=1e-7)
    assert mean({"a": jnp.zeros(2)}, 0 * supervised)["a"].tolist() == [0, 0]
    terms = Losses(
        jnp.asarray([2.0, 3.0]), jnp.asarray([10.0, 20.0]), jnp.asarray([0.25, 0.5]), jnp.asarray([1.0, 0.0])
    )
    np.testing.assert_allclose(weighted_total(terms, LossWeights()), [3.25, 5.5])
    np.testing.assert_allclose(weighted_total(terms, LossWeights(2.0, 0.0, 4.0)), [5.0, 8.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature": -1.0}, r"loss weights \(-1.0, 0.1, 1.0\) must be numbers of at least 0"),
        ({"token": float("nan")}, "must be numbers of at least 0"),
        ({"steps": (1.0, float("inf"))}, "must be numbers of at least 0"),
        ({"likeliest": 0}, "top-K of the loss is 0; it must be at least 1"),
    ],
)
def test_weights_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        LossWeights(**options)


def test_there_are_as_many_step_weights_as_steps():
    assert LossWeights().by_step(3) == (1.0, 1.0, 1.0)
    assert LossWeights(steps=(1.0, 0.5)).by_step(2) == (1.0, 0.5)
    with pytest.raises(InputError, match="2 step weights were given for 3 steps of the unroll"):
        LossWeights(steps=(1.0, 0.5)).by_step(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "k"), [(1, 1), (9, 9), (511, 1), (512, 1), (1535, 3), (1536, 3), (1537, 3), (5121, 10), (5248, 10)]
)
def test_top_k_is_that_of_lax(size, k, dtype):
    """In one stage below 4 * 128 * k, in two from there on. Ties go to the lower index, also those of -inf."""
    random = np.random.default_rng(size)
    rows = [
        random.normal(size=size),
        random.integers(0, 3, size),  # nearly all are ties
        np.zeros(size),
        np.where(random.random(size) < 0.999, -np.inf, random.normal(size=size)),
        np.full(size, -np.inf),
        np.r_[np.full(size - 1, -np.inf), 1],  # in a group that is filled up
        np.arange(size) / size,
        -np.arange(size) / size,
        np.where(np.arange(size) % 128 == 127, 1.0, -1.0),  # as many equal groups as there are
    ]
    values = jnp.asarray(np.stack(rows).reshape(3, 3, size), dtype)
    got = quick_jit(top_k, static_argnums=1)(values, k)
    expected = jax.lax.top_k(values, k)
    assert (got[0].dtype, got[1].dtype) == (values.dtype, jnp.int32)
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(expected[0], np.float32))
