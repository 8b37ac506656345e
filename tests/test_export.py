"""Drafters out: what is written is what was read, to the bit, in the published key layout."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert import save
from convert.checkpoint import Source
from convert.load import load_draft
from convert.save import draft_tensors, save_draft
from poss_jax import sharding
from poss_jax.config import BlockConfig, DraftConfig, RopeConfig
from poss_jax.errors import InputError
from poss_jax.specialist import draft_specs
from tests import golden_data

positive = st.floats(2.0**-20, 2.0**40)
wholes = st.integers(1, 2**20)


@st.composite
def ropes(draw, head_dim=8):
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3"]))
    extra = {} if kind == "default" else {"factor": draw(positive)}
    if kind == "llama3":
        extra |= {"low_frequency_factor": draw(positive), "high_frequency_factor": draw(positive)}
    factors = draw(st.one_of(st.just(()), st.tuples(*[positive] * (head_dim // 2))))
    return RopeConfig(kind, draw(positive), max_position=draw(wholes), frequency_factors=factors, **extra)


@st.composite
def configs(draw):
    kv_heads, group, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 8))
    block = BlockConfig(
        hidden_size=draw(wholes),
        intermediate_size=draw(wholes),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=draw(positive),
        rope=draw(ropes(head_dim)),
    )
    spans = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    return DraftConfig(block, draw(wholes), tuple(spans), fc_bias=draw(st.booleans()))


@given(configs())
def test_config_that_was_written_is_read_back_the_same(config):
    written = json.loads(json.dumps(config.to_hf()))
    assert written["spans"] == list(config.spans)
    assert DraftConfig.from_hf(written, tuple(written["spans"])) == config


@given(configs())
def test_transformers_reads_the_same_config(config):
    from transformers import LlamaConfig

    written = config.to_hf()
    if config.block.hidden_size % config.block.num_heads:  # transformers insists on it
        written["hidden_size"] *= config.block.num_heads
    theirs = LlamaConfig.from_dict(json.loads(json.dumps(written)))
    back = DraftConfig.from_hf(theirs.to_dict(), config.spans)
    assert back == DraftConfig.from_hf(written, config.spans)
    assert (theirs.bias, theirs.spans) == (config.fc_bias, list(config.spans))
    assert theirs.rope_parameters["rope_type"] == config.block.rope.kind


@pytest.mark.parametrize(
    ("rope", "scaling", "length"),
    [
        (RopeConfig(theta=5e5, max_position=64), None, 64),
        (RopeConfig("linear", factor=2.0, max_position=64), {"factor": 2.0}, 64),
        (RopeConfig("dynamic", factor=4.0, max_position=64), {"factor": 4.0}, 64),
        (
            RopeConfig("llama3", factor=8.0, max_position=8192),
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            65536,
        ),
    ],
)
def test_rotary_scaling_is_written_old_style(rope, scaling, length):
    named = scaling and {"type": rope.kind, "rope_type": rope.kind, **scaling}
    expected = {"rope_theta": rope.theta, "rope_scaling": named, "max_position_embeddings": length}
    assert rope.to_hf() == expected


# ----------------------------------------------------------------------------------------- drafters


def keep(array, spec):
    """Puts a parameter nowhere: as it is in the file."""
    return np.asarray(array)


def read(directory, spans=None):
    return load_draft(Source.open(directory), keep, spans)


def golden_draft(name):
    return read(golden_data.ROOT / "drafts" / name, golden_data.spans(name))


@pytest.fixture
def poss3():
    return golden_draft("poss3")


@pytest.mark.parametrize("name", golden_data.DRAFTS)
def test_golden_draft_survives_the_round_trip_to_the_bit(name, tmp_path):
    draft = golden_draft(name)
    save_draft(tmp_path, draft.config, draft.params)
    again = read(tmp_path)
    assert again.config == draft.config
    assert jax.tree.structure(again.params) == jax.tree.structure(draft.params)
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(draft.params), strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("name", golden_data.DRAFTS)
def test_written_file_holds_the_tensors_of_the_original(name, tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    draft = golden_draft(name)
    save_draft(tmp_path, draft.config, draft.params)
    original = golden_data.ROOT / "drafts" / name / "model.safetensors"
    for load in (load_file, torch_files.load_file):
        ours, theirs = load(tmp_path / "model.safetensors"), load(original)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            np.testing.assert_array_equal(np.asarray(ours[key]), np.asarray(theirs[key]), err_msg=key)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    config, published = (json.loads((path / "config.json").read_text()) for path in (tmp_path, original.parent))
    fields = published.keys() & config.keys()
    assert fields >= {"architectures", "model_type", "hidden_size", "rope_theta", "num_hidden_layers", "torch_dtype"}
    assert {field: config[field] for field in fields} == {field: published[field] for field in fields}
    assert config["bias"] == (name != "poss2_nobias")


def test_embedding_is_written_only_if_the_drafter_has_one(poss3, tmp_path):
    assert "embed_tokens.weight" in draft_tensors(poss3.config, poss3.params)
    without = {name: value for name, value in poss3.params.items() if name != "embed"}
    save_draft(tmp_path, poss3.config, without)
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert "embed" not in read(tmp_path).params


@pytest.mark.devices(2)
def test_arrays_of_jax_split_over_devices_are_written_the_same(poss3, tmp_path):
    specs = draft_specs(poss3.config)
    mesh = sharding.make_mesh({"tensor": 2})
    params = {name: value for name, value in poss3.params.items() if name != "embed"}
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, sharding.parameter_sharding(mesh, spec)), params, specs
    )
    assert len(placed["specialist_0"]["down"].sharding.device_set) == 2
    ours, theirs = draft_tensors(poss3.config, placed), draft_tensors(poss3.config, params)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.flags.c_contiguous
        np.testing.assert_array_equal(tensor, theirs[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_as_torch_does(poss3, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    params = dict(poss3.params)
    # Halfway between two neighbours in bfloat16, and in float16: up to even, down to even; then just beside.
    halfway = [1 + 3 * 2**-8, 1 + 2**-8, 1 + 3 * 2**-11, 1 + 2**-11, 1 + 2**-8 + 2**-20, 1e-8, -0.0, 65000.0]
    params["fc"] = dict(params["fc"], bias=np.resize(np.array(halfway, np.float32), 64))
    save_draft(tmp_path, poss3.config, params, dtype=dtype)
    written, whole = load_torch(tmp_path / "model.safetensors"), draft_tensors(poss3.config, params)
    assert written.keys() == whole.keys()
    for name, tensor in whole.items():
        expected = torch.from_numpy(tensor.copy()).to(getattr(torch, dtype))
        assert written[name].dtype == expected.dtype
        assert torch.equal(written[name].view(torch.int16), expected.view(torch.int16)), name
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_parameters_arrive_unchanged_in_float32(poss3, tmp_path, dtype):
    params = jax.tree.map(lambda array: jnp.asarray(array, dtype), poss3.params)
    for written in (dtype, "float32"):
        save_draft(tmp_path, poss3.config, params, dtype=written)
        again = read(tmp_path).params
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_values_too_large_for_the_dtype_are_refused_before_anything_is_written(poss3, tmp_path):
    params = dict(poss3.params)
    params["fc"] = dict(params["fc"], bias=np.full(64, 1e5, np.float32))
    with pytest.raises(InputError, match="'fc.bias' holds values too large for float16"):
        save_draft(tmp_path / "new", poss3.config, params, dtype="float16")
    with pytest.raises(InputError, match="'float64' is not supported; supported: float32, bfloat16, float16"):
        save_draft(tmp_path / "new", poss3.config, params, dtype="float64")
    assert not (tmp_path / "new").exists()
    save_draft(tmp_path / "new", poss3.config, params, dtype="bfloat16")
    assert load_file(tmp_path / "new" / "model.safetensors")["fc.bias"][0] == ml_dtypes.bfloat16(1e5)


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", "layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("renamed", [False, True])
def test_written_file_with_a_key_renamed_or_gone_is_refused_by_name(poss3, tmp_path, name, renamed):
    save_draft(tmp_path, poss3.config, poss3.params)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = tensors.pop(name)
    if renamed:
        tensors[name + "_"] = moved
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"tensor '{name}' is missing"):
        read(tmp_path)


def changed(params, *path, to):
    """A copy in which the leaf at `path` is another, or gone (`to` None)."""
    name, *rest = path
    value = changed(params[name], *rest, to=to) if rest else to
    kept = {key: old for key, old in params.items() if key != name}
    return kept if value is None else kept | {name: value}


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("specialist_1", "down"), None, "'specialist_1/down' of the drafter is missing"),
        (("fc", "bias"), None, "'fc/bias' of the drafter is missing"),
        (("fc", "kernel"), np.zeros((64, 64)), r"'fc/kernel' has shape \[64, 64\], expected \[128, 64\]"),
        (("embed",), np.zeros((511, 64)), r"'embed' has shape \[511, 64\], expected \[512, 64\]"),
        (("specialist_2",), {"down": np.zeros(2)}, "unexpected parameter 'specialist_2/down'"),
        (("head",), np.zeros((64, 512)), "unexpected parameter 'head'"),
    ],
)
def test_parameters_that_do_not_fit_the_config_are_refused_by_name(poss3, tmp_path, path, to, message):
    with pytest.raises(InputError, match=message):
        save_draft(tmp_path, poss3.config, changed(poss3.params, *path, to=to))
    assert list(tmp_path.iterdir()) == []


def test_bias_without_a_place_is_refused(tmp_path):
    draft = golden_draft("poss2_nobias")
    params = dict(draft.params, fc=dict(draft.params["fc"], bias=np.zeros(64, np.float32)))
    with pytest.raises(InputError, match="unexpected parameter 'fc/bias'"):
        save_draft(tmp_path, draft.config, params)


def test_notes_are_kept_and_do_not_disturb_the_config(poss3, tmp_path):
    notes = {"steps": 100, "hidden_size": "no field"}
    save_draft(tmp_path, poss3.config, poss3.params, notes=notes)
    assert json.loads((tmp_path / "config.json").read_text())["notes"] == notes
    assert read(tmp_path).config == poss3.config
    with pytest.raises(TypeError):
        save_draft(tmp_path / "new", poss3.config, poss3.params, notes={"not JSON": object()})
    assert not (tmp_path / "new").exists()


def test_config_comes_last_and_nothing_unfinished_is_left(poss3, tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr(save.os, "replace", lambda old, new: (moved.append(new.name), replace(old, new)))
    save_draft(tmp_path, poss3.config, poss3.params)
    assert moved == ["model.safetensors", "README.md", "config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_failed_save_leaves_the_old_drafter_whole(poss3, tmp_path, monkeypatch):
    save_draft(tmp_path, poss3.config, poss3.params)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save.os, "fsync", full)
    with pytest.raises(InputError, match="cannot write the drafter there .*No space left"):
        save_draft(tmp_path, poss3.config, jax.tree.map(lambda array: array + 1, poss3.params))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_place_that_is_no_directory_is_refused(poss3, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot write the drafter there"):
        save_draft(tmp_path / "file", poss3.config, poss3.params)
