"""The commands of conversion: what goes in comes out, others can read it, and broken input leaves nothing behind."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from convert import from_hf, inspect, output, to_hf
from convert.card import model_card
from convert.checkpoint import Source
from convert.engines import for_engine
from convert.load import in_numpy, load_draft, on_devices
from convert.save import save_draft
from infer import Generator, demo
from poss_jax import rotary
from poss_jax.config import BlockConfig, DraftConfig, RopeConfig
from poss_jax.errors import InputError
from poss_jax.specialist import BoundDrafter, Drafter, init_draft
from tests import fixtures, golden_data, host_memory

torch = pytest.importorskip("torch")

from safetensors.torch import load_file as load_torch  # noqa: E402
from safetensors.torch import save_file as save_torch  # noqa: E402

from tests.torch_drafter import TorchDrafter  # noqa: E402

GOLDEN_DRAFTS = golden_data.ROOT / "drafts"


def spans_text(name):
    return ",".join(map(str, golden_data.spans(name)))


def read(path):
    return json.loads(path.read_text())


def equal_tensors(one, other):
    one, other = load_torch(one / "model.safetensors"), load_torch(other / "model.safetensors")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def with_biases(directory):
    """A random drafter of one span with biases of queries, keys and values, as for Qwen2.

    What is added is small: with 0.3 scores are so large that one input rounded otherwise moves outputs by 2.5 times
    what the test below allows PyTorch and JAX to differ.
    """
    block = BlockConfig(32, 48, 4, 2, 8, 1e-5, RopeConfig())
    config = DraftConfig(block, 64, (6,), query_key_value_bias=True)
    params = jax.device_get(init_draft(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: leaf + np.random.default_rng(leaf.size).normal(0, 0.1, leaf.shape), params)
    save_draft(directory, config, params)
    return directory


# ----------------------------------------------------------------------------------------- drafters


@pytest.mark.parametrize("name", golden_data.DRAFTS)
def test_drafters_in_and_out_are_equal_to_the_bit(tmp_path, name, capsys):
    published = GOLDEN_DRAFTS / name
    assert from_hf.main([str(published), str(tmp_path / "ours"), "--spans", spans_text(name)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/ours: drafter with spans {spans_text(name)}, float32\n"
    equal_tensors(published, tmp_path / "ours")
    assert read(tmp_path / "ours" / "config.json")["spans"] == list(golden_data.spans(name))
    assert to_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs"), "--format", "poss"]) == 0
    equal_tensors(published, tmp_path / "theirs")
    assert "float32, in the format poss" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("source", ["bfloat16", "float16", "bin"])
def test_drafters_of_other_kinds_of_files_keep_every_value(tmp_path, source):
    tensors = load_torch(GOLDEN_DRAFTS / "hass" / "model.safetensors")
    if source != "bin":
        tensors = {name: tensor.to(getattr(torch, source)) for name, tensor in tensors.items()}
    (tmp_path / "in").mkdir()
    torch.save(tensors, tmp_path / "in" / "pytorch_model.bin")
    shutil.copy(GOLDEN_DRAFTS / "hass" / "config.json", tmp_path / "in")
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    written = load_torch(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)


@pytest.mark.parametrize(
    ("name", "layout"), [("poss3", "poss"), ("poss1", "poss"), ("hass", "eagle"), ("qwen2", "eagle")]
)
def test_exports_load_strictly_into_pytorch_and_give_the_same_outputs(models, tmp_path, name, layout):
    """The one for Qwen2 has no embedding; its target's is written, since EAGLE's code wants one."""
    source = with_biases(tmp_path / "qwen2") if name == "qwen2" else GOLDEN_DRAFTS / name
    spans = (6,) if name == "qwen2" else golden_data.spans(name)
    arguments = [str(source), str(tmp_path / "out"), "--format", layout, "--spans", ",".join(map(str, spans))]
    if name == "qwen2":
        arguments += ["--target", str(models / "tiny")]
    assert to_hf.main(arguments) == 0
    config, tensors = read(tmp_path / "out" / "config.json"), load_torch(tmp_path / "out" / "model.safetensors")
    loaded = load_draft(Source.open(source), on_devices("float32"), spans)
    random = np.random.default_rng(3)
    embedding = load_torch(models / "tiny" / "model.safetensors")["model.embed_tokens.weight"]
    embedding = torch.tensor(loaded.params["embed"].tolist()) if "embed" in loaded.params else embedding
    theirs = TorchDrafter(config, len(loaded.config.spans))
    theirs.load_state_dict(tensors, strict=True)
    tokens = random.integers(0, config["vocab_size"], (2, 9))
    features = random.normal(size=(2, 9, config["hidden_size"])).astype(np.float32)
    modules = {key: value for key, value in loaded.params.items() if key != "embed"}
    ours = jax.jit(Drafter(loaded.config).apply)(
        {"params": modules}, jnp.asarray(embedding)[tokens], features, jnp.arange(9)[None].repeat(2, 0)
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), torch.tensor(features)).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_biased_drafters_draft_with_their_biases(tmp_path):
    loaded = load_draft(Source.open(with_biases(tmp_path / "d")), on_devices("float32"))
    assert loaded.config.query_key_value_bias
    assert loaded.config.spans == (6,)
    bound, x = BoundDrafter(*loaded), jnp.ones((1, 2, 32))
    key = bound.project(0, x, jnp.zeros((1, 2), int))[1].keys
    shifted = jax.tree.map(lambda leaf: leaf, loaded.params)
    shifted["specialist_0"]["query_key_value_bias"] += 1.0
    other = BoundDrafter(loaded.config, shifted).project(0, x, jnp.zeros((1, 2), int))[1].keys
    np.testing.assert_allclose(other - key, 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "architecture", "bias_of_fc"),
    [
        ("eagle", "LlamaForCausalLM", True),
        ("vllm", "EagleLlamaForCausalLM", False),
        ("sglang", "LlamaForCausalLMEagle", True),
    ],
)
@pytest.mark.parametrize("had_bias", [False, True])
def test_engines_get_the_architecture_and_the_bias_they_expect(
    tmp_path, capsys, layout, architecture, bias_of_fc, had_bias
):
    """A config's `bias` is that of `fc` for EAGLE's code and that of attention for vLLM and SGLang."""
    draft = load_draft(Source.open(GOLDEN_DRAFTS / "hass"), in_numpy, (6,))
    config = DraftConfig(draft.config.block, draft.config.vocab_size, (6,), fc_bias=had_bias)
    fc = {"kernel": draft.params["fc"]["kernel"]} | ({"bias": np.zeros(64, np.float32)} if had_bias else {})
    save_draft(tmp_path / "in", config, draft.params | {"fc": fc})
    assert to_hf.main([str(tmp_path / "in"), str(tmp_path / "out"), "--format", layout]) == 0
    assert ("the drafter's own is left out" in capsys.readouterr().err) == (layout != "eagle")
    written, tensors = read(tmp_path / "out" / "config.json"), load_file(tmp_path / "out" / "model.safetensors")
    assert written["architectures"] == [architecture]
    assert written["num_hidden_layers"] == 1
    assert "spans" not in written
    if layout == "eagle":
        assert ("fc.bias" in tensors) == had_bias == written["bias"]
    else:
        assert ("fc.bias" in tensors) == bias_of_fc
        assert written["bias"] is False
        assert "embed_tokens.weight" not in tensors
    again = load_draft(Source.open(tmp_path / "out"), in_numpy)
    np.testing.assert_array_equal(again.params["specialist_0"]["down"], draft.params["specialist_0"]["down"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "poss3",
            ["--format", "vllm"],
            "spans 3,3; give --specialist 0 to export the first one alone, or --format poss",
        ),
        ("poss1", ["--format", "eagle"], "format eagle has one layer for all draft positions"),
        ("poss3", ["--format", "sglang"], "format sglang has one layer"),
        (
            "hass",
            ["--format", "vllm"],
            "format vllm has no bias in fc, and this drafter's is not zero, so it would draft worse; "
            "train one with train.run --no-fc-bias",
        ),
        ("poss3", ["--specialist", "2"], "--specialist 2: the drafter has specialists 0 to 1"),
        ("qwen2", ["--format", "sglang"], "format sglang has no biases of queries, keys and values alone"),
        (
            "qwen2",
            ["--format", "eagle"],
            "holds the target's embedding, and this drafter does not; give --target MODEL",
        ),
        ("qwen2", ["--target", str(golden_data.TARGET)], "the drafter is another target's"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_with_the_reason(tmp_path, capsys, name, arguments, message):
    source = with_biases(tmp_path / "qwen2") if name == "qwen2" else GOLDEN_DRAFTS / name
    spans = [] if name == "qwen2" else ["--spans", spans_text(name)]
    assert to_hf.main([str(source), str(tmp_path / "out"), *arguments, *spans]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "qwen2"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope": RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)},
            "format eagle has no rotary scaling of type 'llama3'",
        ),
        ({"rope": RopeConfig("linear", 5e5, 2.0)}, "format eagle forgets rope_theta where positions are scaled"),
        ({"rope": RopeConfig(frequency_factors=(1.0, 2.0, 3.0, 4.0))}, "no rotary scaling of factors of its own"),
        (
            {"head_dim": 16},
            "format eagle divides the hidden size by the number of heads; this drafter has 4 of 16 for 32",
        ),
    ],
)
def test_positions_and_heads_that_eagles_code_does_not_know_are_refused(changes, message):
    block = dataclasses.replace(BlockConfig(32, 48, 4, 2, 8, 1e-5, RopeConfig()), **changes)
    with pytest.raises(InputError, match=message):
        for_engine("eagle", DraftConfig(block, 64, (1,)), {"embed_tokens.weight": np.zeros(1)})


def test_rotary_factors_of_llama_3_are_written_by_name():
    """GGUF files hold factors, which other programs do not look for in a config."""
    named = RopeConfig("llama3", 5e5, 32.0, 1.0, 4.0, 8192)
    plain = rotary._frequencies(RopeConfig(theta=5e5), 64)
    factors = tuple(float(f) for f in plain / rotary._frequencies(named, 64))
    assert min(factors) == 1.0 < max(factors) == 32.0
    block = BlockConfig(128, 48, 2, 1, 64, 1e-5, RopeConfig(theta=5e5, frequency_factors=factors))
    for layout in ("poss", "vllm"):
        contents, _ = for_engine(layout, DraftConfig(block, 64, (1,), fc_bias=False), {})
        assert RopeConfig.from_hf(contents) == named
        assert "rope_frequency_factors" not in contents
    other = RopeConfig(theta=5e5, frequency_factors=(*factors[:-1], 31.0))
    assert rotary.name_scaling(other, 64) == other


def test_one_specialist_alone(tmp_path):
    arguments = [str(GOLDEN_DRAFTS / "poss3"), str(tmp_path / "out"), "--spans", "3,3", "--format", "eagle"]
    assert to_hf.main([*arguments, "--specialist", "1", "--dtype", "bfloat16"]) == 0
    whole, one = (
        load_torch(GOLDEN_DRAFTS / "poss3" / "model.safetensors"),
        load_torch(tmp_path / "out/model.safetensors"),
    )
    assert {name for name in one if name.startswith("layers.")} == {
        name for name in whole if name.startswith("layers.0.")
    }
    for name in one:
        assert torch.equal(one[name], whole[name.replace("layers.0.", "layers.1.")].to(torch.bfloat16))


def test_the_card_of_one_specialist_does_not_claim_what_all_of_them_reach(tmp_path):
    draft = load_draft(Source.open(GOLDEN_DRAFTS / "poss3"), in_numpy, (3, 3))
    notes = {"target": "org/m", "evaluation": {"tokens_per_round": 2.5, "acceptance": [0.75]}}
    save_draft(tmp_path / "in", draft.config, draft.params, notes=notes)
    assert to_hf.main([str(tmp_path / "in"), str(tmp_path / "out"), "--specialist", "1"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Specialist 1 of a PosS drafter with spans 3,3, alone, for lossless" in card
    assert "2.500" not in card
    assert "evaluation" not in read(tmp_path / "out" / "config.json")["notes"]


@pytest.mark.parametrize(
    "notes",
    [
        "text",
        ["a"],
        {"evaluation": [1]},
        {"evaluation": {"acceptance": [None, 0.5]}},
        {"data": 3, "target": 5, "evaluation": {"tokens_per_round": "many"}},
    ],
)
def test_notes_that_others_wrote_are_no_trouble(tmp_path, notes):
    shutil.copytree(GOLDEN_DRAFTS / "hass", tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(read(tmp_path / "in" / "config.json") | {"notes": notes}))
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "| updates | not recorded |" in (tmp_path / "out" / "README.md").read_text()


def test_the_bundled_drafters_have_the_card_that_is_written_today():
    for directory in (demo.DRAFTER, *(golden_data.ROOT.parents[1] / "docs" / "drafters").iterdir()):
        config, params = load_draft(Source.open(directory), in_numpy)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        expected = model_card(config, size, read(directory / "config.json")["notes"])
        assert (directory / "README.md").read_text() == expected


def test_a_training_run_is_a_drafter_too(tmp_path, capsys):
    save = [str(GOLDEN_DRAFTS / "poss3"), str(tmp_path / "run" / "drafter"), "--spans", "3,3"]
    assert from_hf.main(save) == 0
    (tmp_path / "run" / "checkpoints").mkdir()
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    equal_tensors(GOLDEN_DRAFTS / "poss3", tmp_path / "out")
    shutil.rmtree(tmp_path / "run" / "drafter")
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "more")]) == 2
    assert "has not written its drafter yet; end it with train.run --resume" in capsys.readouterr().err


def test_the_model_card_tells_what_is_recorded(tmp_path):
    draft = load_draft(Source.open(GOLDEN_DRAFTS / "poss3"), in_numpy, (3, 3))
    notes = {
        "target": "org/model-7b",
        "data": ["sharegpt.json:0.5", "own.jsonl"],
        "init_from": "runs/eagle/drafter",
        "step": 1200,
        "evaluation": {"step": 1200, "tokens_per_round": 2.5, "acceptance": [0.75, 0.5]},
    }
    save_draft(tmp_path / "in", draft.config, draft.params, notes=notes)
    assert to_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: poss-jax\nbase_model: org/model-7b\n")
    for line in (
        "# Drafter for org/model-7b",
        "2 position specialists (PosS), for lossless speculative decoding",
        "| spans | 3,3: draft positions that each specialist serves |",
        "| training data | sharegpt.json:0.5, own.jsonl |",
        "| started from | runs/eagle/drafter |",
        "| updates | 1200 |",
        "| tokens per round on held-out conversations, one drafted chain | 2.500 |",
        "| acceptance by draft position, given that all before it were accepted | 0.750 0.500 |",
    ):
        assert line in card
    assert read(tmp_path / "out" / "config.json")["notes"] == notes
    save_draft(tmp_path / "bare", draft.config, draft.params)
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert "base_model" not in bare
    assert "| training data | not recorded |" in bare


@pytest.mark.parametrize(
    ("notes", "tokens", "acceptance"),
    [
        ({"step": 1200, "evaluation": {"step": 1200}}, "2.500", "0.750 0.500"),
        ({"step": 1234, "evaluation": {"step": 1200}}, "2.500 at update 1200", "0.750 0.500 at update 1200"),
        ({"evaluation": {"step": 1200}}, "2.500", "0.750 0.500"),
        ({"step": 1234, "evaluation": {}}, "2.500", "0.750 0.500"),
    ],
)
def test_the_model_card_says_of_which_update_its_figures_are(notes, tokens, acceptance):
    notes["evaluation"] |= {"tokens_per_round": 2.5, "acceptance": [0.75, 0.5]}
    card = model_card(load_draft(Source.open(GOLDEN_DRAFTS / "poss3"), in_numpy, (3, 3)).config, 7, notes)
    assert f"| tokens per round on held-out conversations, one drafted chain | {tokens} |\n" in card
    assert f"| acceptance by draft position, given that all before it were accepted | {acceptance} |\n" in card


# ------------------------------------------------------------------------------------------ targets


def test_a_converted_target_is_the_same_target(models, tmp_path, monkeypatch):
    source = tmp_path / "in"
    shutil.copytree(models / "tiny63", source)
    fixtures.tok(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [63]}')
    monkeypatch.setattr(output, "SHARD_BYTES", 20000)
    assert from_hf.main([str(source), str(tmp_path / "out")]) == 0
    index = read(tmp_path / "out" / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == 6
    assert files[0] == "model-00001-of-00006.safetensors"
    written = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    original = load_file(source / "model.safetensors")
    assert written.keys() == original.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor)
    names = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, *files, "model.safetensors.index.json"}
    one, other = (Generator.from_pretrained(str(path)) for path in (source, tmp_path / "out"))
    assert one.models.eos_ids == other.models.eos_ids == (63, 1)
    answers = [generator.generate([[0, 5, 9]], max_new_tokens=8)[0].token_ids for generator in (one, other)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["tied", "tied and stored", "three shards", "bfloat16", "bin", "bin in shards"])
def test_targets_of_every_kind_of_file_are_written_with_equal_tensors(tmp_path, kind):
    """Known bug G14, on the way out: no index.json, a tied head that is absent, half precision."""
    tied = kind.startswith("tied")
    drop = ("lm_head.weight",) if kind == "tied" else ()
    options = {"shards": 3 if kind == "three shards" else 1, "bf16": kind == "bfloat16"}
    fixtures.tiny(tmp_path / "in", seed=9, **options)
    config = read(tmp_path / "in" / "config.json") | {"tie_word_embeddings": tied}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    tensors = {}
    for path in (tmp_path / "in").glob("*.safetensors"):
        tensors |= load_torch(path)
    if kind == "bin in shards":
        names = sorted(tensors)
        files = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, held in files.items():
            torch.save({name: tensors[name] for name in held}, tmp_path / "in" / file)
        weight_map = {name: file for file, held in files.items() for name in held}
        (tmp_path / "in" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (tmp_path / "in" / "model.safetensors").unlink()
    if tied or kind == "bin":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() if tied else tensors["lm_head.weight"]
        kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
        torch.save(kept, tmp_path / "in" / "pytorch_model.bin")
        (tmp_path / "in" / "model.safetensors").unlink()
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    written = load_torch(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in written.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_is_rounded_where_that_is_asked_for(models, tmp_path, dtype):
    assert from_hf.main([str(models / "tiny"), str(tmp_path / "out"), "--dtype", dtype]) == 0
    written, original = (load_torch(path / "model.safetensors") for path in (tmp_path / "out", models / "tiny"))
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor.to(getattr(torch, dtype)))
    assert read(tmp_path / "out" / "config.json")["torch_dtype"] == dtype


def test_mixed_types_stay_mixed_and_so_does_what_the_config_says(models, tmp_path):
    """Norms in float32 among matrices in bfloat16, and even float16 in one fused parameter."""
    shutil.copytree(models / "tiny", tmp_path / "in")
    tensors = {name: t.to(torch.bfloat16) for name, t in load_torch(tmp_path / "in" / "model.safetensors").items()}
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].half()
    save_torch(tensors, tmp_path / "in" / "model.safetensors")
    config = read(tmp_path / "in" / "config.json") | {"torch_dtype": "bfloat16"}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    written = load_torch(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(written[name].float(), tensor.float())
        fused = "layers.0.self_attn" in name and "o_proj" not in name
        assert written[name].dtype == (torch.float32 if fused else tensor.dtype)
    assert read(tmp_path / "out" / "config.json")["torch_dtype"] == "bfloat16"


# -------------------------------------------------------------------------------------- broken input


def broken(models, directory, how):
    """A target or drafter in which something is wrong."""
    source = GOLDEN_DRAFTS / "hass" if how.startswith("drafter") else models / "tiny"
    shutil.copytree(source, directory)
    weights = directory / "model.safetensors"
    if how.endswith("cut file"):
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how.endswith("wrong header"):
        weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    elif how.endswith("NaN weights"):
        tensors = {name: tensor.copy() for name, tensor in load_file(weights).items()}
        next(tensor for name, tensor in tensors.items() if name.endswith("up_proj.weight"))[3, 2] = np.nan
        save_file(tensors, weights)
    elif how.endswith("missing shard"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "model-1.safetensors")}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    elif how.endswith("a pickle that runs code"):
        weights.unlink()
        torch.save({"x": subprocess.Popen}, directory / "pytorch_model.bin")
    elif how.endswith("a tensor renamed"):
        tensors = load_file(weights)
        name = next(name for name in tensors if name.endswith("down_proj.weight"))
        tensors[name.replace("down", "dawn")] = tensors.pop(name)
        save_file(tensors, weights)
    elif how.endswith("no config"):
        (directory / "config.json").unlink()


MESSAGES = {
    "cut file": "not a whole safetensors file",
    "wrong header": "not a whole safetensors file",
    "NaN weights": "up_proj.weight' holds values that are not finite numbers",
    "missing shard": "names 'model-1.safetensors', which is not there",
    "a pickle that runs code": "not a PyTorch file of tensors only",
    "a tensor renamed": "down_proj.weight' is missing",
    "no config": "config.json: no such file",
}


@pytest.mark.parametrize("how", MESSAGES)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_broken_input_is_one_line_and_leaves_nothing_behind(models, tmp_path, capsys, kind, how):
    broken(models, tmp_path / "in", f"{kind}: {how}")
    commands = [from_hf.main] if kind == "target" else [from_hf.main, to_hf.main]
    for command in commands:
        assert command([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
        shown = capsys.readouterr().err
        assert MESSAGES[how] in shown
        assert shown.startswith(f"error: {tmp_path}/in")
        assert shown.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_is_there_is_never_overwritten(tmp_path, capsys, models):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("dear to me")
    for command in (from_hf.main, to_hf.main):
        assert command([str(GOLDEN_DRAFTS / "hass"), str(tmp_path / "out")]) == 2
        assert "out: is there already; give another directory" in capsys.readouterr().err
    assert from_hf.main([str(models / "tiny"), str(tmp_path / "out" / "mine")]) == 2
    assert from_hf.main([str(models / "tiny"), str(tmp_path / "out" / "mine" / "below")]) == 2
    assert (tmp_path / "out" / "mine").read_text() == "dear to me"
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    (tmp_path / "empty").mkdir()
    assert from_hf.main([str(models / "tiny"), str(tmp_path / "empty")]) == 0


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b"])
def test_names_that_no_directory_can_have(capsys, name):
    for command in (from_hf.main, to_hf.main):
        assert command([str(GOLDEN_DRAFTS / "hass"), name]) == 2
        assert "is not the name of a file or directory" in capsys.readouterr().err


def test_parents_that_were_made_for_nothing_go_again(models, tmp_path):
    broken(models, tmp_path / "in", "target: NaN weights")
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "deep" / "er" / "out")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_sigterm_and_a_full_disk_leave_nothing_behind(tmp_path, capsys, monkeypatch):
    def killed_while_writing(directory):
        with output.new_directory(directory) as unfinished:
            (unfinished / "file").write_text("part")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        killed_while_writing(tmp_path / "out")
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []

    def full(*arguments):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(output, "save_file", full)
    assert from_hf.main([str(golden_data.TARGET), str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/out: cannot be written (I/O error: No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_eagle_3_head_is_refused_by_name(tmp_path, capsys):
    shutil.copytree(GOLDEN_DRAFTS / "eagle", tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "in: is an EAGLE-3 head" in capsys.readouterr().err


def test_a_target_has_no_spans(models, tmp_path, capsys):
    assert from_hf.main([str(models / "tiny"), str(tmp_path / "out"), "--spans", "3,3"]) == 2
    assert "is a target; --spans is for drafters" in capsys.readouterr().err


def test_a_tokenizer_is_not_for_drafters(tmp_path, capsys):
    source = GOLDEN_DRAFTS / "hass"
    assert from_hf.main([str(source), str(tmp_path / "out"), "--tokenizer", "org/tokenizer"]) == 2
    assert capsys.readouterr().err == f"error: {source}: is a drafter; --tokenizer is for targets\n"
    assert not (tmp_path / "out").exists()


def test_values_too_large_for_the_type_are_refused(tmp_path, models, capsys):
    shutil.copytree(models / "tiny", tmp_path / "in")
    tensors = {name: tensor.copy() for name, tensor in load_file(tmp_path / "in" / "model.safetensors").items()}
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert from_hf.main([str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "in: model.norm.weight holds values too large for float16" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# ------------------------------------------------------------------------------------------ inspect


def test_inspect_says_what_a_drafter_is(capsys):
    assert inspect.main([str(GOLDEN_DRAFTS / "poss3"), "--spans", "3,3"]) == 0
    shown = capsys.readouterr().out
    for line in (
        f"{GOLDEN_DRAFTS}/poss3: drafter",
        "  spans                            3,3",
        "  specialists                      2",
        "  tensors                          19 (19 float32)",
        "    layers.1.mlp.up_proj.weight               float32   [128, 64]",
        "  complete: all that the config asks for is there, and nothing else",
    ):
        assert line in shown.splitlines()


def test_inspect_says_what_a_target_is_as_json(models, capsys):
    assert inspect.main([str(models / "tiny"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["config"]["layers"], found["config"]["family"]) == ("target", 2, "llama")
    tensors = load_file(models / "tiny" / "model.safetensors")
    assert found["parameters"] == sum(tensor.size for tensor in tensors.values())
    assert found["bytes"] == 4 * found["parameters"]
    assert found["tensors"]["model.norm.weight"] == {"shape": [32], "dtype": "float32"}
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            ("fc.weight", "midlayer.mlp.down_proj.weight", "d2t"),
            "is an EAGLE-3 head, which reads several layers' features; not supported",
        ),
        (("fc.weight",), "holds no specialist; tensors named layers.0.* are missing"),
    ],
)
def test_inspect_says_what_is_wrong_with_a_drafter_that_has_no_specialists(tmp_path, capsys, tensors, problem):
    shutil.copytree(GOLDEN_DRAFTS / "hass", tmp_path / "in")
    save_file({name: np.zeros((2, 3), np.float32) for name in tensors}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(SystemExit) as ended:
        inspect.main([str(tmp_path / "in"), "--json"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["config"], found["parameters"]) == ("drafter", {}, 6 * len(tensors))
    assert found["problems"] == [problem]


def test_inspect_says_everything_that_is_wrong(tmp_path, capsys, models):
    shutil.copytree(models / "draft3", tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.1.mlp.dawn"] = tensors.pop("layers.1.mlp.down_proj.weight")
    tensors["fc.bias"] = np.zeros(33, np.float32)
    del tensors["layers.2.self_attn.q_proj.weight"]
    tensors["layers.0.post_attention_layernorm.weight"] = np.ones(32, np.int32)
    save_file(tensors, path)
    with pytest.raises(SystemExit) as ended:
        inspect.main([str(tmp_path / "in"), "--spans", "2,2,2"])
    assert ended.value.code == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert problems == [
        "  problem: tensor 'fc.bias' has shape [33], expected [32]",
        "  problem: tensor 'layers.0.post_attention_layernorm.weight' holds int32, expected floating point numbers",
        "  problem: tensor 'layers.1.mlp.down_proj.weight' is missing",
        "  problem: tensor 'layers.2.self_attn.q_proj.weight' is missing",
        "  problem: tensor 'layers.1.mlp.dawn' is not expected; the config has no place for it",
    ]
    with pytest.raises(SystemExit):
        inspect.main([str(tmp_path / "in")])
    shown = capsys.readouterr().out
    assert "problem: holds 3 specialists and its config does not say which draft positions each serves" in shown
    assert "  specialists                      3" in shown


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mesh", [[], pytest.param(["--mesh", "tensor=2"], marks=pytest.mark.devices(2))])
def test_loading_needs_little_more_memory_than_the_arrays(tmp_path, mesh):
    """The whole kind: mapping the files, or holding what was read, takes as much again as the arrays, 220 MB."""
    host_memory.make(tmp_path / "model", 0.2)
    command = [sys.executable, "-m", "tests.host_memory", str(tmp_path / "model"), *mesh]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert figures["arrays"] > 200e6
    assert figures["beyond"] < figures["largest"] + 96e6
