"""One training update: its gradients, AdamW, noise, memory, platforms and meshes; and the benchmark of it."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export
from jax.sharding import PartitionSpec

from poss_jax import losses, objective, sharding
from poss_jax.config import DraftConfig, TargetConfig
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec, parameter_specs
from poss_jax.objective import Objective, Rows, run_unroll
from poss_jax.specialist import draft_specs
from tests import quick_compilation
from tests.test_program import compilations
from tests.test_unroll import BLOCK
from train import benchmark
from train.step import OptimizerConfig, Trainer, TrainState

WIDTH, VOCAB = 14, 32
TARGET = TargetConfig(BLOCK, VOCAB, num_layers=1, context=64)
# Moments are then just the gradients: mu = 0 * mu + 1 * gradient.
PLAIN = OptimizerConfig(beta1=0.0, weight_decay=0.1, clip="none")


def trainer_of(spans=(2, 1), noise=0.0, optimizer=PLAIN, mesh="data=1", target=TARGET) -> Trainer:
    mesh = sharding.training_mesh(mesh)
    draft = DraftConfig(BLOCK, target.vocab_size, spans)
    objective = Objective(target, draft, noise=noise, row_groups=sharding.row_groups(mesh))
    return Trainer(objective, optimizer, mesh, draft_specs(draft), seed=3)


def random_tree(specs, seed: int):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: jnp.asarray(random.normal(0, 0.3, spec.shape), jnp.float32),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ParameterSpec),
    )


def abstract(specs):
    return jax.eval_shape(lambda: random_tree(specs, 0))


@functools.cache
def frozen_params():
    return {"target": random_tree(parameter_specs(TARGET), 1)}


@functools.cache
def _start(options: tuple) -> TrainState:
    trainer = trainer_of(**dict(options))
    return trainer.start(random_tree(trainer.specs, 2))


def start(**options) -> TrainState:
    """A copy that an update may take."""
    return jax.tree.map(jnp.copy, _start(tuple(options.items())))


def abstract_rows(*shape: int) -> Rows:
    return Rows(*[jax.ShapeDtypeStruct(shape, jnp.int32)] * 4)


def lowered(trainer: Trainer, rows: Rows):
    with jax.set_mesh(trainer.mesh):
        frozen = {"target": abstract(parameter_specs(trainer.objective.target))}
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        return trainer.jit_update().lower(trainer.abstract_state(), frozen, rows, rate)


@functools.cache
def compiled_update(options: tuple, *shape: int):
    """The compiled update of a trainer of these options, for rows of this shape without stored features."""
    return lowered(trainer_of(**dict(options)), abstract_rows(*shape)).compile(
        compiler_options=quick_compilation.OPTIONS
    )


def run(rows: Rows, state: TrainState | None = None, rate: float = 0.0, **options):
    """One update, by default from fresh parameters: (state, metrics)."""
    state = start(**options) if state is None else jax.tree.map(jnp.copy, state)
    update = compiled_update(tuple(options.items()), *rows.tokens.shape)
    return update(state, frozen_params(), rows, jnp.float32(rate))


def gradients_of(state: TrainState):
    """Of the update that gave this state, with the optimizer `PLAIN`."""
    return next(part.mu for part in state.moments if hasattr(part, "mu"))


def rows_of(*rows: list[tuple[int, int, bool]], micro: int = 1, padding: int = 0) -> Rows:
    """Rows [micro, b, WIDTH] of conversations (number, length, whether its rows from 2 on are supervised). Tokens
    depend on the number and are `padding` where there is no conversation.
    """
    tokens, segments, offsets, supervised = np.zeros((4, len(rows), WIDTH), np.int32)
    tokens += padding
    for row, conversations in enumerate(rows):
        first = 0
        for segment, (number, length, counts) in enumerate(conversations, 1):
            place = row, slice(first, first + length)
            tokens[place] = np.random.default_rng(number).integers(0, VOCAB, length)
            segments[place], offsets[place] = segment, np.arange(length)
            supervised[row, first + 2 : first + length - 1] = counts
            first += length
    return Rows(*(part.reshape(micro, -1, WIDTH) for part in (tokens, segments, offsets, supervised)))


FIRST, SECOND, THIRD = (1, 9, True), (2, 5, True), (3, 12, True)
QUIET = (4, 13, False)


def assert_close(ours, theirs, tolerance=2e-6):
    """Relative to the largest value of each array."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max(), rtol=0)


