"""The target against transformers, in float32, on random tiny configs in every style that is supported."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.checkpoint import Source
from convert.load import load_target, on_devices
from convert.save import target_tensors
from infer import Generator
from poss_jax import cache, llama, sharding
from poss_jax.config import FAMILIES, BlockConfig, RopeConfig, TargetConfig
from poss_jax.errors import InputError
from tests import fixtures

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "grouped queries": {},
    "one KV head": {"num_key_value_heads": 1},
    "a KV head for each query head": {"num_key_value_heads": 6},
    "explicit head_dim": {"head_dim": 16},
    "head_dim over one KV head": {"head_dim": 4, "num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True},
    "all at once": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "Mistral": {"model_type": "mistral", "sliding_window": None},
    "Mistral with a window": {"model_type": "mistral", "sliding_window": 44, "head_dim": 12},
    "Qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "Qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen2 with windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 48,
        "max_window_layers": 1,
    },
    "Qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "Qwen3 with biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "Phi-3": {"model_type": "phi3", "pad_token_id": 0},
    "Phi-3 with a window": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 50, "num_key_value_heads": 1},
}
PROMPT, TOTAL = 36, 44  # the prompt is longer than max_position_embeddings, so that dynamic scaling sets in


@functools.partial(jax.jit, static_argnums=1)
def run_prompt(params, config, tokens):
    """Logits of all rows, and caches of TOTAL slots that hold them."""
    rows = tokens.shape[1]
    lengths = jnp.full(tokens.shape, rows)
    features, new = llama.forward(params, config, tokens, jnp.arange(rows)[None], lengths, None)
    caches = tuple(
        cache.write(cache.empty(config.block, 1, TOTAL, jnp.float32), layer, jnp.zeros(1, int)) for layer in new
    )
    return llama.head(params, features)[0], caches


@functools.partial(jax.jit, static_argnums=1)
def run_token(params, config, token, caches, length):
    """Logits after one more token, through the caches."""
    features, new = llama.forward(
        params, config, token[None, None], length[:, None], length[:, None] + 1, None, caches, length
    )
    caches = tuple(cache.write(old, layer, length) for old, layer in zip(caches, new, strict=True))
    return llama.head(params, features)[0, 0], caches


def make_model(directory, options: dict, old_style: bool):
    """A random model saved by transformers; `old_style` rewrites its config as transformers 4 wrote it."""
    torch.manual_seed(0)
    options = {"model_type": "llama", **SIZES, **options}
    config = transformers.AutoConfig.for_model(**options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert "rope_parameters" in config
    if old_style:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if rope["rope_type"] == "linear":
            config["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
        path.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("old_style", [False, True], ids=["new config", "old config"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name, old_style):
    """Prompt at once, then token by token through the cache."""
    model = make_model(tmp_path, CASES[name], old_style)
    target = load_target(Source.open(str(tmp_path)), lambda array, spec: jnp.asarray(array))
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], TOTAL)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens[None, :PROMPT]), use_cache=True)
        logits, caches = run_prompt(target.params, target.config, tokens[None, :PROMPT])
        np.testing.assert_allclose(logits, theirs.logits[0], atol=1e-4)
        for index in range(PROMPT, TOTAL):
            theirs = model(torch.tensor(tokens[None, index : index + 1]), past_key_values=theirs.past_key_values)
            logits, caches = run_token(
                target.params, target.config, jnp.int32(tokens[index]), caches, jnp.array([index])
            )
            np.testing.assert_allclose(logits, theirs.logits[0, 0], atol=1e-4, err_msg=f"token {index}")


@pytest.mark.parametrize("name", ["Qwen3 with biases", "Phi-3 with a window"])
def test_trees_of_other_families_are_verified_as_transformers_generates(tmp_path, name):
    model = make_model(tmp_path / "target", CASES[name], False)
    block = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2}
    fixtures.draft(tmp_path / "draft", {**fixtures.BASE, **block, "vocab_size": 96}, 2)
    generator = Generator.from_pretrained(str(tmp_path / "target"), str(tmp_path / "draft"), spans=(2, 1))
    slides = "attention of the target slides; texts end at its window, 32 tokens"
    assert (slides in generator.notes) == ("window" in name)
    prompt, options = [3, 14, 15, 92], {"max_new_tokens": 12, "ignore_eos": True}
    (answer,) = generator.generate([prompt], levels=3, total_nodes=12, draft_top_k=4, **options)
    with torch.no_grad():
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert answer.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [None, pytest.param("tensor=2", marks=pytest.mark.devices(2))])
def test_torch_to_jax_to_torch_is_equal_to_the_bit(tmp_path, name, mesh):
    make_model(tmp_path, CASES[name], False)
    place = on_devices("float32", mesh and sharding.make_mesh(sharding.parse_mesh(mesh, ("tensor",))))
    target = load_target(Source.open(str(tmp_path)), place)
    ours, theirs = target_tensors(*target), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].flags.c_contiguous
        np.testing.assert_array_equal(ours[key].view(np.uint32), tensor.view(np.uint32), err_msg=key)


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 20}, 20),
        ({"model_type": "mistral", "sliding_window": 40}, 32),
        ({"model_type": "mistral"}, 32),
        ({"model_type": "phi3", "sliding_window": 31}, 31),
        ({"model_type": "qwen2", "sliding_window": 8}, 32),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 32),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"]},
            32,
        ),
        ({"model_type": "llama", "sliding_window": 8}, 32),
    ],
)
def test_texts_stay_within_the_window_so_that_attention_never_slides(change, context):
    assert TargetConfig.from_hf({**SIZES, **change}).context == context


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_fields_that_a_config_leaves_out_are_those_of_transformers(kind):
    given = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 80, "num_hidden_layers": 2}
    given["num_attention_heads"] = 32
    theirs = transformers.AutoConfig.for_model(kind, **given)
    ours = TargetConfig.from_hf({"model_type": kind, **given})
    assert ours.block.num_kv_heads == theirs.num_key_value_heads
    assert ours.block.norm_eps == theirs.rms_norm_eps
    assert ours.block.head_dim == getattr(theirs, "head_dim", 256 // 32)
    window = theirs.sliding_window if kind == "mistral" else None
    assert (ours.context, ours.window) == (min(theirs.max_position_embeddings, window or 2**31), window)


def test_long_prompts_are_attended_in_chunks_with_the_same_result(tmp_path):
    make_model(tmp_path, {}, False)
    target = load_target(Source.open(str(tmp_path)), lambda array, spec: jnp.asarray(array))
    tokens = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (1, 1024))
    positions = jnp.arange(1024)[None]
    forward = jax.jit(llama.forward, static_argnums=1)
    whole, _ = forward(target.params, target.config, tokens, positions, positions, None)
    first, _ = forward(target.params, target.config, tokens[:, :500], positions[:, :500], positions[:, :500], None)
    np.testing.assert_allclose(whole[:, :500], first, atol=1e-4)


def test_frequency_factors_divide_the_inverse_frequencies():
    """A GGUF file gives llama3 scaling as factors; the rotation is the same."""
    from poss_jax.rotary import rotary

    scaled = RopeConfig.from_hf({"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 128})
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    positions = jnp.arange(40)[None]
    cos, sin = rotary(scaled, 16, positions, positions)
    angle = np.arctan2(sin[0, 1], cos[0, 1])  # at position 1 the angles are the inverse frequencies
    factors = RopeConfig(theta=500000.0, frequency_factors=tuple(plain / angle))
    np.testing.assert_allclose(rotary(factors, 16, positions, positions)[0], cos, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "linear rotary scaling lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rotary type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "layers of type 'full_attention'"),
        ({"rope_frequency_factors": [2.0]}, "rope_frequency_factors has 1 numbers; head_dim 8 needs 4"),
        ({"num_attention_heads": 64, "num_key_value_heads": 1}, "head_dim 0 is no size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": "2"}, "max_window_layers '2'"),
        ({"model_type": "qwen2", "sliding_window": 8, "layer_types": 5}, "layer_types 5, expected a list"),
        ({"rope_frequency_factors": 5}, "rope_frequency_factors 5, expected a list"),
        ({"rope_frequency_factors": ["x"]}, "rope_frequency_factors 'x', expected a positive number"),
        ({"model_type": "gemma2"}, "'gemma2' is not supported; supported: llama, mistral, phi3, qwen2, qwen3"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixtures of experts .* num_local_experts 8"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixtures of experts .* num_experts 128"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": None}, "the config lacks 'hidden_size'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    ],
)
def test_configs_that_need_another_computation_are_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        TargetConfig.from_hf({**SIZES, **change})


def test_context_is_stretched_by_linear_and_dynamic_scaling_only():
    def context(scaling):
        return TargetConfig.from_hf({**SIZES, "rope_scaling": scaling}).context

    assert context(None) == 32
    assert context({"rope_type": "linear", "factor": 4.0}) == 128
    assert context({"rope_type": "dynamic", "factor": 2.0}) == 64
    assert context(LLAMA3) == 32


def test_head_dim_defaults_to_hidden_over_heads():
    assert BlockConfig.from_hf(SIZES).head_dim == 8
    assert BlockConfig.from_hf({**SIZES, "head_dim": None}).head_dim == 8
    assert BlockConfig.from_hf({**SIZES, "head_dim": 16}).head_dim == 16
