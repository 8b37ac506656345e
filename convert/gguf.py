"""Read a GGUF file of the Llama architecture as if it were a Hugging Face checkpoint."""

import copy
import functools
import os
import re

import gguf
import numpy as np
from gguf.quants import dequantize

from poss_jax.errors import InputError

# GGUF tensor name (layer number as {}) -> Hugging Face name, and the suffixes the pair may carry.
_WEIGHT = (".weight",)
_WEIGHT_OR_BIAS = (".weight", ".bias")
_TENSOR_NAMES = {
    "token_embd": ("model.embed_tokens", _WEIGHT),
    "output_norm": ("model.norm", _WEIGHT),
    "output": ("lm_head", _WEIGHT),
    "blk.{}.attn_norm": ("model.layers.{}.input_layernorm", _WEIGHT),
    "blk.{}.attn_q": ("model.layers.{}.self_attn.q_proj", _WEIGHT_OR_BIAS),
    "blk.{}.attn_k": ("model.layers.{}.self_attn.k_proj", _WEIGHT_OR_BIAS),
    "blk.{}.attn_v": ("model.layers.{}.self_attn.v_proj", _WEIGHT_OR_BIAS),
    "blk.{}.attn_output": ("model.layers.{}.self_attn.o_proj", _WEIGHT_OR_BIAS),
    "blk.{}.ffn_norm": ("model.layers.{}.post_attention_layernorm", _WEIGHT),
    "blk.{}.ffn_gate": ("model.layers.{}.mlp.gate_proj", _WEIGHT_OR_BIAS),
    "blk.{}.ffn_up": ("model.layers.{}.mlp.up_proj", _WEIGHT_OR_BIAS),
    "blk.{}.ffn_down": ("model.layers.{}.mlp.down_proj", _WEIGHT_OR_BIAS),
}
_ROPE_FREQUENCIES = "rope_freqs.weight"
# Old converters stored the inverse frequencies of each layer; they follow from rope_theta.
_REDUNDANT_TENSOR = re.compile(r"blk\.\d+\.(attn_rot_embd|attn\.rope\.freqs)(\.weight)?")
_EXPERT_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate_inp|\w+_exps|\w+_shexp|(gate|up|down)\.\d+)\.\w+")

# Metadata that changes the computation in ways the Hugging Face Llama model does not know:
# key under "llama." -> the values that leave the computation as it is.
_NEUTRAL_VALUES = {
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}
_NOT_GIVEN = object()


def hugging_face_name(name):
    """Translate the name of a GGUF tensor of the Llama architecture.

    Args:
        name: str, for example "blk.3.attn_q.weight".

    Returns:
        str, for example "model.layers.3.self_attn.q_proj.weight", or None where no such tensor is known.
    """
    stem, dot, suffix = name.rpartition(".")
    layer = re.match(r"blk\.(0|[1-9]\d*)\.", stem)
    pattern = stem if layer is None else f"blk.{{}}.{stem[layer.end() :]}"
    target, suffixes = _TENSOR_NAMES.get(pattern, ("", ()))
    if dot + suffix not in suffixes or "{}" in stem:
        return None
    return (target if layer is None else target.format(layer.group(1))) + dot + suffix