def test_accumulation_is_one_large_batch():
    """Loss and gradients are means over all supervised rows, however many each micro-batch has: 6 + 2, and 9."""
    together = run(rows_of([FIRST, SECOND], [THIRD]))
    apart = run(rows_of([FIRST, SECOND], [THIRD], micro=2))
    assert_close((gradients_of(apart[0]), apart[1]), (gradients_of(together[0]), together[1]))
    norm = np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(gradients_of(together[0]))))
    np.testing.assert_allclose(together[1].gradient_norm, norm, rtol=1e-6)


def test_padding_and_companions_change_nothing():
    """With the target's features computed in the update."""
    state, metrics = run(rows_of([FIRST], []))
    alone = gradients_of(state), metrics
    for other in (
        rows_of([], [FIRST], padding=7),
        rows_of([FIRST, (5, 5, False)], [QUIET], padding=3),
        rows_of([(5, 4, False), FIRST], [(6, 3, False), (7, 3, False)]),
    ):
        state, metrics = run(other)
        assert_close((gradients_of(state), metrics), alone)


def test_conversations_add_up():
    """A batch of two has the mean of their losses and gradients, by supervised rows: 6 and 2."""
    results = []
    for rows in (rows_of([FIRST], []), rows_of([], [SECOND]), rows_of([FIRST, SECOND], [QUIET])):
        state, metrics = run(rows)
        results.append((gradients_of(state), metrics.loss, metrics.terms))
    first, second, both = results
    assert_close(both, jax.tree.map(lambda one, other: (6 * one + 2 * other) / 8, first, second))


def test_three_updates_are_those_of_torch():
    """AdamW of torch on the gradients of each update: decay, bias correction, and the rate of each."""
    state = start()
    weights = [torch.nn.Parameter(torch.tensor(np.array(leaf))) for leaf in jax.tree.leaves(state.params)]
    optimizer = torch.optim.AdamW(weights, betas=(PLAIN.beta1, PLAIN.beta2), weight_decay=PLAIN.weight_decay)
    for rate in (0.01, 0.02, 0.005):
        state, _ = run(rows_of([FIRST, SECOND], [THIRD]), state, rate)
        optimizer.param_groups[0]["lr"] = rate
        for weight, gradient in zip(weights, jax.tree.leaves(gradients_of(state)), strict=True):
            weight.grad = torch.tensor(np.array(gradient))
        optimizer.step()
        for ours, theirs in zip(jax.tree.leaves(state.params), weights, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-6, rtol=0)
    assert int(state.step) == 3


@pytest.mark.parametrize("clip", ["value", "norm", "none"])
def test_clipping_and_adam_are_those_of_torch(clip):
    """The authors' betas and decay; three updates of random gradients, of which the first is small."""
    config = OptimizerConfig(clip=clip, clip_at=0.5)
    random = np.random.default_rng(0)
    start = {"a": random.normal(size=(5, 3)).astype(np.float32), "b": random.normal(size=7).astype(np.float32)}
    weights = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    params, transformation = start, config.transformation()
    moments = transformation.init(params)
    for size in (0.01, 1.0, 3.0):
        gradients = {name: (size * random.normal(size=array.shape)).astype(np.float32) for name, array in start.items()}
        change, moments = transformation.update(gradients, moments, params)
        params = jax.tree.map(lambda old, step: old - 0.1 * step, params, change)
        for name, weight in weights.items():
            weight.grad = torch.tensor(gradients[name])
        if clip == "value":
            torch.nn.utils.clip_grad_value_(weights.values(), 0.5)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        for name, weight in weights.items():
            np.testing.assert_allclose(params[name], weight.detach().numpy(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "updates", "expected"),
    [
        ({"warmup": 0.2}, 10, [0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]),
        ({"warmup": 0.15}, 10, [0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]),  # 1.5 updates, rounded up
        ({"warmup": 0.0}, 5, [1.0, 0.75, 0.5, 0.25, 0.0]),  # the first update is always of the warm-up
        ({}, 5, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"warmup": 1.0}, 4, [0.25, 0.5, 0.75, 1.0]),
        ({}, 1, [1.0]),
    ],
)
def test_learning_rates(options, updates, expected):
    config = OptimizerConfig(learning_rate=0.5, **options)
    rates = [config.rate(update, updates) for update in range(1, updates + 1)]
    np.testing.assert_allclose(rates, np.array(expected) / 2, rtol=1e-9)


