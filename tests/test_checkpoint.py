"""Checkpoints in: every kind of file gives the same weights, and what does not fit is refused by name."""

import json
import pickle
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.checkpoint import locate
from infer import Generator
from poss_jax.errors import InputError
from tests import fixtures

# Known bug G14: right tokens after P(20) of tiny(seed=9, tie_word_embeddings=True).
TIED = [56, 22, 31, 42, 62, 20, 58, 45, 45, 45, 28, 50]


def prompt(length):
    """P(n) of the known bugs."""
    return [0] + [10 + (7 * i + 3) % 54 for i in range(length - 1)]


def greedy(directory, length):
    (answer,) = Generator.from_pretrained(str(directory)).generate([prompt(length)], max_new_tokens=12)
    return answer.token_ids


def edit_config(directory, remove=(), **values):
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))


def edit_tensors(directory, edit):
    """`edit` changes the dictionary of tensors in place."""
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    fixtures.save(path, tensors)


def save_torch(directory, change=None, name="pytorch_model.bin", **options):
    """Replaces model.safetensors by a PyTorch file of the same tensors, each one passed through `change`."""
    torch = pytest.importorskip("torch")
    path = Path(directory) / "model.safetensors"
    tensors = {key: torch.from_numpy(value) for key, value in load_file(path).items()}
    torch.save(
        {key: change(value) if change else value for key, value in tensors.items()}, path.with_name(name), **options
    )
    path.unlink()


def target_matrices(params, config):
    """Our fused target parameters as the separate matrices of a Hugging Face checkpoint."""
    layers = [
        {f"model.layers.{index}.{name}": value for name, value in block_matrices(layer, config).items()}
        | {f"model.layers.{index}.input_layernorm.weight": layer["attention_norm"]}
        for index, layer in enumerate(params["layers"])
    ]
    ends = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    head = {"lm_head.weight": params["head"].T} if "head" in params else {}
    return {name: value for part in (*layers, ends, head) for name, value in part.items()}


def draft_matrices(params, config):
    """Our fused drafter parameters as the separate matrices of the published layout."""
    specialists = [name for name in params if name.startswith("specialist_")]
    matrices = {
        f"layers.{index}.{name}": value
        for index in range(len(specialists))
        for name, value in block_matrices(params[f"specialist_{index}"], config).items()
    }
    matrices["fc.weight"] = params["fc"]["kernel"].T
    if "bias" in params["fc"]:
        matrices["fc.bias"] = params["fc"]["bias"]
    if "embed" in params:
        matrices["embed_tokens.weight"] = params["embed"]
    return matrices


def block_matrices(block, config):
    hidden, group = config["hidden_size"], config["num_attention_heads"] // config["num_key_value_heads"]
    fused = np.asarray(block["query_key_value"])  # [h, k, g + 2, d]
    return {
        "self_attn.q_proj.weight": fused[:, :, :group].reshape(hidden, -1).T,
        "self_attn.k_proj.weight": fused[:, :, group].reshape(hidden, -1).T,
        "self_attn.v_proj.weight": fused[:, :, group + 1].reshape(hidden, -1).T,
        "self_attn.o_proj.weight": np.asarray(block["attention_output"]).reshape(-1, hidden).T,
        "mlp.gate_proj.weight": np.asarray(block["gate_up"])[:, 0].T,
        "mlp.up_proj.weight": np.asarray(block["gate_up"])[:, 1].T,
        "mlp.down_proj.weight": np.asarray(block["down"]).T,
        "post_attention_layernorm.weight": block["mlp_norm"],
    }


def assert_same_tensors(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    for name, expected in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), expected, err_msg=name)