class GGUFCheckpoint:
    """A GGUF file of the Llama architecture, seen as a Hugging Face checkpoint.

    The object is a read-only mapping from Hugging Face tensor names to numpy arrays, float32, in the
    [out_features, in_features] layout and in the row order of the Hugging Face rotary embedding. Arrays are
    dequantised when they are asked for and not kept, so that one tensor at a time is in memory.

    Args:
        path: str or path-like, the GGUF file.

    Raises:
        InputError: the file cannot be opened, is no GGUF file, is truncated, is one part of a split model,
            holds another architecture than "llama", a mixture of experts, a kind of rotary scaling that is
            not supported, a tensor that a Llama model does not have, lacks one that it must have, or holds
            a quantisation type that the gguf package cannot dequantise.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._reader = _open_reader(self.path)
        self._require_llama()
        self._tensors = self._index_tensors()
        self._config = self._read_config()
        self._require_complete_layers()

    @property
    def config(self):
        """dict in the style of config.json of a Hugging Face Llama model (a copy).

        Beyond the Hugging Face keys it has "rope_frequency_factors" (list of head_dim / 2 floats, which
        divide the inverse frequencies of the rotary embedding) where the file has such factors.
        """
        return copy.deepcopy(self._config)

    def metadata(self, key, default=_NOT_GIVEN):
        """Read one metadata value of the file.

        Args:
            key: str, the full key, for example "tokenizer.ggml.model".
            default: what to return when the file has no such key.

        Returns:
            str, int, float, bool, or a list of one of these.

        Raises:
            InputError: the key is absent and no default was given, or its text is not UTF-8.
        """
        field = self._reader.fields.get(key)
        if field is None and default is _NOT_GIVEN:
            raise self._error(f"has no metadata key {key}; convert the model again with a current llama.cpp")
        if field is None:
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise self._error(f"metadata key {key} is not UTF-8 text; download the file again") from error

    def keys(self):
        """Tensor names in Hugging Face style, in the order of the file."""
        return self._tensors.keys()

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)

    def __contains__(self, name):
        return name in self._tensors

    def shape(self, name):
        """Shape (tuple of int) of the array that `self[name]` returns, without dequantising it.

        Raises:
            InputError: the file has no such tensor.
        """
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def stored(self, name):
        """A tensor left in the file: `shape` and `dtype`, and `[slices]` that dequantises it and takes a part.

        Raises:
            InputError: the file has no such tensor.
        """
        return _StoredTensor(self, name)

    def stored_type(self, name):
        """Name (str, for example "Q4_1") of the type in which the file holds a tensor.

        Raises:
            InputError: the file has no such tensor.
        """
        return self._tensor(name).tensor_type.name

    def __getitem__(self, name):
        """Read one tensor.

        Args:
            name: str, a Hugging Face tensor name.

        Returns:
            numpy array, float32, of shape [out_features, in_features] for a linear layer,
            [vocab_size, hidden_size] for the embedding and [size] for a norm or a bias.

        Raises:
            InputError: the file has no such tensor.
        """
        values = self._dequantise(self._tensor(name))
        heads = self._rotary_heads(name)
        if heads is None:
            return values
        if values.shape[0] != heads * self._config["head_dim"]:
            raise self._error(
                f"tensor {name} has {values.shape[0]} rows, but {heads} heads of "
                f"{self._config['head_dim']} are declared; convert the model again"
            )
        return _undo_rotary_permutation(values, heads)

    def _error(self, text):
        # One line, even where a damaged file has line ends in a name.
        return InputError(f"{self.path}: {' '.join(text.splitlines())}")

    def _require_llama(self):
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise self._error(
                f"holds a model of architecture {architecture!r}; only 'llama' is supported, "
                "use a Llama-architecture GGUF"
            )
        parts = self.metadata("split.count", 1)
        if parts > 1:
            raise self._error(f"is one of {parts} parts of a split model; merge them with llama-gguf-split --merge")
        if self._reader.byte_order != "I":
            raise self._error("is in the byte order of another kind of machine; convert it with gguf-convert-endian")
        if self.metadata("llama.expert_count", 0) > 0:
            raise self._error(
                "holds a mixture of experts (llama.expert_count "
                f"{self.metadata('llama.expert_count')}); use a dense Llama model"
            )

    def _index_tensors(self):
        tensors = {}
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FREQUENCIES or _REDUNDANT_TENSOR.fullmatch(tensor.name):
                continue
            if _EXPERT_TENSOR.fullmatch(tensor.name):
                raise self._error(f"holds a mixture of experts (tensor {tensor.name}); use a dense Llama model")
            name = hugging_face_name(tensor.name)
            if name is None:
                raise self._error(
                    f"tensor {tensor.name} does not belong to a Llama model; use a GGUF "
                    "converted from a plain Llama model"
                )
            self._require_dequantisable(tensor)
            tensors[name] = tensor
        return tensors

    def _require_dequantisable(self, tensor):
        # All types are checked on opening: finding out after half of a model is loaded wastes minutes.
        if not _can_dequantise(tensor.tensor_type):
            raise self._error(
                f"tensor {tensor.name} is of type {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise; requantise the model, for example to Q8_0 or F16"
            )

    def _require_complete_layers(self):
        layers = self._config["num_hidden_layers"]
        for pattern, (target, _) in _TENSOR_NAMES.items():
            if pattern == "output":
                continue
            for layer in range(layers if "{}" in pattern else 1):
                if target.format(layer) + ".weight" not in self._tensors:
                    raise self._error(
                        f"has no tensor {pattern.format(layer)}.weight; the file is incomplete, download it again"
                    )
        for name in self._tensors:
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer is not None and int(layer.group(1)) >= layers:
                raise self._error(
                    f"tensor {name} is beyond the {layers} layers that llama.block_count "
                    "declares; convert the model again"
                )

    def _read_config(self):
        heads = self._size("attention.head_count")
        hidden_size = self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden_size // heads)
        self._require_plain_attention(head_dim)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": _shortest_float(self.metadata("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest_float(self.metadata("llama.rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": any(re.search(r"self_attn\..*\.bias", name) for name in self._tensors),
            "mlp_bias": any(re.search(r"mlp\..*\.bias", name) for name in self._tensors),
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._end_tokens(),
            "torch_dtype": "float32",
        }
        factors = self._rope_frequency_factors(head_dim)
        return config if factors is None else config | {"rope_frequency_factors": factors}

    def _size(self, key, default=_NOT_GIVEN):
        # GGUF may give a size once a layer, where Hugging Face Llama has one for all layers.
        value = self.metadata(f"llama.{key}", default)
        sizes = set(value) if isinstance(value, list) else {value}
        if len(sizes) != 1:
            raise self._error(
                f"llama.{key} differs between layers ({value}), which is not supported; use a "
                "model whose layers are alike"
            )
        size = sizes.pop()
        if not isinstance(size, int) or size < 1:
            raise self._error(f"llama.{key} is {size!r}, not a positive number; convert the model again")
        return size

    def _require_plain_attention(self, head_dim):
        for key in ("attention.value_length", "rope.dimension_count"):
            value = self.metadata(f"llama.{key}", head_dim)
            if value != head_dim:
                raise self._error(
                    f"llama.{key} is {value} where a head has {head_dim} dimensions, which is "
                    "not supported; use a model that has one size for both"
                )
        for key, neutral in _NEUTRAL_VALUES.items():
            value = self.metadata(f"llama.{key}", neutral[0])
            if value not in neutral:
                raise self._error(f"llama.{key} is {value}, which is not supported; use a plain Llama model")

    def _rope_scaling(self):
        # As in llama.cpp: a factor without a type means linear scaling; rope.scale_linear is its old name.
        kind = self.metadata("llama.rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise self._error(
                f"rope scaling type {kind!r} is not supported, only 'linear' and 'none' are; use a model without it"
            )
        factor = self.metadata("llama.rope.scaling.factor", self.metadata("llama.rope.scale_linear", 1.0))
        if kind == "none" or factor in (0.0, 1.0):
            return None
        return {"rope_type": "linear", "factor": _shortest_float(factor)}

    def _rope_frequency_factors(self, head_dim):
        tensor = next((tensor for tensor in self._reader.tensors if tensor.name == _ROPE_FREQUENCIES), None)
        if tensor is None:
            return None
        self._require_dequantisable(tensor)
        factors = self._dequantise(tensor).ravel()
        if factors.size != head_dim // 2:
            raise self._error(
                f"tensor {_ROPE_FREQUENCIES} has {factors.size} values where a head of "
                f"{head_dim} dimensions needs {head_dim // 2}; convert the model again"
            )
        return factors.tolist()

    def _end_tokens(self):
        end_of_sequence = self.metadata("tokenizer.ggml.eos_token_id", None)
        end_of_turn = self.metadata("tokenizer.ggml.eot_token_id", None)
        if end_of_turn is None:
            return end_of_sequence
        return list(dict.fromkeys(token for token in (end_of_sequence, end_of_turn) if token is not None))

    def _tensor(self, name):
        if name not in self._tensors:
            raise self._error(f"has no tensor {name}; use a file of the model that was asked for")
        return self._tensors[name]

    def _dequantise(self, tensor):
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            # A copy, for a view would keep the caller tied to the mapped file.
            return np.array(tensor.data)
        return np.asarray(dequantize(tensor.data, tensor.tensor_type))

    def _rotary_heads(self, name):
        if ".self_attn.q_proj." in name:
            return self._config["num_attention_heads"]
        if ".self_attn.k_proj." in name:
            return self._config["num_key_value_heads"]
        return None


class _StoredTensor:
    """One tensor of a checkpoint. It is dequantised once, when a part of it is first asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, checkpoint, name):
        self.shape = checkpoint.shape(name)
        self._checkpoint, self._name = checkpoint, name

    @functools.cached_property
    def _values(self):
        return self._checkpoint[self._name]

    def __getitem__(self, index):
        return self._values[index]


