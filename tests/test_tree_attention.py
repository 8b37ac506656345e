"""The attention kernel of rounds against the plain version. On a Hopper GPU it runs; elsewhere it is interpreted, where
JAX can do that (0.11 on), and lowered, which settles layouts and shared memory.

The interpreter does not know products that start from registers: they are replaced by the same sum in plain jnp.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer import Generator, generate
from infer.loading import HOPPER, choose_kernel
from poss_jax import tree, tree_attention, tree_attention_kernel
from poss_jax.attention import Filled, KeyValues, Part, StackedLayer, as_rows, attention, self_attention
from poss_jax.errors import InputError
from poss_jax.tree_attention import Tuning, default_splits, prefix_of, tree_bias
from tests import golden_data


def has_cpu() -> bool:
    """JAX_PLATFORMS may leave CPUs out."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)
needs_interpreter = pytest.mark.skipif(INTERPRETER is None, reason="this JAX has no interpreter of Mosaic GPU kernels")
needs_cpu = pytest.mark.skipif(
    not has_cpu(), reason="the interpreter calls back to a CPU device; JAX_PLATFORMS has none"
)
on_hopper = pytest.mark.skipif(
    getattr(jax.devices()[0], "compute_capability", None) != HOPPER, reason="needs a Hopper GPU"
)


def random_case(batch, count, heads, group, size, slots, lengths, drafted=None, dtype=jnp.bfloat16, seed=0):
    """Query, parts and mask; slots beyond the filled ones hold numbers a thousand times larger."""
    drafted = count if drafted is None else drafted
    normal = np.random.default_rng(seed).normal
    beyond = (np.arange(slots) >= np.array(lengths)[:, None])[:, None, :, None]
    prefix = [normal(size=(batch, heads, slots, size)) * np.where(beyond, 1000, 1) for _ in range(2)]
    rows = [normal(size=(batch, heads, drafted, size)) for _ in range(2)]
    mask = normal(size=(batch, count, drafted)) > 0.5
    mask |= np.eye(count, drafted, drafted - count, dtype=bool)
    query = jnp.asarray(normal(size=(batch, count, heads, group, size)), dtype)
    prefix, rows = (KeyValues(*(jnp.asarray(side, dtype) for side in pair)) for pair in (prefix, rows))
    return query, Part(prefix, Filled(jnp.array(lengths, jnp.int32))), Part(rows, jnp.asarray(mask))


def random_rows(batch, count, heads, group, size, slots, lengths, dtype=jnp.bfloat16):
    """What `self_attention` takes: query, key, value and mask of rows, and a prefix that is one of three layers."""
    query, prefix, rows = random_case(batch, count, heads, group, size, slots, lengths, None, dtype)
    key, value = (jnp.swapaxes(side, 1, 2) for side in rows.rows)
    layers = (jnp.stack([2 * side, side, 3 * side], axis=1) for side in prefix.rows)
    return query, key, value, rows.mask, Part(StackedLayer(*layers, 1), prefix.mask)


def assert_rows_attend_as_plain(attended, kept, query, key, value, mask, prefix):
    for side, given in zip(kept, (key, value), strict=True):
        np.testing.assert_array_equal(np.asarray(side, np.float32), np.asarray(jnp.swapaxes(given, 1, 2), np.float32))
    alone = Part(KeyValues(prefix.rows.keys[:, 1], prefix.rows.values[:, 1]), prefix.mask)
    assert_close(attended, query, alone, Part(as_rows(key, value), mask))


def expected(query, *parts):
    """The plain version in float32 on the same rounded inputs."""
    wide = [Part(KeyValues(*(side.astype(jnp.float32) for side in part.rows)), part.mask) for part in parts]
    return np.asarray(attention(query.astype(jnp.float32), wide))


def assert_close(attended, query, *parts):
    assert attended.shape == query.shape
    assert attended.dtype == query.dtype
    np.testing.assert_allclose(np.asarray(attended, np.float32), expected(query, *parts), atol=2e-2, rtol=1e-2)


# ---------------------------------------------------------------------------------------- on the GPU

