"""The training unroll: the golden `masked` values, the golden chains, what generation drafts, and plain references."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from convert.names import draft_entries, tree_of
from convert.stored import Tensors
from poss_jax import cache, chain_attention, llama
from poss_jax.attention import KeyValues, Part, attention
from poss_jax.config import BlockConfig, DraftConfig, RopeConfig
from poss_jax.draft import Fresh, Functions, draft_tree, fill_prefix
from poss_jax.losses import LossWeights, loss_sums, mean
from poss_jax.specialist import BoundDrafter, draft_specs
from poss_jax.tree import TreeShape
from poss_jax.unroll import unroll
from tests import golden_data, quick_compilation

TRAINED = ("hass", "poss2")
# These programs run once or twice, so compiling them is what takes the time.
quick_jit = functools.partial(jax.jit, compiler_options=quick_compilation.OPTIONS)


def training_batch(name: str) -> dict[str, np.ndarray]:
    return golden_data.tensors(f"training/{name}")


def training_config(name: str) -> DraftConfig:
    """The golden drafter with all of its trained positions as spans (HASS: one specialist, three steps)."""
    recorded = golden_data.trace(name)
    config = golden_data.generator(name).draft.config
    spans = (recorded["forward_num_total"] // recorded["specialists"],) * recorded["specialists"]
    return DraftConfig(config.block, config.vocab_size, spans, config.fc_bias)


@pytest.mark.parametrize("name", TRAINED)
def test_golden_predictions_losses_and_gradients(golden, name):
    generator, batch, config = golden(name), training_batch(name), training_config(name)
    recorded = json.loads((golden_data.ROOT / "training" / f"{name}.json").read_text())["masked"]

    def total(trained, embed, head, batch):
        # `input_ids` are shifted: at row i stands token i + 1.
        embedded = embed[batch["input_ids"]]
        offsets = jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
        predicted = unroll(config, trained, embedded, batch["hidden_states"], offsets, batch["attention_mask"])
        sums = loss_sums({"head": head}, predicted, batch["target"], batch["loss_mask"], LossWeights())
        loss, losses = mean(sums, batch["loss_mask"])
        return loss, (predicted, losses)

    params, target = generator.draft.params, generator.target.params
    embed = params.get("embed", target["embed"])
    trained = {key: value for key, value in params.items() if key != "embed"}
    given = {key: value for key, value in batch.items() if not key.startswith("masked")}
    gradient = quick_jit(jax.value_and_grad(total, has_aux=True))
    (loss, (predicted, losses)), gradients = gradient(trained, embed, target["head"], given)
    meaningful = batch["meaningful_rows"].astype(bool)
    np.testing.assert_allclose(predicted[meaningful], batch["masked.pred"][meaningful], atol=1e-4)
    for step, terms in enumerate(recorded["steps"]):
        np.testing.assert_allclose(losses.smooth_l1[step], terms["smoothl1"], rtol=1e-4)
        np.testing.assert_allclose(losses.soft_cross_entropy[step], terms["soft_ce"], rtol=1e-4)
        np.testing.assert_allclose(losses.top_k_cross_entropy[step], terms["topk_ce"], rtol=1e-4)
        np.testing.assert_allclose(losses.agreement[step], terms["top1_agreement"], atol=1e-5)
    np.testing.assert_allclose(loss, recorded["sum_of_totals"], rtol=1e-5)
    expected = recorded_gradients(batch, config)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def recorded_gradients(batch: dict, config: DraftConfig) -> dict:
    """Gradients by published key names, in our layout."""
    prefix = "masked.grad."
    by_name = {key.removeprefix(prefix): value for key, value in batch.items() if key.startswith(prefix)}
    tensors, entries = Tensors(by_name, golden_data.ROOT), draft_entries(config, embed=False)
    return tree_of({entry.path: np.asarray(tensors.parameter(entry)) for entry in entries})


BLOCK = BlockConfig(
    hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, norm_eps=1e-5, rope=RopeConfig()
)


def random_drafter(spans: tuple[int, ...]) -> tuple[DraftConfig, dict]:
    config = DraftConfig(BLOCK, vocab_size=32, spans=spans)
    random = np.random.default_rng(0)
    return config, jax.tree.map(
        lambda spec: jnp.asarray(random.normal(0, 0.15, spec.shape), jnp.float32),
        draft_specs(config),
        is_leaf=lambda leaf: isinstance(leaf, llama.ParameterSpec),
    )


def specialist_reference(config: DraftConfig, weights: dict, x: np.ndarray) -> np.ndarray:
    """One specialist on rows x [t, h], causally, in float64 numpy: [t, h]."""
    block = config.block
    fused = np.einsum("th,hkgd->tkgd", x, weights["query_key_value"])
    angles = np.arange(len(x))[:, None] / block.rope.theta ** (np.arange(0, block.head_dim, 2) / block.head_dim)

    def rotate(heads: np.ndarray) -> np.ndarray:
        first, second = np.split(heads, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    query, key, value = rotate(fused[:, :, :-2]), rotate(fused[:, :, -2:-1])[:, :, 0], fused[:, :, -1]
    scores = np.einsum("tkgd,skd->kgts", query, key) / np.sqrt(block.head_dim)
    scores[..., np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
    law = np.exp(scores - scores.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    attended = np.einsum("kgts,skd->tkgd", law, value)
    hidden = x + np.einsum("tkgd,kgdh->th", attended, weights["attention_output"])
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + block.norm_eps) * weights["mlp_norm"]
    gate, up = np.einsum("th,hzi->zti", normed, weights["gate_up"])
    return hidden + (gate / (1 + np.exp(-gate)) * up) @ weights["down"]


def chain_reference(config, params, embedded, features, row: int) -> list[np.ndarray]:
    """What generation predicts at `row` in each step, when it drafts from `step` rows earlier and the true tokens are
    forced on it: all rows, true and drafted, go causally through the specialist that is due.
    """
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def inputs(first: int, rows: np.ndarray) -> np.ndarray:
        joined = np.concatenate([embedded[first : first + len(rows)], rows], axis=-1)
        return joined @ weights["fc"]["kernel"] + weights["fc"]["bias"]

    predictions = []
    for last_step in range(min(sum(config.spans), row + 1)):
        x = inputs(0, features[: row - last_step + 1])
        for step in range(last_step + 1):
            predicted = specialist_reference(config, weights[f"specialist_{config.specialist_at(step)}"], x)[-1:]
            if step < last_step:
                x = np.concatenate([x, inputs(len(x), predicted)])
        predictions.append(predicted[0])
    return predictions


@pytest.mark.parametrize("spans", [(1,), (4,), (1, 1, 1), (2, 1), (1, 3)])
def test_every_meaningful_row_and_step_is_what_generation_drafts(spans):
    config, params = random_drafter(spans)
    random = np.random.default_rng(1)
    embedded, features = random.normal(size=(2, 7, 16)).astype(np.float32)
    offsets, segments = np.arange(7)[None], np.ones((1, 7), int)
    compiled = quick_jit(unroll, static_argnums=0)
    predicted = compiled(config, params, embedded[None], features[None], offsets, segments)
    for row in range(7):
        for step, expected in enumerate(chain_reference(config, params, embedded, features, row)):
            np.testing.assert_allclose(predicted[step, 0, row], expected, atol=1e-5, err_msg=f"row {row} step {step}")


def test_the_first_step_is_the_forward_pass_of_generation():
    """G10: forbidden scores are minus infinity, as in generation. With zeros the difference was 0.73."""
    config, params = random_drafter((2, 1))
    embedded, features = np.random.default_rng(1).normal(size=(2, 1, 10, 16)).astype(np.float32)
    positions = np.arange(10)[None]

    @quick_jit
    def both(params, embedded, features, positions):
        drafter = BoundDrafter(config, params)
        x = drafter.inputs(embedded, features)
        query, rows = drafter.project(0, x, positions)
        inferred = drafter.finish(0, x, attention(query, [Part(rows, None)]))
        return unroll(config, params, embedded, features, positions, jnp.ones_like(positions))[0], inferred

    trained, inferred = both(params, embedded, features, positions)
    np.testing.assert_allclose(trained, inferred, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", golden_data.DRAFTS)
def test_golden_chains_and_drafted_ones(golden, name):
    """The recorded passes of the golden drafter, and chains that `draft_tree` drafts from many places of the recorded
    text: each is what the unroll says once it is given the drafted tokens.

    One position more than was trained, which the last specialist serves.
    """
    generator, recorded = golden(name), golden_data.tensors(f"forward/draft_{name}")
    config = generator.draft.config
    config = DraftConfig(config.block, config.vocab_size, (*config.spans[:-1], config.spans[-1] + 1), config.fc_bias)
    steps, length = sum(config.spans), len(recorded["tokens"])
    committed = np.array([1, 2, 3, 6, 17, 18, 40, 71])
    drafted, log_probs = drafted_chains(generator, recorded, committed, config)

    # A row for each drafted chain: the text before it, its root, its tokens; features that it must not see are 1000.
    # The last row is the recorded text.
    tokens = np.zeros((len(committed) + 1, length + steps), int)
    features = np.full((*tokens.shape, config.block.hidden_size), 1000, np.float32)
    for row, count in enumerate(committed):
        tokens[row, : count + 1], features[row, :count] = recorded["tokens"][: count + 1], recorded["features"][:count]
        tokens[row, count + 1 : count + steps] = drafted[row, :-1]
    tokens[-1, :length], features[-1, :length] = recorded["tokens"], recorded["features"]

    @quick_jit
    def predict(params, target, tokens, features):
        embedded = params.get("embed", target["embed"])[jnp.roll(tokens, -1, axis=1)]
        offsets = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        predicted = unroll(config, params, embedded, features, offsets, jnp.ones_like(tokens))
        return predicted, jax.nn.log_softmax(llama.head(target, predicted))

    predicted, laws = map(np.asarray, predict(generator.draft.params, generator.target.params, tokens, features))
    np.testing.assert_allclose(predicted[0, -1, : length - 1], recorded["specialist_0.pred"], atol=1e-4)
    start = recorded["chain.prefix_rows"].item() - 1
    for step in range(steps):
        np.testing.assert_allclose(predicted[step, -1, start + step], recorded["chain.pred"][step], atol=1e-4)
        law = laws[step, np.arange(len(committed)), committed - 1 + step]
        np.testing.assert_array_equal(law.argmax(axis=-1), drafted[:, step], err_msg=f"step {step}")
        np.testing.assert_allclose(law.max(axis=-1), log_probs[:, step], atol=2e-5, err_msg=f"step {step}")


def drafted_chains(generator, recorded, committed, config) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities [chains, steps] that generation drafts, one likeliest token after the other, after
    `committed` tokens and the root of the recorded text.
    """
    steps, rows = sum(config.spans), len(recorded["tokens"]) - 1

    @quick_jit
    def draft(params, target, tokens, features, committed):
        functions, batch = Functions(config, params, target), len(committed)
        caches = (cache.empty(config.block, batch, rows, jnp.float32),) * len(config.spans)
        following = jnp.broadcast_to(tokens[1:], (batch, rows))
        features = jnp.broadcast_to(features[:-1], (batch, *features[:-1].shape))
        caches = fill_prefix(functions, following, features, caches)
        last = jnp.arange(batch), committed - 1
        fresh = Fresh(
            functions.inputs(following[last][:, None], features[last][:, None]), committed - 1, jnp.ones(batch, int)
        )
        shape = TreeShape(levels=steps, total_nodes=steps + 1, top_k=1)
        tree, _ = draft_tree(functions, shape, following[last], fresh, caches)
        return tree.tokens[:, 1:], jnp.diff(tree.scores, axis=1)

    params, target = generator.draft.params, generator.target.params
    return tuple(map(np.asarray, draft(params, target, recorded["tokens"], recorded["features"], committed)))


