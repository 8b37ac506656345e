"""Properties of the compiled programs: how often they compile, what they copy, where they can run."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import infer.batch
from infer import Generator, Settings
from infer.batch import Batch
from poss_jax import decode
from poss_jax.attention import Filled, KeyValues, Part, attention
from poss_jax.errors import InputError
from poss_jax.sharding import make_mesh, parse_mesh
from poss_jax.tree import TreeShape
from tests import fixtures, golden_data
from tests.test_lossless import prompt_of

TREE = {"levels": 3, "total_nodes": 8, "draft_top_k": 2}


@contextlib.contextmanager
def compilations():
    """Counts what the backend compiles, of any function."""
    compiled = []

    def listen(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_prompt_of_the_same_bucket_compiles_nothing(tiny):
    options = {"max_new_tokens": 40, "temperature": 0.87, "seed": 1, **TREE}  # which no other test has compiled
    with compilations() as first:
        tiny.generate([prompt_of(18)], **options)
    assert first, "the counter does not see compilations"
    with compilations() as second:
        tiny.generate([prompt_of(31)], **{**options, "seed": 2})
        list(tiny.visits([prompt_of(20)], Settings(**options)))
    assert second == []
    with compilations() as other_bucket:
        tiny.generate([prompt_of(40)], **options)
    assert len(other_bucket) == 1, "the pass of the prompts alone: texts of about as many tokens share the loop"


def test_trees_that_run_the_same_specialists_share_the_prompts_pass(tiny):
    """`tiny` has spans (2, 2): two levels run one specialist, three and more both."""
    options = {"max_new_tokens": 9, "temperature": 0.86}  # which no other test has compiled
    trees = [(3, 4, 1), (4, 20, 3), (5, 9, 2)]  # the first is the one of prompts
    first, *others = [
        batch_of(tiny, [prompt_of(7)], levels=levels, total_nodes=nodes, draft_top_k=top_k, **options)
        for levels, nodes, top_k in trees
    ]
    assert {batch.plan.of_prompts.tree for batch in (first, *others)} == {TreeShape(3, 4, 1)}
    assert batch_of(tiny, [prompt_of(7)], levels=1, **options).plan.of_prompts.tree == TreeShape(1, 2, 1)
    first.start()
    for batch in others:
        with compilations() as compiled:
            batch.start()
        assert len(compiled) == 1  # what `fit` does
        for part in ("target_caches", "draft_caches", "tokens", "length", "fresh"):
            jax.tree.map(np.testing.assert_array_equal, getattr(batch.state, part), getattr(first.state, part))
        np.testing.assert_array_equal(batch.state.features[:, :1], first.state.features[:, :1])
        np.testing.assert_array_equal(batch.state.features[:, 1:], 0)
        np.testing.assert_array_equal(batch.state.last_round.next_token, batch.state.tokens[:, 7])
        assert decode.fit(first.state, batch.plan).target_caches is first.state.target_caches
        whole = jax.eval_shape(
            lambda params, *arguments, batch=batch: decode.prefill(params, batch.plan, batch.slots, *arguments),
            *(batch.params, *batch.arguments, batch.eos_ids),
        )
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch.state) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), whole
        )


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        ("plain", {1: 64, 64: 64, 65: 256, 256: 256, 257: 512, 512: 512, 513: 1024, 1025: 1536, 2183: 2560}),
        ("mosaic", {1: 1024, 1024: 1024, 1025: 2048, 2183: 3072}),
    ],
)
def test_caches_have_few_sizes(kernel, sizes):
    assert {slots: infer.batch.cache_size(slots, kernel) for slots in sizes} == sizes


def batch_of(generator: Generator, prompts: list[list[int]], **options) -> Batch:
    settings = Settings(**options)
    return Batch(generator.models, prompts, range(len(prompts)), settings, generator.context(settings))


def compiled_loop(generator: Generator, **options):
    """The compiled program of rounds, and the state that it takes."""
    batch = batch_of(generator, [prompt_of(10)] * options.get("batch_size", 1), **options)
    batch.start()
    arguments = (batch.params, batch.plan, batch.state, batch.eos_ids, np.int32(5), batch.ended)
    return decode.jit_decode.lower(*arguments).compile(), batch.state


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("plain", [False, True], ids=["drafted", "plain"])
def test_caches_are_updated_in_place(tmp_path, monkeypatch, plain, batch_size):
    """Every byte of the state is aliased to the result, and no copy of a cache is made on the way."""
    monkeypatch.setattr(infer.batch, "FIRST_SLOTS", 8192)
    config = fixtures.tiny(tmp_path / "target", max_position_embeddings=8192, head_dim=64, num_attention_heads=2)
    fixtures.draft(tmp_path / "draft", config, 2)
    generator = Generator.from_pretrained(str(tmp_path / "target"), str(tmp_path / "draft"), spans=(1, 1))
    options = {"plain": plain, "batch_size": batch_size, "levels": 2, "total_nodes": 3, "draft_top_k": 1}
    temporary = []
    for new in (1000, 8000):
        compiled, state = compiled_loop(generator, max_new_tokens=new, **options)
        memory = compiled.memory_analysis()
        caches = bytes_of((state.target_caches, state.draft_caches))
        assert memory.alias_size_in_bytes >= caches
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024
        temporary.append((memory.temp_size_in_bytes, bytes_of(state.target_caches[0].keys)))
    # Scores and masks grow with the slots too, but by less than one copy of one layer's keys.
    (small, small_keys), (large, large_keys) = temporary
    assert large - small < large_keys - small_keys


def test_a_lone_row_is_multiplied_with_values_as_two():
    """Of one, XLA for GPUs copied the values of every cache: `test_caches_are_updated_in_place` failed there."""
    query, side = jnp.zeros((1, 1, 3, 1, 16)), jnp.zeros((1, 3, 64, 16))
    parts = [Part(KeyValues(side, side), Filled(jnp.array([5], jnp.int32)))]
    program = jax.jit(attention).lower(query, parts).as_text()
    assert re.findall(r"dot_general .* -> tensor<(\w+)xf32>", program) == ["1x3x1x64", "1x3x2x16"]


@pytest.mark.parametrize("options", [{}, {"plain": True}], ids=["drafted", "plain"])
def test_caches_grow_with_the_text_and_change_nothing(golden, monkeypatch, options):
    """A row that has stopped long before keeps its text while the others grow."""
    generator, prompts = golden("poss2"), list(golden_data.prompts().values())[:3]
    options = {"max_new_tokens": 50, "batch_size": 3, **TREE, **options}
    end = generator.generate(prompts, **options)[0].token_ids[20]
    options["eos_ids"] = (end,)
    whole = generator.generate(prompts, **options)
    assert len(whole[0].token_ids) <= 21
    assert len({len(answer.token_ids) for answer in whole}) > 1
    monkeypatch.setattr(infer.batch, "FIRST_SLOTS", 32)
    *_, visited = generator.visits(prompts, Settings(**options))
    for answers in (generator.generate(prompts, **options), visited):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in whole]
        assert [answer.accept_lengths for answer in answers] == [answer.accept_lengths for answer in whole]
    with compilations() as again:
        generator.generate(prompts, **options)
    assert again == []


@pytest.mark.parametrize("mesh", [None, pytest.param("tensor=2", marks=pytest.mark.devices(2))])
def test_caches_double_until_the_text_fits(monkeypatch, mesh):
    monkeypatch.setattr(infer.batch, "FIRST_SLOTS", 32)
    generator = golden_data.generator("poss2", mesh=mesh)
    batch = batch_of(generator, [prompt_of(5)], max_new_tokens=100, ignore_eos=True, **TREE)
    batch.compile(set())
    batch.start()
    slots = [batch.state.target_caches[0].keys.shape[2]]
    before = batch.compile_seconds
    while batch.stopped[0] == decode.RUNNING:
        batch.advance(np.iinfo(np.int32).max)
        slots.append(batch.state.target_caches[0].keys.shape[2])
    assert slots == [32, 32, 64, 128]
    assert batch.slots == 128
    assert batch.compile_seconds > before
    answer = batch.answer(0, 0.0)
    assert answer.stop_reason == "max_new_tokens"
    assert answer.compile_seconds == batch.compile_seconds
    plain = generator.generate([prompt_of(5)], max_new_tokens=100, ignore_eos=True, plain=True)
    assert answer.token_ids == plain[0].token_ids


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_prefill_and_loop_lower_for_every_platform(golden, platform, sampling):
    batch = batch_of(golden("poss2"), [[0, 5], [0, 6, 7]], batch_size=2, **sampling)

    def prefill(params, *arguments):
        return decode.jit_prefill(params, batch.plan, batch.slots, *arguments)

    def loop(params, state, eos_ids, rounds, ended):
        return decode.decode(params, batch.plan, state, eos_ids, rounds, ended)

    lowered = export.export(jax.jit(prefill), platforms=[platform])(batch.params, *batch.arguments, batch.eos_ids)
    assert lowered.platforms == (platform,)
    state = jax.eval_shape(prefill, batch.params, *batch.arguments, batch.eos_ids)
    jitted = jax.jit(loop, donate_argnames="state")
    lowered = export.export(jitted, platforms=[platform])(batch.params, state, batch.eos_ids, jnp.int32(5), batch.ended)
    assert lowered.platforms == (platform,)


@pytest.mark.parametrize(
    "mesh",
    [pytest.param("tensor=2", marks=pytest.mark.devices(2)), pytest.param("tensor=4", marks=pytest.mark.devices(4))],
)
def test_a_mesh_gives_the_same_tokens(golden, mesh):
    """Over 4 devices the 2 KV heads stay whole, and MLP and vocabulary are split all the same."""
    prompts = list(golden_data.prompts().values())[:3]
    options = {"max_new_tokens": 32, "batch_size": 3, **TREE}
    sharded = golden_data.generator("poss3", mesh=mesh)
    size = int(mesh[-1])
    layer = sharded.target.params["layers"][0]
    assert layer["gate_up"].addressable_shards[0].data.shape == (64, 2, 128 // size)
    assert layer["query_key_value"].addressable_shards[0].data.shape[1] == (1 if size == 2 else 2)
    whole = golden("poss3").generate(prompts, **options)
    split = sharded.generate(prompts, **options)
    assert [answer.token_ids for answer in split] == [answer.token_ids for answer in whole]
    assert [answer.accept_lengths for answer in split] == [answer.accept_lengths for answer in whole]


@pytest.mark.devices(2)
def test_a_mesh_splits_the_caches_too():
    generator = golden_data.generator("poss3", mesh="tensor=2")
    batch = batch_of(generator, [[0, 5]], max_new_tokens=8, **TREE)
    batch.start()
    for layer in (*batch.state.target_caches, *batch.state.draft_caches):
        assert layer.keys.addressable_shards[0].data.shape[1] == 1  # of 2 KV heads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2", "mesh axis 'data' is not known here"),
        ("tensor", "needs a whole number of at least 1"),
        ("tensor=0", "needs a whole number of at least 1"),
        ("tensor=2,tensor=2", "given twice"),
    ],
)
def test_meshes_that_make_no_sense_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_mesh(text, ("tensor",))


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    there = jax.device_count()
    with pytest.raises(InputError, match=f"mesh tensor=4096 needs 4096 devices; this machine has {there}"):
        make_mesh({"tensor": 4096})


def test_bfloat16_weights_and_caches(models):
    generator = Generator.from_pretrained(
        str(models / "tiny63"), str(models / "draft2"), spans=(2, 2), dtype="bfloat16"
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(generator.target.params)} == {jnp.dtype("bfloat16")}
    options = {"max_new_tokens": 20, "ignore_eos": True, **TREE}
    batch = batch_of(generator, [prompt_of(9)], **options)
    batch.start()
    assert batch.state.target_caches[0].keys.dtype == jnp.bfloat16
    (drafted,) = generator.generate([prompt_of(9)], **options)
    (plain,) = generator.generate([prompt_of(9)], plain=True, **options)
    assert drafted.token_ids == plain.token_ids