def assert_same_params(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# ------------------------------------------------------------------------------------------ targets


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    """G14's target as one safetensors file."""
    directory = tmp_path_factory.mktemp("tied")
    fixtures.tiny(directory, seed=9, tie_word_embeddings=True, eos_token_id=63)
    return directory


@pytest.fixture
def tied_copy(tied, tmp_path):
    return shutil.copytree(tied, tmp_path / "copy")


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """A target with every tensor that a target can have, and its config."""
    directory = tmp_path_factory.mktemp("untied")
    fixtures.tiny(directory, seed=2, num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    return directory


@pytest.fixture
def target(untied, tmp_path):
    return shutil.copytree(untied, tmp_path / "target")


def test_one_safetensors_file_without_an_index(tied):
    assert greedy(tied, 20) == TIED


def test_three_shards_with_an_index(tmp_path):
    fixtures.tiny(tmp_path, seed=9, tie_word_embeddings=True, eos_token_id=63, shards=3)
    assert not (tmp_path / "model.safetensors").exists()
    assert greedy(tmp_path, 20) == TIED


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old_format"])
def test_pytorch_file(tied_copy, zipped):
    save_torch(tied_copy, _use_new_zipfile_serialization=zipped)
    assert greedy(tied_copy, 20) == TIED


def test_pytorch_file_of_trainable_parameters(tied_copy):
    torch = pytest.importorskip("torch")
    save_torch(tied_copy, torch.nn.Parameter)
    assert greedy(tied_copy, 20) == TIED


def test_tied_head_that_is_stored_all_the_same(tied_copy):
    edit_tensors(tied_copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert greedy(tied_copy, 20) == TIED


def test_stored_head_that_differs_from_a_tied_embedding_is_used_as_transformers_5_does(tmp_path):
    fixtures.tiny(tmp_path, seed=9, eos_token_id=63)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert greedy(tmp_path, 20) == [5, 10, 2, 50, 43, 32, 48, 2, 41, 36, 36, 11]


def test_rotary_tables_of_old_checkpoints_are_ignored(tied_copy):
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4) for layer in range(2)}
    edit_tensors(tied_copy, lambda t: t.update(tables | {"model.rotary_emb.inv_freq": np.ones(4)}))
    assert greedy(tied_copy, 20) == TIED


@pytest.mark.parametrize("bias", [False, True])
def test_every_target_weight_arrives_unchanged(tmp_path, bias):
    config = fixtures.tiny(tmp_path, seed=4, head_dim=6, attention_bias=bias, mlp_bias=bias)
    stored = load_file(tmp_path / "model.safetensors")
    params = Generator.from_pretrained(str(tmp_path)).target.params
    assert_same_tensors(target_matrices(params, config), {k: v for k, v in stored.items() if not k.endswith(".bias")})
    if bias:
        layer = params["layers"][1]
        size, heads, group = 6, config["num_key_value_heads"], 2
        fused = np.asarray(layer["query_key_value_bias"])  # [k, g + 2, d]
        prefix = "model.layers.1."
        ours = {
            "self_attn.q_proj.bias": fused[:, :group].reshape(-1),
            "self_attn.k_proj.bias": fused[:, group].reshape(heads * size),
            "self_attn.v_proj.bias": fused[:, group + 1].reshape(heads * size),
            "self_attn.o_proj.bias": layer["attention_output_bias"],
            "mlp.gate_proj.bias": layer["gate_up_bias"][0],
            "mlp.up_proj.bias": layer["gate_up_bias"][1],
            "mlp.down_proj.bias": layer["down_bias"],
        }
        assert_same_tensors(ours, {name: stored[prefix + name] for name in ours})


def bfloat16_values(array):
    """Float32 values that the fixture writer's bfloat16 stands for."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32) + 0x8000
    return ((bits >> 16) << 16).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["safetensors", "pytorch"])
def test_bfloat16_checkpoints_load_to_the_exact_values(tied, tmp_path, kind, dtype):
    config = fixtures.tiny(tmp_path, seed=9, tie_word_embeddings=True, bf16=True)
    expected = {name: bfloat16_values(value) for name, value in load_file(tied / "model.safetensors").items()}
    if kind == "pytorch":
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in expected.items()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    params = Generator.from_pretrained(str(tmp_path), dtype=dtype).target.params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    ours = target_matrices(jax.tree.map(lambda leaf: leaf.astype("float32"), params), config)
    assert_same_tensors(ours, expected)


def test_float16_checkpoints_load_to_the_exact_values(tied_copy):
    torch = pytest.importorskip("torch")
    stored = load_file(tied_copy / "model.safetensors")
    save_torch(tied_copy, lambda tensor: tensor.to(torch.float16))
    params = Generator.from_pretrained(str(tied_copy)).target.params
    config = json.loads((tied_copy / "config.json").read_text())
    expected = {name: value.astype(np.float16).astype(np.float32) for name, value in stored.items()}
    assert_same_tensors(target_matrices(params, config), expected)


def test_theta_in_rope_parameters_and_an_explicit_head_dim(tmp_path):
    fixtures.tiny(tmp_path, seed=3, head_dim=16, eos_token_id=63)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    edit_config(tmp_path, remove=("rope_theta", "rope_scaling"), rope_parameters=rope)
    assert greedy(tmp_path, 90) == [10, 1, 1, 1, 1, 34, 18, 40, 28, 10, 24, 28]


def test_one_kv_head_with_a_head_dim_of_its_own(tmp_path):
    fixtures.tiny(tmp_path, seed=8, hidden_size=40, head_dim=16, num_key_value_heads=1, eos_token_id=63)
    assert greedy(tmp_path, 20) == [60, 51, 50, 23, 27, 26, 26, 26, 26, 10, 15, 16]


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def put(name, *shape):
    return lambda tensors: tensors.update({name: np.zeros(shape)})


def remove(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (remove("model.norm.weight"), "'model.norm.weight' is missing"),
        (remove("lm_head.weight"), "'lm_head.weight' is missing"),
        (remove("model.embed_tokens.weight"), "'model.embed_tokens.weight' is missing"),
        (remove("model.layers.0.self_attn.k_proj.bias"), "'model.layers.0.self_attn.k_proj.bias' is missing"),
        (remove("model.layers.0.mlp.down_proj.bias"), "'model.layers.0.mlp.down_proj.bias' is missing"),
        (rename("model.norm.weight", "norm.weight"), "'model.norm.weight' is missing"),
        (put("model.layers.1.mlp.up_proj.weight", 64, 32), "unexpected tensor 'model.layers.1.mlp.up_proj.weight'"),
        (put("score.weight", 2, 32), "unexpected tensor 'score.weight'"),
        (put("lm_head.bias", 64), "unexpected tensor 'lm_head.bias'"),
        (put("model.norm.weight", 33), r"'model.norm.weight' has shape \[33\], expected \[32\]"),
        (put("lm_head.weight", 32, 64), r"'lm_head.weight' has shape \[32, 64\], expected \[64, 32\]"),
        (put("model.layers.0.self_attn.q_proj.weight", 32), r"q_proj.weight' has shape \[32\], expected \[32, 32\]"),
    ],
)
def test_target_with_a_tensor_missing_extra_or_misshapen_is_refused_by_name(target, edit, message):
    edit_tensors(target, edit)
    with pytest.raises(InputError, match=message):
        Generator.from_pretrained(str(target))


def test_biases_that_the_config_does_not_declare_are_refused(target):
    edit_config(target, attention_bias=False)
    with pytest.raises(InputError, match="unexpected tensor 'model.layers.0.self_attn.k_proj.bias' and 3 more"):
        Generator.from_pretrained(str(target))


def test_integer_tensors_are_refused(target):
    torch = pytest.importorskip("torch")
    save_torch(target, lambda tensor: tensor.to(torch.int8))
    with pytest.raises(InputError, match="'model.embed_tokens.weight' holds int8, expected floating point"):
        Generator.from_pretrained(str(target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, mistral, phi3, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor"),
        ({"quantization_config": "fp8"}, "quantization_config|fp8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_config_that_cannot_be_computed_is_refused_naming_the_field(target, changes, message):
    edit_config(target, **changes)
    with pytest.raises(InputError, match=message):
        Generator.from_pretrained(str(target)).generate([[0, 5]], max_new_tokens=1)


def corrupt_index(change):
    def corrupt(directory):
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return corrupt


def put_twice(directory):
    """A tensor in two shards, with other values in the one that the index does not name for it."""
    tensors = load_file(directory / SHARD3)
    tensors["model.embed_tokens.weight"] = load_file(directory / SHARD1)["model.embed_tokens.weight"] + 1
    save_file(tensors, directory / SHARD3)


SHARD1, SHARD3 = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda d: (d / SHARD3).unlink(), f"index.json: names '{SHARD3}', which is not there"),
        (
            corrupt_index(lambda index: index["weight_map"].update({"a.weight": SHARD1})),
            f"{SHARD1}: lacks tensor 'a.weight'",
        ),
        (
            corrupt_index(lambda index: index["weight_map"].pop("lm_head.weight")),
            f"{SHARD3}: holds tensor 'lm_head.weight', which the index does not list",
        ),
        (put_twice, f"{SHARD3}: holds tensor 'model.embed_tokens.weight', which the index puts into {SHARD1}"),
        (corrupt_index(lambda index: index.pop("weight_map")), "index.json: holds no weight_map"),
        (corrupt_index(lambda index: index.update(weight_map=[])), "index.json: holds no weight_map"),
        (corrupt_index(lambda index: index["weight_map"].update({"lm_head.weight": 3})), "index.json"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json: not readable as JSON"),
        (lambda d: (d / SHARD1).write_bytes((d / SHARD1).read_bytes()[:-8]), f"{SHARD1}: not a whole safetensors"),
    ],
)
def test_index_and_shards_that_do_not_fit_are_refused_naming_the_file(tmp_path, corrupt, message):
    fixtures.tiny(tmp_path, shards=3)
    corrupt(tmp_path)
    with pytest.raises(InputError, match=message):
        Generator.from_pretrained(str(tmp_path))


class Planted:
    """A pickle of this runs code when it is loaded carelessly: it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def as_torch(value):
    """Bytes of a file that torch.save writes."""

    def content(directory):
        torch = pytest.importorskip("torch")
        torch.save(value(torch), directory / "made.bin")
        return (directory / "made.bin").read_bytes()

    return content


BAD_PYTORCH_FILES = {
    "empty": lambda d: b"",
    "text": lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "truncated_zip": lambda d: as_torch(lambda torch: {"a": torch.zeros(500)})(d)[:900],
    "list": as_torch(lambda torch: [torch.zeros(2)]),
    "nested": as_torch(lambda torch: {"state_dict": {"a": torch.zeros(2)}}),
    "unnamed": as_torch(lambda torch: {0: torch.zeros(2)}),
    "sparse": as_torch(lambda torch: {"model.embed_tokens.weight": torch.zeros(64, 32).to_sparse()}),
    "float8": as_torch(lambda torch: {"model.embed_tokens.weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)}),
    "code_in_zip": lambda d: as_torch(lambda torch: {"a": Planted(d / "planted")})(d),
    "code_in_pickle": lambda d: pickle.dumps({"a": Planted(d / "planted")}, protocol=2),
}


@pytest.mark.parametrize("content", BAD_PYTORCH_FILES.values(), ids=BAD_PYTORCH_FILES.keys())
def test_pytorch_file_of_anything_but_tensors_is_refused_and_none_of_its_code_runs(target, content):
    pytest.importorskip("torch")
    (target / "model.safetensors").unlink()
    (target / "pytorch_model.bin").write_bytes(content(target))
    with pytest.raises(InputError, match="pytorch_model.bin|model.embed_tokens.weight"):
        Generator.from_pretrained(str(target))
    assert not (target / "planted").exists()


# ------------------------------------------------------------------------------------------- drafts


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A directory with `target`, and drafts for it with one and three specialists."""
    root = tmp_path_factory.mktemp("pair")
    config = fixtures.tiny(root / "target")
    fixtures.draft(root / "one", config, 1)
    fixtures.draft(root / "three", config, 3)
    fixtures.draft(root / "three_without_bias", config, 3, bias=False)
    return root


@pytest.fixture
def three(pair, tmp_path):
    """A copy of the three-specialist draft."""
    return shutil.copytree(pair / "three", tmp_path / "three")


@pytest.fixture
def load(pair):
    """Opens a draft beside its target."""

    def load_draft(directory, spans=(2, 2, 2)):
        return Generator.from_pretrained(str(pair / "target"), str(directory), spans=spans).draft

    return load_draft


@pytest.mark.parametrize("name", ["three", "three_without_bias"])
def test_every_draft_weight_arrives_unchanged(pair, load, name):
    config = json.loads((pair / name / "config.json").read_text())
    stored = load_file(pair / name / "model.safetensors")
    assert ("fc.bias" in stored) == (name == "three")
    assert_same_tensors(draft_matrices(load(pair / name).params, config), stored)


def test_specialists_of_a_draft_differ(pair, load):
    params = load(pair / "three").params
    assert not np.array_equal(params["specialist_0"]["down"], params["specialist_1"]["down"])
    assert not np.array_equal(params["specialist_1"]["down"], params["specialist_2"]["down"])


def test_pytorch_draft_equals_safetensors_draft(pair, three, load):
    save_torch(three)
    assert_same_params(load(three).params, load(pair / "three").params)


def test_draft_without_embedding_takes_the_targets(pair, three, load):
    edit_tensors(three, remove("embed_tokens.weight"))
    params = load(three).params
    assert "embed" not in params
    assert_same_params(params, {key: value for key, value in load(pair / "three").params.items() if key != "embed"})


def test_embedding_that_equals_the_targets_is_not_kept_twice_and_a_difference_is_said(pair, three):
    embedding = load_file(pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(three, lambda t: t.update({"embed_tokens.weight": embedding}))
    same = Generator.from_pretrained(str(pair / "target"), str(three), spans=(2, 2, 2))
    assert "embed" not in same.draft.params
    assert same.notes == ()
    embedding = embedding.copy()
    embedding[[3, 9]] += 1
    edit_tensors(three, lambda t: t.update({"embed_tokens.weight": embedding}))
    other = Generator.from_pretrained(str(pair / "target"), str(three), spans=(2, 2, 2))
    np.testing.assert_array_equal(np.asarray(other.draft.params["embed"]), embedding)
    (note,) = other.notes
    assert "differs from the target's in 2 rows" in note


def test_the_directory_of_a_training_run_stands_for_its_drafter(three, tmp_path):
    """As --out of train.run has it; before it is written, that is said."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match="run: this run has not written its drafter yet; end it with train.run --res"):
        locate(run)
    shutil.copytree(three, run / "drafter")
    assert locate(run) == run / "drafter"
    assert locate(run / "drafter") == run / "drafter"


def test_rotary_tables_in_a_draft_are_ignored(pair, three, load):
    edit_tensors(three, put("layers.1.self_attn.rotary_emb.inv_freq", 4))
    assert_same_params(load(three).params, load(pair / "three").params)


def test_bias_of_a_draft_config_is_that_of_fc_and_true_if_absent(pair, three, load):
    edit_config(three, remove=("bias",))
    assert_same_params(load(three).params, load(pair / "three").params)


def all_of(*edits):
    return lambda tensors: [edit(tensors) for edit in edits]


def move_layer(old, new):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"layers.{old}.")]:
            tensors[name.replace(f"layers.{old}.", f"layers.{new}.")] = tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (rename("layers.1.mlp.up_proj.weight", "layers.1.mlp.up.weight"), "'layers.1.mlp.up_proj.weight' is missing"),
        (remove("layers.2.self_attn.v_proj.weight"), "'layers.2.self_attn.v_proj.weight' is missing"),
        (
            all_of(rename("fc.weight", "fc.kernel"), remove("layers.0.mlp.down_proj.weight")),
            "'fc.weight' is missing|'layers.0.mlp.down_proj.weight' is missing",
        ),
        (remove("fc.bias"), "'fc.bias' is missing"),
        (remove("layers.0.post_attention_layernorm.weight"), "'layers.0.post_attention_layernorm.weight' is missing"),
        (move_layer(2, 3), "'layers.2.self_attn.q_proj.weight' is missing"),
        (put("fc.weight", 32, 32), r"'fc.weight' has shape \[32, 32\], expected \[32, 64\]"),
        (put("layers.2.mlp.down_proj.weight", 64, 32), r"'layers.2.mlp.down_proj.weight' has shape \[64, 32\]"),
        (put("embed_tokens.weight", 63, 32), r"'embed_tokens.weight' has shape \[63, 32\], expected \[64, 32\]"),
        (put("layers.0.input_layernorm.weight", 32), "unexpected tensor 'layers.0.input_layernorm.weight'"),
        (put("layers.0.self_attn.q_proj.bias", 32), "unexpected tensor 'layers.0.self_attn.q_proj.bias'"),
        (put("lm_head.weight", 64, 32), "unexpected tensor 'lm_head.weight'"),
        (put("norm.weight", 32), "unexpected tensor 'norm.weight'"),
    ],
)
def test_draft_with_a_tensor_missing_extra_or_misshapen_is_refused_by_name(three, load, edit, message):
    edit_tensors(three, edit)
    with pytest.raises(InputError, match=message):
        load(three)