GPU_SHAPES = [  # batch, count, heads, group, size, slots, drafted
    *[(batch, count, 8, 4, 128, 1024, None) for batch in (1, 3) for count in (1, 7, 60, 64)],
    *[(batch, count, 3, 3, 64, 1024, None) for batch in (1, 3) for count in (1, 7, 60, 64)],
    *[(2, 10, heads, 4, size, 512, drafted) for drafted in (10, 50, 80) for heads, size in ((8, 128), (3, 64))],
    (8, 60, 8, 4, 128, 1024, None),
    (2, 100, 2, 2, 64, 1024, None),
    (1, 24, 8, 4, 128, 1000, None),
    *[(batch, count, 2, 7, 128, 1024, None) for batch in (1, 3) for count in (1, 9)],  # 9 heads to a KV head
    (2, 1, 2, 4, 64, 1024, 5),  # draft trees of one node a level
    (1, 1, 3, 7, 128, 1024, 70),
]


@on_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_on_the_gpu_as_plain(shape, dtype):
    batch, count, heads, group, size, slots, drafted = shape
    attend = jax.jit(lambda query, *parts: attention(query, parts, "mosaic"))
    for first in (0, 1, 63, 64, 65, slots):
        lengths = [(first + 100 * row) % (slots + 1) for row in range(batch)]
        case = random_case(batch, count, heads, group, size, slots, lengths, drafted, dtype)
        assert_close(attend(*case), *case)


@on_hopper
@pytest.mark.parametrize("shape", [shape[:6] for shape in GPU_SHAPES if shape[6] is None], ids=str)
def test_on_the_gpu_rows_attend_to_themselves_as_plain(shape):
    batch, slots = shape[0], shape[5]
    lengths = [(700 + 100 * row) % (slots + 1) for row in range(batch)]
    rows = random_rows(*shape, lengths)
    assert_rows_attend_as_plain(*jax.jit(lambda *rows: self_attention(*rows, "mosaic"))(*rows), *rows)


@on_hopper
def test_on_the_gpu_without_rows():
    query, prefix, _ = random_case(2, 1, 8, 4, 128, 512, [300, 1])
    assert_close(jax.jit(lambda query, prefix: attention(query, [prefix], "mosaic"))(query, prefix), query, prefix)


@on_hopper
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("block", [64, 128])
def test_on_the_gpu_tuning_changes_nothing(splits, block):
    tuning = Tuning(splits=splits, block=block, stages=2)
    query, prefix, rows = case = random_case(1, 60, 8, 4, 128, 1024, [700])
    bias = tree_bias(rows.mask, 4, block)
    attended = tree_attention.tree_attention(query, prefix_of(prefix), rows.rows, bias, tuning)
    assert_close(attended, *case)


@on_hopper
@pytest.mark.parametrize(("count", "drafted"), [(8, 40), (2, 3), (1, 1), (10, 50)])
def test_on_the_gpu_rows_cut_out_of_others(count, drafted):
    """Where a span begins, levels lie behind 7 rows of the prefix: at no multiple of 256 bytes for 3 heads of 64."""
    query, prefix, (rows, mask) = random_case(1, 7 + count, 3, 3, 64, 1024, [700], 7 + drafted)

    @jax.jit
    def attend(query, rows):
        query, rows = (jax.tree.map(lambda side: 2 * side, each) for each in (query, rows))
        rows = KeyValues(*(jnp.swapaxes(jnp.swapaxes(side, 1, 2)[:, 7:], 1, 2) for side in rows))
        return attention(query[:, 7:], [prefix, Part(rows, mask[:, 7:, 7:])], "mosaic")

    last = KeyValues(*(2 * side[:, :, 7:] for side in rows))
    assert_close(attend(query, rows), 2 * query[:, 7:], prefix, Part(last, mask[:, 7:, 7:]))


# ---------------------------------------------------------------------------------------- interpreted


def accumulate_plainly(attended, weights, values):
    product = jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # a plain read has to be fenced from the copy that overwrites the values, a wgmma has not
    return attended + product