class _StrictReader(gguf.GGUFReader):
    """A reader that stops at the end of the file.

    Past the end the reader of the gguf package goes on with empty values, so that one damaged count can keep
    it busy until memory is full.
    """

    def _get(self, offset, dtype, count=1, *arguments, **named):
        if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size:
            raise ValueError(f"the file ends at byte {self.data.size}, inside what it declares")
        return super()._get(offset, dtype, count, *arguments, **named)


def _open_reader(path):
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    if magic != b"GGUF":
        raise InputError(f"{path}: is not a GGUF file; pass a .gguf file or a Hugging Face directory")
    try:
        return _StrictReader(path)
    except (ValueError, LookupError, OSError, OverflowError, MemoryError) as error:
        raise InputError(f"{path}: {_reading_failure(error)}") from error


def _reading_failure(error):
    # The reader has no exceptions of its own: running out of bytes shows as whatever numpy raises.
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "GGMLQuantizationType" in detail:
        return f"holds a quantisation type unknown to the gguf package ({detail}); requantise it to Q8_0"
    if "appears to be version" in detail:
        return f"is of a GGUF version that the gguf package cannot read ({detail}); convert the model again"
    return f"is truncated or damaged ({detail}); download the file again"


@functools.cache
def _can_dequantise(tensor_type):
    # The gguf package has no question for this, so one block of zeros is tried.
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def _undo_rotary_permutation(values, heads):
    """Put the rows of each head back from interleaved pairs (GGUF) to two halves (Hugging Face).

    Args:
        values: numpy array [heads * head_dim, ...].
        heads: int.

    Returns:
        numpy array of the same shape and dtype.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _shortest_float(value):
    # GGUF has float32 where config.json has decimals: 1e-5 must not become 9.999999747378752e-06.
    return float(str(np.float32(value)))