def test_fc_bias_that_the_config_denies_is_refused(three, load):
    edit_config(three, bias=False)
    with pytest.raises(InputError, match="unexpected tensor 'fc.bias'"):
        load(three)


def test_draft_whose_names_all_have_a_prefix_is_refused(three, load):
    edit_tensors(three, lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)])
    with pytest.raises(InputError, match="holds no specialist"):
        load(three)


# -------------------------------------------------------------------------------------------- spans


@pytest.mark.parametrize(
    ("draft", "stored", "given", "spans"),
    [
        ("one", None, None, (1,)),
        ("one", None, (6,), (6,)),
        ("one", [3], None, (3,)),
        ("three", None, (1, 3, 4), (1, 3, 4)),
        ("three", None, (3, 3, 1), (3, 3, 1)),  # G08: 7 steps at 3 a specialist are 3 specialists
        ("three", [2, 2, 2], None, (2, 2, 2)),
        ("three", [2, 2, 2], (1, 1, 1), (1, 1, 1)),
    ],
)
def test_spans_come_from_the_caller_else_from_the_config(pair, tmp_path, load, draft, stored, given, spans):
    directory = shutil.copytree(pair / draft, tmp_path / draft)
    if stored:
        edit_config(directory, spans=stored)
    assert load(directory, given).config.spans == spans