@needs_interpreter
@needs_cpu
@pytest.mark.parametrize(
    ("batch", "count", "heads", "group", "size", "slots", "lengths", "drafted", "splits", "block", "dtype"),
    [
        (1, 60, 1, 2, 64, 256, [100], None, 2, 64, jnp.bfloat16),
        (1, 60, 1, 1, 64, 256, [256], None, 1, 64, jnp.float16),  # the ring of buffers is reused
        (2, 1, 1, 4, 64, 128, [0, 65], None, 2, 64, jnp.bfloat16),
        (1, 7, 2, 2, 128, 200, [200], None, 3, 64, jnp.bfloat16),  # the cache ends within a block
        (1, 5, 1, 1, 64, 128, [0], None, 4, 64, jnp.bfloat16),  # shares without keys
        (1, 10, 1, 2, 64, 128, [70], 50, 2, 64, jnp.bfloat16),  # levels of a draft
        (1, 24, 1, 1, 64, 384, [300], None, 2, 128, jnp.bfloat16),
        (2, 1, 2, 4, 64, 128, [70, 5], 5, 2, 64, jnp.bfloat16),  # draft trees of one node a level
        (1, 1, 2, 7, 64, 64, [20], 70, 3, 64, jnp.float16),
    ],
)
def test_interpreted_as_plain(
    monkeypatch, batch, count, heads, group, size, slots, lengths, drafted, splits, block, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    monkeypatch.setattr(tree_attention_kernel, "_accumulate", accumulate_plainly)
    query, prefix, rows = case = random_case(batch, count, heads, group, size, slots, lengths, drafted, dtype)
    tuning = Tuning(splits=splits, block=block, stages=2)
    bias = tree_bias(rows.mask, group, block)
    interpreter = INTERPRETER(detect_races=True)
    run = tree_attention.tree_attention
    assert_close(run(query, prefix_of(prefix), rows.rows, bias, tuning, interpreter), *case)
    assert not interpret_pallas_call.get_races().races_found


@needs_interpreter
@needs_cpu
@pytest.mark.parametrize(
    ("batch", "count", "heads", "group", "size", "slots", "lengths", "splits"),
    [
        (1, 24, 2, 2, 64, 128, [70], 2),
        (2, 8, 2, 3, 64, 64, [0, 64], 1),
        (2, 1, 2, 4, 64, 128, [65, 1], 3),
        (1, 1, 2, 7, 64, 64, [30], 2),  # more than a tile of heads
        (1, 9, 1, 7, 64, 64, [30], 1),
        (1, 70, 1, 2, 64, 64, [30], 2),  # two tiles of rows
    ],
)
def test_interpreted_rows_attend_to_themselves_as_plain(
    monkeypatch, batch, count, heads, group, size, slots, lengths, splits
):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    monkeypatch.setattr(tree_attention_kernel, "_accumulate", accumulate_plainly)
    rows = random_rows(batch, count, heads, group, size, slots, lengths)
    run, options = tree_attention.fused_tree_attention, (Tuning(splits, stages=2), INTERPRETER(detect_races=True))
    monkeypatch.setattr(tree_attention, "fused_tree_attention", lambda *inputs: run(*inputs, *options))
    assert_rows_attend_as_plain(*self_attention(*rows, "mosaic"), *rows)
    assert not interpret_pallas_call.get_races().races_found


# ---------------------------------------------------------------------------------------- lowered


def lower(run, *arguments) -> str:
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(),
        Tuning(splits=1),
        Tuning(splits=3),
        Tuning(splits=8, block=128, stages=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 60, 8, 4, 128, 2048), (1, 1, 8, 4, 128, 2048), (3, 7, 3, 3, 64, 1000)], ids=str)
def test_lowers_for_cuda(tuning, shape):
    *sizes, slots = shape
    query, prefix, rows = random_case(*sizes, slots, [5] * sizes[0])

    def run(query, prefix, rows):
        bias = tree_bias(rows.mask, query.shape[3], tuning.block)
        return tree_attention.tree_attention(query, prefix_of(prefix), rows.rows, bias, tuning)

    assert "mosaic_gpu" in lower(run, query, prefix, rows)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("count", "drafted"), [(1, None), (1, 0), (10, 50), (60, None)])
def test_what_rounds_ask_for_lowers_through_attention(batch, count, drafted):
    query, *parts = random_case(batch, count, 2, 2, 64, 128, [5] * batch, drafted or None)
    parts = parts[:1] if drafted == 0 else parts
    assert "mosaic_gpu" in lower(lambda query, parts: attention(query, parts, "mosaic"), query, parts)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_rows_that_attend_to_themselves_lower(count):
    rows = random_rows(2, count, 2, 4, 128, 128, [5, 6])
    assert "mosaic_gpu" in lower(lambda *rows: self_attention(*rows, "mosaic"), *rows)


