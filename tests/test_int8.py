"""Drafters in 8 bits: other trees now and then, the very same text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import Generator, Settings, generate
from infer.batch import Batch
from infer.draft_vocab import write_draft_vocab
from poss_jax import decode, layers
from poss_jax.errors import InputError
from poss_jax.int8 import cast, input_rows, is_int8, quantize, quantize_draft
from tests import golden_data

TREE = {"levels": 3, "total_nodes": 12, "draft_top_k": 4}


def test_rounding_of_a_matrix_by_hand():
    """Columns are outputs; the largest weight of each becomes 127."""
    rounded = quantize(jnp.array([[1.0, 0.0], [-0.5, 0.0], [0.004, 0.0]]), 1)
    assert rounded.values.tolist() == [[127, 0], [-64, 0], [1, 0]]  # 63.5 and 0.508, to the nearest even and up
    np.testing.assert_allclose(rounded.scale, [1 / 127, 1.0], rtol=1e-6)


def test_parameters_are_cast_and_integers_stay():
    params = {"norm": jnp.float32(2), "down": quantize(jnp.ones((2, 3)), 1)}
    ready = cast(params, jnp.zeros(3, jnp.bfloat16))
    assert ready["norm"].dtype == jnp.bfloat16
    assert ready["down"].values.dtype == jnp.int8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_rounded_matrix(dtype):
    """Also of a part of its inputs, and with outputs of several axes."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 3, 8)), dtype)
    rounded = quantize(jnp.asarray(random.normal(size=(16, 4, 5)), jnp.float32), 1)
    whole = np.asarray(rounded.values, np.float64) * np.asarray(rounded.scale, np.float64)
    for first in (0, 8):
        made = layers.product("bth,hzi->btzi", x, input_rows(rounded, first, first + 8))
        assert made.dtype == x.dtype
        expected = np.einsum("bth,hzi->btzi", np.asarray(x, np.float64), whole[first : first + 8])
        np.testing.assert_allclose(
            np.asarray(made, np.float64), expected, rtol=1e-2, atol=2e-2 if dtype == "bfloat16" else 1e-5
        )


def test_results_are_scaled_and_not_matrices():
    """A scaled matrix is a wide one, which a GPU writes to memory and reads again for every product."""
    x, rounded = jnp.ones((1, 10, 64), jnp.bfloat16), quantize(jnp.ones((64, 48)), 1)
    program = jax.make_jaxpr(lambda x, weight: layers.product("bti,ih->bth", x, weight))(x, rounded)
    scaled = [equation.outvars[0].aval.shape for equation in program.jaxpr.eqns if equation.primitive.name == "mul"]
    assert scaled == [(1, 10, 48)]


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_no_weight_is_off_by_more_than_half_a_step(seed, inputs):
    random = np.random.default_rng(seed)
    weight = random.normal(size=(5, 4, 3, 6)) * random.lognormal(sigma=3, size=(1, 1, 1, 6))
    rounded = quantize(jnp.asarray(weight, jnp.float32), inputs)
    assert rounded.values.dtype == jnp.int8
    assert rounded.scale.shape == weight.shape[inputs:]
    error = np.abs(np.asarray(rounded.values * rounded.scale) - weight)
    assert np.all(error <= np.asarray(rounded.scale) * 0.5001)


def test_rounds_read_integers(models):
    """No weight is widened in front of the loop of rounds, which would then read the wide one again and again."""
    names = str(models / "tiny63"), str(models / "draft2")
    generator = Generator.from_pretrained(*names, spans=(2, 2), draft_dtype="int8")
    settings = Settings(max_new_tokens=20, **TREE)
    batch = Batch(generator.models, [[0, 5]], [0], settings, 512)
    batch.start()
    arguments = (batch.params, batch.plan, batch.state, batch.eos_ids, np.int32(5), batch.ended)
    text = decode.jit_decode.lower(*arguments).compile().as_text()
    loops = [part.splitlines()[0] for part in re.split(r"\n(?=%|ENTRY)", text) if re.match(r"%\S*region", part)]
    carried = max((re.findall(r"s8\[[\d,]+\]", loop.split(") -> ")[0]) for loop in loops), key=len)
    assert len(carried) == 10  # fc, four matrices of each of two specialists, and the head


def test_all_matrices_of_a_drafter_are_rounded_and_nothing_else(golden):
    generator = golden("poss2")
    rounded = quantize_draft(generator.draft.params, generator.target.params)
    names = {"kernel", "query_key_value", "attention_output", "gate_up", "down", "head"}
    for path, leaf in jax.tree_util.tree_flatten_with_path(rounded, is_leaf=is_int8)[0]:
        assert is_int8(leaf) == (path[-1].key in names), path
    assert rounded["vocab"]["head"].values.shape == generator.target.params["head"].shape
    assert "ids" not in rounded["vocab"]


@pytest.mark.parametrize("mesh", [None, pytest.param("tensor=2", marks=pytest.mark.devices(2))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["eagle", "poss2"])
def test_the_text_stays_and_acceptance_nearly(golden, draft, temperature, mesh):
    prompts = list(golden_data.prompts().values())
    options = {"max_new_tokens": 32, "temperature": temperature, "seed": 3, "batch_size": len(prompts), **TREE}
    whole, rounded = golden(draft), golden_data.generator(draft, draft_dtype="int8", mesh=mesh)
    ours, theirs = (generator.generate(prompts, **options) for generator in (rounded, whole))
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
    rounds = [sum(len(answer.accept_lengths) for answer in answers) for answers in (ours, theirs)]
    assert abs(rounds[0] / rounds[1] - 1) < 0.1


def test_a_trimmed_vocabulary_may_be_rounded_too(models, tiny, tmp_path):
    write_draft_vocab(tmp_path / "vocab.json", np.arange(0, 64, 3), 64, {})
    names = str(models / "tiny63"), str(models / "draft2")
    options = {"spans": (2, 2), "draft_vocab": tmp_path / "vocab.json", "draft_dtype": "int8"}
    rounded = Generator.from_pretrained(*names, **options)
    assert rounded.draft.params["vocab"]["head"].values.shape == (32, 22)
    (answer,), (plain,) = (
        generator.generate([[0, 5, 9]], max_new_tokens=20, plain=generator is tiny, **TREE)
        for generator in (rounded, tiny)
    )
    assert answer.token_ids == plain.token_ids


def test_what_cannot_be_rounded_is_refused(models, capsys):
    with pytest.raises(InputError, match="draft dtype int8: there is no drafter to round"):
        Generator.from_pretrained(str(models / "tiny63"), draft_dtype="int8")
    with pytest.raises(InputError, match="draft dtype 'int4' is not supported; supported: int8"):
        Generator.from_pretrained(str(models / "tiny63"), str(models / "draft1"), draft_dtype="int4")
    assert generate.main(["--target", str(models / "tiny63"), "--draft-dtype", "int8", "--prompt-ids", "0"]) == 2
    assert "--draft-dtype needs --draft" in capsys.readouterr().err