def test_learning_rates_of_long_runs_and_of_fractions():
    """1,000 updates: 10 of warm-up, then 990. After the end it stays 0."""
    config = OptimizerConfig()
    given = {update: config.rate(update, 1000) for update in (1, 5, 10, 505, 1000, 1001)}
    expected = {1: 3e-6, 5: 1.5e-5, 10: 3e-5, 505: 1.5e-5, 1000: 0.0, 1001: 0.0}
    np.testing.assert_allclose(list(given.values()), list(expected.values()), rtol=1e-9)
    np.testing.assert_allclose(config.rate(757.5, 1000.0), 3e-5 * 242.5 / 990, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": "size"}, "--clip 'size' is not supported; supported: value, norm, none"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0: must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate nan: must be above 0"),
        ({"warmup": 1.1}, "--warmup 1.1: must be a share from 0 to 1"),
        ({"clip_at": 0.0}, "--clip-at 0.0: must be above 0"),
        ({"beta2": 1.0}, "--beta1 and --beta2 must be from 0 to below 1"),
        ({"weight_decay": -0.1}, "--weight-decay at least 0"),
    ],
)
def test_optimizers_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**options)


NOISY = {"spans": (1,), "noise": 0.2}


def test_noise_is_that_of_the_update():
    """The learning rate is 0, so that two updates differ by their noise only."""
    rows = rows_of([FIRST, SECOND], [THIRD])
    state, first = run(rows, **NOISY)
    again, same = run(rows, **NOISY)
    jax.tree.map(np.testing.assert_array_equal, (state, first), (again, same))
    _, next_one = run(rows, state, **NOISY)
    assert abs(float(next_one.loss) / float(first.loss) - 1) > 1e-3


def test_noise_is_narrower_for_longer_conversations_and_not_in_what_is_compared(monkeypatch):
    """Uniform in +-0.1 * 512 / length; conversations of 100 and 400 tokens in one row."""
    monkeypatch.setattr(objective, "unroll", lambda config, params, embedded, features, *_: features[None])
    features = np.random.default_rng(0).normal(size=(1, 512, 16)).astype(np.float32)
    segments = np.repeat([1, 2, 0], [100, 400, 12])[None]
    rows = Rows(np.zeros((1, 512), int), segments, np.zeros((1, 512), int), np.ones((1, 512), int), features)
    frozen, noisy = frozen_params(), trainer_of(noise=0.2).objective
    unrolled = run_unroll(noisy, {}, frozen, rows, jax.random.key(0))
    np.testing.assert_array_equal(unrolled.target, np.roll(features, -1, axis=1))
    noise = np.asarray(unrolled.predicted[0] - features)
    for segment, width in ((1, 0.2 * 512 / 100), (2, 0.2 * 512 / 400)):
        values = noise[segments == segment] / width
        assert np.abs(values).max() <= 0.5
        assert np.abs(values).max() > 0.49
        assert abs(values.mean()) < 0.03
        assert abs(values.std() - 12**-0.5) < 0.01
    np.testing.assert_array_equal(run_unroll(noisy, {}, frozen, rows).predicted[0], features)