@pytest.mark.parametrize("count", [1, 8, 10])
def test_the_kernel_is_given_no_part_of_another_array(count):
    """It wants multiples of 256 bytes, and XLA passed on the address of row 7 of 47: PosS-1 stopped with an error."""
    query, *parts = random_case(1, count, 3, 3, 64, 1024, [700], 40)
    together = lower(lambda query, parts: attention(query, parts, "mosaic"), query, parts)
    alone = lower(lambda *rows: self_attention(*rows, "mosaic"), *random_rows(1, count, 3, 3, 64, 1024, [700]))
    for program in (together, alone):
        (function,) = (part for part in program.split("func.func") if "@mosaic_gpu_v2(" in part)
        own = set(re.findall(r"(%\d+) = stablehlo.optimization_barrier", function))
        (operands,) = re.findall(r"@mosaic_gpu_v2\(([^)]*)\)", function)
        query, _, _, _, _, keys, values, _ = operands.split(", ")
        assert {query, keys, values} <= own


# ---------------------------------------------------------------------------------------- what goes in


def test_a_layer_among_others_is_attended_to_as_alone():
    rows = random_rows(2, 7, 2, 4, 64, 64, [5, 6], jnp.float32)
    assert_rows_attend_as_plain(*self_attention(*rows, "plain"), *rows)


def test_shares_are_merged_as_one_softmax():
    """Far apart, close together and without keys, against float64."""
    random = np.random.default_rng(0)
    scores = random.normal(size=(4, 1, 2, 6, 10)) * 3  # of four shares: b, heads, t, keys
    scores[1] += np.array([0, 50, 200, 5000, -5000, 0])[:, None]
    scores[2, ..., 5, :] = -np.inf  # a row that sees nothing there
    values = random.normal(size=(4, 1, 2, 10, 8))
    highest = np.where(np.isinf(scores.max(-1)), -1e30, np.round(scores.max(-1)))
    weights = np.exp2(scores - highest[..., None])
    total = weights.sum(-1)
    attended = np.einsum("sbhtk,sbhkd->sbhtd", weights, values) / np.maximum(total, 1e-30)[..., None]
    merged = tree_attention._merge(*(list(jnp.asarray(part, jnp.float32)) for part in (attended, highest, total)))
    of_all = np.exp2(scores - scores.max(axis=(0, -1), keepdims=True))
    whole = np.einsum("sbhtk,sbhkd->bhtd", of_all, values) / of_all.sum(axis=(0, -1))[..., None]
    np.testing.assert_allclose(merged, whole, atol=1e-6)


def test_bias_by_hand():
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    bias = tree_bias(mask, 4)
    assert bias.shape == (1, 8, 64)
    np.testing.assert_array_equal(bias[0, :3, :3] == 0, mask[0])
    assert (bias[..., 3:] == -jnp.inf).all()
    assert (tree_bias(mask[:, :1, :1], 4)[0, :4, 0] == 0).all()  # one row a query head
    assert tree_bias(jnp.ones((2, 10, 80), bool), 4).shape == (2, 16, 128)


def test_shares_fill_the_device_once():
    assert default_splits(32, 2048, 64) == 4
    assert default_splits(8, 2048, 64) == 16
    assert default_splits(8, 128, 64) == 2
    assert default_splits(256, 2048, 64) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 96}, r"head size 96 is not one of \(64, 128\)"),
        ({"dtype": jnp.float32}, "must all be bfloat16 or all float16"),
        ({"slots": 60}, "60 cache slots are not a multiple of 8"),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(change, message):
    sizes = {"batch": 1, "count": 4, "heads": 1, "group": 1, "size": 64, "slots": 64, "lengths": [5], **change}
    with pytest.raises(ValueError, match=message):
        lower(lambda query, *parts: attention(query, parts, "mosaic"), *random_case(**sizes))


def test_no_shares_are_refused():
    query, prefix, rows = random_case(1, 4, 1, 1, 64, 64, [5])
    with pytest.raises(ValueError, match="unsupported tuning"):
        tree_attention.tree_attention(query, prefix_of(prefix), rows.rows, tree_bias(rows.mask, 1), Tuning(splits=0))


class Device(NamedTuple):
    platform: str
    compute_capability: str | None = None


HOPPER_GPU, OLDER_GPU = Device("gpu", HOPPER), Device("gpu", "8.0")