def sums_and_gradients(config, params, arrays):
    """Sums over supervised rows: loss and gradients, with a head of 32 random tokens."""

    def total(params):
        dtype = arrays["features"].dtype
        head = jnp.asarray(np.random.default_rng(2).normal(size=(16, 32)), dtype)
        rows = (arrays[name] for name in ("embedded", "features", "offsets", "segments"))
        predicted = unroll(config, params, *rows)
        return loss_sums({"head": head}, predicted, arrays["target"], arrays["supervised"], LossWeights())[0]

    return jax.value_and_grad(total)(params)


losses_and_gradients = quick_jit(sums_and_gradients, static_argnums=0)
WIDTH = 20


def batch_of(*rows: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Two rows of `WIDTH` with conversations of these lengths; row i of a conversation holds the same numbers wherever
    it stands, padding holds others with every `seed`. Rows from 3 on are supervised, but for the last.
    """
    wide = np.random.default_rng(seed).normal(size=(3, 2, WIDTH, 16))
    batch = dict(zip(("embedded", "features", "target"), 3 * wide.astype(np.float32), strict=True))
    batch |= {name: np.zeros((2, WIDTH), np.int32) for name in ("offsets", "segments", "supervised")}
    for row, lengths in enumerate(rows):
        first = 0
        for number, length in enumerate(lengths, 1):
            place = row, slice(first, first + length)
            for name, values in zip(("embedded", "features", "target"), conversation(length), strict=True):
                batch[name][place] = values
            batch["offsets"][place], batch["segments"][place] = np.arange(length), number
            batch["supervised"][row, first + 3 : first + length - 1] = 1
            first += length
    return batch


def conversation(length: int) -> np.ndarray:
    return np.random.default_rng(length).normal(size=(3, length, 16)).astype(np.float32)


def assert_gradients_are_close(ours, theirs, tolerance):
    """Relative to the largest value of each array."""
    for (path, one), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        scale = np.abs(other).max()
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one / scale, other / scale, atol=tolerance, rtol=0, err_msg=name)


def test_packed_and_padded_rows_train_like_conversations_alone():
    """Two conversations in one row, with padding behind them, against each in a row of its own, and against the sum of
    each alone in the batch. What stands in padding does not matter.
    """
    config, params = random_drafter((2, 1))
    run = functools.partial(losses_and_gradients, config, params)
    packed = run(batch_of([6, 9], [], seed=1))
    apart = run(batch_of([9], [6], seed=2))
    first, second = run(batch_of([6], [], seed=3)), run(batch_of([], [9], seed=4))
    assert packed[0] > 100
    for other in (apart, jax.tree.map(jnp.add, first, second)):
        np.testing.assert_allclose(packed[0], other[0], rtol=2e-6)
        assert_gradients_are_close(packed[1], other[1], 2e-6)


def test_nothing_supervised_gives_no_loss_and_no_gradient():
    """Also where a row is all padding; G12."""
    config, params = random_drafter((2, 1))
    batch = batch_of([6, 9], [])
    batch["supervised"][:] = 0
    loss, gradients = losses_and_gradients(config, params, batch)
    assert float(loss) == 0.0
    assert all(not np.any(gradient) for gradient in jax.tree.leaves(gradients))


def test_a_row_may_be_shorter_than_the_unroll_is_deep():
    config, params = random_drafter((2, 1))
    batch = {name: array[:, :1] for name, array in batch_of([6, 9], []).items()}
    batch["supervised"][:] = 1
    loss, gradients = losses_and_gradients(config, params, batch)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(gradients))


# Chain attention by itself.
STEPS, ROWS = 4, 11


def attention_arrays():
    random = np.random.default_rng(5)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    query = normal(2, ROWS, 2, 3, 8)  # [b, t, k, g, d]
    target = KeyValues(normal(2, 2, ROWS, 8), normal(2, 2, ROWS, 8))
    chain = KeyValues(normal(STEPS, 2, 2, ROWS, 8), normal(STEPS, 2, 2, ROWS, 8))
    segments = jnp.asarray([[1] * 4 + [2] * 5 + [0] * 2, [1] * 11], jnp.int32)
    return query, target, chain, segments, normal(*query.shape)


def plain_chain_attention(query, target, chain, segments, step):
    """Scores of both kinds side by side, and a softmax over them."""
    rows = jnp.arange(query.shape[1])
    seen = (segments[:, :, None] == segments[:, None, :]) & (rows[:, None] >= rows)
    scores = jnp.where(seen[:, None, None], jnp.einsum("btkgd,bksd->bkgts", query, target.keys), -jnp.inf)
    steps = jnp.arange(chain.keys.shape[0])
    in_chain = (steps >= 1) & (steps <= step)
    own = jnp.where(in_chain, jnp.einsum("btkgd,mbktd->bkgtm", query, chain.keys), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1) / np.sqrt(query.shape[-1]), axis=-1)
    of_target, of_chain = jnp.split(weights, [query.shape[1]], axis=-1)
    attended = jnp.einsum("bkgts,bksd->btkgd", of_target, target.values)
    return attended + jnp.einsum("bkgtm,mbktd->btkgd", of_chain, chain.values)


def value_and_slopes(attend, query, target, chain, segments, slope, step):
    """What `attend` gives, and the gradients of query, target and chain where `slope` is that of its value."""
    value, pull = jax.vjp(lambda *arrays: attend(*arrays, segments, step), query, target, chain)
    return value, pull(slope)


@pytest.mark.parametrize(
    ("query_chunk", "most_chunks", "chunks"),
    [
        (256, 8, [(0, 11)]),
        (4, 8, [(0, 4), (4, 8), (8, 11)]),
        (3, 2, [(0, 6), (6, 11)]),
        (1, 8, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]),
        (11, 1, [(0, 11)]),
    ],
)
def test_chain_attention_is_a_softmax_over_both_kinds_of_rows(monkeypatch, query_chunk, most_chunks, chunks):
    """Value and all gradients, in packed rows with padding, however queries are cut into chunks."""
    monkeypatch.setattr(chain_attention, "QUERY_CHUNK", query_chunk)
    monkeypatch.setattr(chain_attention, "MOST_CHUNKS", most_chunks)
    assert chain_attention._chunks(ROWS) == chunks
    ours = quick_jit(functools.partial(value_and_slopes, chain_attention.chain_attention))
    arrays = attention_arrays()
    for step in range(STEPS):
        expected = plain_attention(*arrays, step)
        got = ours(*arrays, step)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-6, rtol=0), got, expected)


def test_gradients_are_finite_where_logarithms_of_large_scores_are_rounded():
    """As cuDNN's are, to bfloat16."""
    query, target, chain, segments, slope = attention_arrays()
    target = KeyValues(300.0 * target.keys, target.values)
    _, (*arrays, log_sum) = chain_attention._forward(300.0 * query, target, chain, segments, 1, "plain")
    rounded = log_sum.astype(jnp.bfloat16).astype(jnp.float32)
    assert float((log_sum - rounded).max()) > 88  # of which the exponential is infinite
    slopes = chain_attention._backward("plain", (*arrays, rounded), slope)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


plain_attention = quick_jit(functools.partial(value_and_slopes, plain_chain_attention))


def test_rows_of_later_steps_and_of_other_chains_are_not_seen():
    """Whatever stands in slots of the chain that are not due, or in rows of others, changes nothing."""
    query, target, chain, segments, slope = attention_arrays()
    ours = quick_jit(functools.partial(value_and_slopes, chain_attention.chain_attention))
    value, slopes = ours(query, target, chain, segments, slope, 1)
    changed = KeyValues(*(part.at[0].add(9).at[2:].add(9).at[1, :, :, 5:].add(9) for part in chain))
    behind = KeyValues(*(part.at[:, :, 5:].add(9) for part in target))
    np.testing.assert_array_equal(ours(query, behind, changed, segments, slope, 1)[0][:, :5], value[:, :5])
    of_chain = np.abs(np.asarray(slopes[2].values)).max(axis=(1, 2, 3, 4))
    assert of_chain[1] > 0
    np.testing.assert_array_equal(of_chain[[0, 2, 3]], 0)


# What is computed in bfloat16.


def in_bfloat16(batch: dict) -> dict:
    wide = ("embedded", "features", "target")
    return {name: jnp.asarray(array, jnp.bfloat16) if name in wide else array for name, array in batch.items()}


def test_gradients_of_bfloat16_computing_are_float32_and_near_the_float32_ones():
    """Each rounding to bfloat16 is off by up to 2 ** -9. What makes up a gradient has been rounded a dozen times on its
    way forward and back, at random, which adds up to some four of that: 0.6 to 1.4 hundredths were measured.
    """
    config, params = random_drafter((2, 1))
    batch = batch_of([6, 9], [20])
    _, wide = losses_and_gradients(config, params, batch)
    loss, gradients = losses_and_gradients(config, params, in_bfloat16(batch))
    assert loss.dtype == jnp.float32
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wide), strict=True):
        assert ours.dtype == jnp.float32
        error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
        assert 0 < error < 0.02, jax.tree_util.keystr(path)


def test_what_several_steps_add_to_a_gradient_is_added_in_float32():
    """No two arrays of a parameter's shape are added in bfloat16, wherever in the program."""
    config, params = random_drafter((2, 1))
    batch = in_bfloat16(batch_of([6, 9], []))
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    program = jax.make_jaxpr(sums_and_gradients, static_argnums=0)(config, params, batch)
    added = [
        equation.outvars[0].aval.dtype
        for equation in equations(program.jaxpr)
        if equation.primitive.name in ("add", "add_any") and equation.outvars[0].aval.shape in shapes
    ]
    assert len(added) >= len(shapes)
    assert set(added) == {jnp.dtype("float32")}


def equations(jaxpr):
    """All equations of a program, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
