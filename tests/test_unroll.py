"""The training unroll and its losses: the golden `masked` values, and a plain reference for other spans."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.layout import fuse_gate_up, fuse_query_key_value, split_attention_output
from poss_jax import llama
from poss_jax.config import BlockConfig, DraftConfig, RopeConfig
from poss_jax.losses import LossWeights, loss_sums, mean
from poss_jax.specialist import draft_specs
from poss_jax.unroll import unroll
from tests import golden_data

TRAINED = ("hass", "poss2")


def training_batch(name: str) -> dict[str, np.ndarray]:
    return golden_data.tensors(f"training/{name}")


def predict(generator, batch, params, config):
    # `input_ids` are shifted: at row i stands token i + 1.
    embedded = params.get("embed", generator.target.params["embed"])[batch["input_ids"]]
    offsets = jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
    return unroll(config, params, embedded, batch["hidden_states"], offsets, batch["attention_mask"])


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
    params = generator.draft.params

    def total(trained):
        predicted = predict(generator, batch, {**params, **trained}, config)
        sums = loss_sums(
            generator.target.params, predicted, batch["target"], jnp.asarray(batch["loss_mask"]), LossWeights()
        )
        loss, losses = mean(sums, batch["loss_mask"])
        return loss, (predicted, losses)

    trained = {key: value for key, value in params.items() if key != "embed"}
    (loss, (predicted, losses)), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(trained)
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
    gradients = {"fc": {"kernel": by_name["fc.weight"].T, "bias": by_name["fc.bias"]}}
    for index in range(len(config.spans)):
        layer = {
            key.removeprefix(f"layers.{index}."): value for key, value in by_name.items() if f"layers.{index}." in key
        }
        gradients[f"specialist_{index}"] = {
            "query_key_value": fuse_query_key_value(
                config.block, *(layer[f"self_attn.{part}_proj.weight"] for part in "qkv")
            ),
            "attention_output": split_attention_output(config.block, layer["self_attn.o_proj.weight"]),
            "gate_up": fuse_gate_up(layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]),
            "down": layer["mlp.down_proj.weight"].T,
            "mlp_norm": layer["post_attention_layernorm.weight"],
        }
    return gradients


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
    offsets, segments = jnp.arange(7)[None], jnp.ones((1, 7), int)
    predicted = jax.jit(unroll, static_argnums=0)(config, params, embedded[None], features[None], offsets, segments)
    for row in range(7):
        for step, expected in enumerate(chain_reference(config, params, embedded, features, row)):
            np.testing.assert_allclose(predicted[step, 0, row], expected, atol=1e-5, err_msg=f"row {row} step {step}")


def losses_and_gradients(config, params, embedded, features, offsets, segments, target, supervised):
    head = jnp.asarray(np.random.default_rng(2).normal(size=(16, 32)), jnp.float32)

    def total(params):
        predicted = unroll(config, params, embedded, features, offsets, segments)
        supervised_rows = jnp.asarray(supervised)
        return mean(loss_sums({"head": head}, predicted, target, supervised_rows, LossWeights())[0], supervised_rows)

    return jax.jit(jax.value_and_grad(total))(params)


def test_packed_and_padded_rows_train_like_conversations_alone():
    """Two conversations in one row, with padding behind them, against the mean over each alone."""
    config, params = random_drafter((2, 1))
    random = np.random.default_rng(3)
    lengths = (6, 9)
    embedded, features, target = random.normal(size=(3, 1, 20, 16)).astype(np.float32)
    offsets = np.concatenate([np.arange(6), np.arange(9), np.arange(5)])[None]
    segments = np.repeat([1, 2, 0], [6, 9, 5])[None]
    supervised = ((offsets >= 3) & (segments > 0)).astype(np.float32)
    packed = losses_and_gradients(config, params, embedded, features, offsets, segments, target, supervised)
    alone = []
    for start, length in zip((0, 6), lengths, strict=True):
        part = np.s_[:, start : start + length]
        arrays = (embedded[part], features[part], offsets[part], segments[part], target[part], supervised[part])
        count = supervised[part].sum()
        alone.append(
            jax.tree.map(lambda value, count=count: value * count, losses_and_gradients(config, params, *arrays))
        )
    mean = jax.tree.map(lambda first, second: (first + second) / supervised.sum(), *alone)
    for ours, theirs in zip(jax.tree.leaves(packed), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_batches_without_supervision_and_very_short_ones_are_finite(rows):
    config, params = random_drafter((2, 1))
    embedded, features, target = np.random.default_rng(4).normal(size=(3, 2, rows, 16)).astype(np.float32)
    offsets = np.broadcast_to(np.arange(rows), (2, rows))
    segments = np.stack([np.ones(rows, int), np.zeros(rows, int)])  # the second row is all padding
    loss, gradients = losses_and_gradients(
        config, params, embedded, features, offsets, segments, target, np.zeros((2, rows), np.float32)
    )
    assert float(loss) == 0.0
    assert all(not np.any(gradient) for gradient in jax.tree.leaves(gradients))