@pytest.mark.parametrize(
    ("device", "asked", "chosen"),
    [
        (HOPPER_GPU, ("auto", "bfloat16", 1, 128), "mosaic"),
        (HOPPER_GPU, ("mosaic", "bfloat16", 1, 64), "mosaic"),
        (HOPPER_GPU, ("plain", "bfloat16", 1, 64), "plain"),
        (HOPPER_GPU, ("auto", "float32", 1, 64), "plain"),
        (HOPPER_GPU, ("auto", "bfloat16", 2, 64), "plain"),
        (HOPPER_GPU, ("auto", "bfloat16", 1, 96), "plain"),
        (OLDER_GPU, ("auto", "bfloat16", 1, 64), "plain"),
        (Device("cpu"), ("auto", "bfloat16", 1, 64), "plain"),
        (Device("tpu"), ("auto", "bfloat16", 1, 64), "plain"),
    ],
    ids=str,
)
def test_the_kernel_is_chosen_where_it_can_run(monkeypatch, device, asked, chosen):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert choose_kernel(*asked) == chosen


@pytest.mark.parametrize(
    ("device", "asked", "message"),
    [
        (OLDER_GPU, ("mosaic", "bfloat16", 1, 64), "--attention mosaic needs a Hopper GPU"),
        (HOPPER_GPU, ("mosaic", "float32", 1, 64), "--attention mosaic needs bfloat16"),
        (HOPPER_GPU, ("mosaic", "bfloat16", 2, 64), "--attention mosaic needs weights on one device"),
        (HOPPER_GPU, ("mosaic", "bfloat16", 1, 80), "--attention mosaic needs heads of 64 or 128"),
        (HOPPER_GPU, ("flash", "bfloat16", 1, 64), "attention 'flash' is not known; known: auto, plain, mosaic"),
    ],
    ids=str,
)
def test_a_kernel_that_cannot_run_is_refused(monkeypatch, device, asked, message):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(InputError, match=message):
        choose_kernel(*asked)


def test_the_command_refuses_it_before_weights_are_read(models, monkeypatch, capsys):
    monkeypatch.setattr(jax, "local_devices", lambda: [OLDER_GPU])
    assert generate.main(["--target", str(models / "tiny63"), "--attention", "mosaic", "--prompt-ids", "0"]) == 2
    assert "error: --attention mosaic needs a Hopper GPU; give plain, or leave it out" in capsys.readouterr().err


def test_nodes_that_fill_up_a_tree_are_seen_by_nobody():
    shape = tree.TreeShape(levels=2, total_nodes=5, top_k=2)
    level, beam = tree.first_level(jnp.array([[3, 4]]), jnp.array([[-0.1, -0.5]]))
    below, _ = tree.next_level(beam, jnp.array([[[5, 6], [7, 8]]]), jnp.array([[[-1.0, -2.0], [-1.0, -2.0]]]), 2)
    drafted = tree.assemble(jnp.array([2]), [level, below], shape)
    padded = tree.pad(drafted, 8)
    assert padded.tokens.shape == (1, 8)
    assert padded.mask.shape == (1, 8, 8)
    for old, new in zip(drafted, padded, strict=True):
        kept = new[:, :5, :5] if new.ndim == 3 else new[:, :5]
        np.testing.assert_array_equal(kept, old)
    assert not padded.mask[:, :5, 5:].any()
    assert tree.pad(tree.root_only(jnp.array([2])), 8).tokens.shape == (1, 1)


@pytest.mark.parametrize("plain", [False, True], ids=["drafted", "plain"])
def test_padded_trees_change_no_token(golden, monkeypatch, plain):
    """The rounds of the kernel with the plain version in its place: what they feed the target and what they keep."""
    from poss_jax import decode

    generator, prompts = golden("poss2"), list(golden_data.prompts().values())[:2]
    options = {"max_new_tokens": 24, "levels": 3, "total_nodes": 13, "draft_top_k": 4, "batch_size": 2, "plain": plain}
    whole = generator.generate(prompts, trace=not plain, **options)
    monkeypatch.setitem(decode.LAYOUTS, "plain", decode.LAYOUTS["mosaic"])
    jax.clear_caches()
    other = Generator(generator.models)
    padded = other.generate(prompts, trace=not plain, **options)
    assert [answer.token_ids for answer in padded] == [answer.token_ids for answer in whole]
    assert [answer.accept_lengths for answer in padded] == [answer.accept_lengths for answer in whole]
    jax.clear_caches()