@pytest.fixture
def quick_programs():
    """What is compiled meanwhile is compiled with little optimisation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_programs")
def test_a_second_update_compiles_nothing():
    trainer, rows = trainer_of(spans=(1,)), rows_of([FIRST], [SECOND])
    with jax.set_mesh(trainer.mesh):
        update, state, frozen = trainer.jit_update(), start(spans=(1,)), frozen_params()
        with compilations() as first:
            state, _ = update(state, frozen, trainer.put_rows(rows), jnp.float32(0.1))
        assert first, "the counter does not see compilations"
        with compilations() as second:
            state, _ = update(state, frozen, trainer.put_rows(rows_of([THIRD], [])), jnp.float32(0.2))
    assert second == []
    assert int(state.step) == 2


# Numbers that nothing else in the program has, so that shapes tell what they are of; and an MLP as wide as it costs.
LONG, WORDS = 512, 97
WIDE = dataclasses.replace(TARGET, block=dataclasses.replace(BLOCK, intermediate_size=256), vocab_size=WORDS)


def compiled_long_update(monkeypatch, spans: tuple[int, ...]):
    """Of one row of 512 tokens, with stored features; the loss takes 16 rows at a time."""
    monkeypatch.setattr(losses, "ROW_CHUNK", 16)
    rows = abstract_rows(1, 1, LONG)._replace(features=jax.ShapeDtypeStruct((1, 1, LONG, 16), jnp.float32))
    trainer = trainer_of(spans, target=WIDE)
    return lowered(trainer, rows).compile(compiler_options=quick_compilation.OPTIONS)


def test_memory_of_more_steps_is_what_they_keep(monkeypatch):
    """Of each row a step keeps its prediction and its input (h each), query, keys and values, and what was attended
    (96 numbers here, and 4 sums); and keys and values of all steps so far, which is j times 32. Copies may come on
    top, half of it at most, but no scores [heads, rows, rows] and nothing of the MLP, which is 256 wide.
    """
    memory = {steps: compiled_long_update(monkeypatch, (steps,)).memory_analysis() for steps in (2, 6)}
    kept = {steps: LONG * 4 * steps * (16 + 16 + 96 + 4 + steps * 32) for steps in memory}
    scores_of_a_step = 4 * BLOCK.num_heads * LONG * LONG
    assert 1.5 * (kept[6] - kept[2]) < 4 * scores_of_a_step / 2
    growth = memory[6].temp_size_in_bytes - memory[2].temp_size_in_bytes
    assert growth < 1.5 * (kept[6] - kept[2])
    state = jax.tree.leaves(trainer_of((6,), target=WIDE).abstract_state())
    assert memory[6].alias_size_in_bytes == sum(4 * leaf.size for leaf in state)  # updated where it lies


def test_logits_of_all_rows_are_never_there(monkeypatch):
    """Nor those of all supervised rows: 3 steps of 16 rows at a time, of 512. On GPUs XLA makes one product of these
    and of the target's 16, as both are times the head.
    """
    rows = (3 + (jax.default_backend() == "gpu")) * 16
    text = compiled_long_update(monkeypatch, (2, 1)).as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", text)}
    assert max(int(np.prod(shape)) // WORDS for shape in shapes if WORDS in shape) == rows
    assert any(LONG in shape for shape in shapes)


@pytest.mark.parametrize("mesh", ["data=1", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.devices(8))])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_update_lowers_for_every_platform(platform, mesh):
    trainer = trainer_of(mesh=mesh, noise=0.2, optimizer=OptimizerConfig())
    place = sharding.rows_sharding(trainer.mesh, axis=1)
    rows = Rows(*[jax.ShapeDtypeStruct((2, 4, WIDTH), jnp.int32, sharding=place)] * 4)
    frozen = {
        "target": jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(
                spec.shape, jnp.bfloat16, sharding=sharding.parameter_sharding(trainer.mesh, spec)
            ),
            parameter_specs(TARGET),
            is_leaf=lambda leaf: isinstance(leaf, ParameterSpec),
        )
    }
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.set_mesh(trainer.mesh):
        exported = export.export(trainer.jit_update(), platforms=[platform])(
            trainer.abstract_state(), frozen, rows, rate
        )
    assert exported.platforms == (platform,)
    assert exported.nr_devices == trainer.mesh.size


@pytest.mark.devices(8)
def test_training_meshes():
    mesh = sharding.training_mesh("fsdp=2,data=2,tensor=2")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert sharding.row_groups(mesh) == 4
    assert sharding.rows_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))
    assert sharding.rows_sharding(mesh, axis=1).spec == PartitionSpec(None, ("data", "fsdp"))
    assert dict(sharding.training_mesh("tensor=4").shape) == {"data": 1, "fsdp": 1, "tensor": 4}
    assert sharding.row_groups(sharding.training_mesh("tensor=4")) == 1
    assert sharding.row_groups(sharding.training_mesh("fsdp=4")) == 4
    assert sharding.row_groups(sharding.training_mesh("data=8")) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh axis '' is not known here; write data=N,fsdp=N,tensor=N"),
        ("model=2", "mesh axis 'model' is not known here"),
        ("data=2,data=2", "mesh axis 'data' is given twice"),
        ("data=2,fsdp=-1", "mesh axis 'fsdp' needs a whole number of at least 1, not '-1'"),
        ("data=two", "needs a whole number of at least 1, not 'two'"),
        ("data=64,fsdp=64", f"needs 4096 devices; this machine has {jax.device_count()}"),
    ],
)
def test_training_meshes_that_make_no_sense_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        sharding.training_mesh(text)


def test_flops_of_llama_3_8b():
    """22.7 GFLOP a token for six steps with stored features, the figure of the design notes."""
    target = benchmark.SHAPES["llama3-8b"]
    draft = DraftConfig(target.block, target.vocab_size, (3, 3))
    stored, online = benchmark.flops_per_token(draft, None), benchmark.flops_per_token(draft, target)
    assert round(stored / 1e9, 1) == 22.7
    # Llama-3-8B has 6.98e9 weights in its layers, norms not counted.
    assert round((online - stored) / 2e9, 2) == 6.98


@pytest.mark.usefixtures("quick_programs")
def test_the_benchmark_prints_one_object(monkeypatch, capsys):
    monkeypatch.setitem(benchmark.SHAPES, "tiny", TARGET)
    given = "--shape tiny --spans 1 --batch-size 2 --max-length 8 --repeats 2 --warmup 1 --dtype float32"
    assert benchmark.main([*given.split(), "--features", "stored"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in ("shape", "spans", "rows", "features", "dtype", "attention", "mesh")} == {
        "shape": "tiny",
        "spans": "1",
        "rows": "2 x 8",
        "features": "stored",
        "dtype": "float32",
        "attention": "plain",
        "mesh": "data=1",
    }
    assert printed["tokens_per_second"] == pytest.approx(16 / printed["seconds_per_update"])
    slowest, fastest = printed["slowest_and_fastest"]
    assert slowest >= printed["seconds_per_update"] >= fastest > 0
    assert printed["compile_seconds"] > 0
    assert np.isfinite(printed["loss"])
    assert set(printed) >= {"device", "gflop_per_token", "model_flop_utilisation", "peak_gib"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--repeats 0", "--repeats 0: must be at least 1"),
        ("--warmup -1", "--warmup -1: must be at least 0"),
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--max-length 2", "--max-length 2: must be at least 3"),
        ("--attention cudnn --dtype float32", "--attention cudnn needs an NVIDIA GPU and --dtype bfloat16"),
        pytest.param(
            "--mesh data=2 --batch-size 3", "--batch-size 3: must be a multiple of 2", marks=pytest.mark.devices(2)
        ),
    ],
)
def test_the_benchmark_refuses_in_one_line(capsys, flags, message):
    assert benchmark.main(flags.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