@pytest.mark.parametrize(
    ("draft", "stored", "given", "message"),
    [
        ("three", None, None, "holds 3 specialists.*pass --spans with 3 numbers"),
        ("three", None, (3, 3), r"spans 3,3 of --spans are for 2 specialist\(s\), but the checkpoint holds 3"),
        ("three", None, (6,), r"for 1 specialist\(s\), but the checkpoint holds 3"),
        ("one", None, (3, 3), r"for 2 specialist\(s\), but the checkpoint holds 1"),
        ("three", [3, 3], None, "spans 3,3 of config.json are for 2.*holds 3"),
        ("three", None, (1, 0, 1), "1,0,1"),
        ("three", [1, 0, 1], None, r"spans \[1, 0, 1\]"),
        ("three", [1, 1.5, 1], None, r"spans \[1, 1.5, 1\]"),
        ("three", "1,1,1", None, "spans '1,1,1'"),
        ("three", [], None, "spans"),
    ],
)
def test_spans_that_are_open_or_do_not_fit_are_refused(pair, tmp_path, load, draft, stored, given, message):
    directory = shutil.copytree(pair / draft, tmp_path / draft)
    if stored is not None:
        edit_config(directory, spans=stored)
    with pytest.raises(InputError, match=message):
        load(directory, given)


def test_the_library_takes_paths_and_spans_in_every_form(models):
    for spans in ("1,2,3", (1, 2, 3), [1, 2, 3]):
        generator = Generator.from_pretrained(models / "tiny63", models / "draft3", spans=spans)
        assert generator.draft.config.spans == (1, 2, 3)
