"""Hugging Face checkpoints in: targets and drafters, from names and shapes that must all fit."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from convert.checkpoint import Source
from convert.layout import fuse_gate_up, fuse_query_key_value, split_attention_output
from poss_jax.config import BlockConfig, DraftConfig, TargetConfig, format_spans
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec, parameter_specs
from poss_jax.specialist import draft_specs

# Tables that old checkpoints hold although they follow from the config.
COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")

Place = Callable[[np.ndarray, ParameterSpec], jax.Array]


class Loaded(NamedTuple):
    """A checkpoint in our form: a `TargetConfig` or `DraftConfig`, and the parameters."""

    config: Any
    params: dict[str, Any]


class Tensors:
    """Takes tensors out of a checkpoint by name, and knows at the end that each was taken exactly once."""

    def __init__(self, source: Mapping[str, np.ndarray], where: Path):
        self._source = source
        self._where = where
        self._left = {name for name in source if not COMPUTED.match(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Raises InputError if the tensor is missing or has another shape."""
        if name not in self._left:
            raise InputError(f"{self._where}: tensor {name!r} is missing")
        self._left.remove(name)
        tensor = self._source[name]
        if tensor.shape != shape:
            raise InputError(f"{self._where}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype.name != "bfloat16":
            raise InputError(f"{self._where}: tensor {name!r} holds {tensor.dtype}, expected floating point numbers")
        return tensor

    def drop(self, name: str) -> None:
        """Leaves a tensor out on purpose."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises InputError if any tensor was not taken."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"{self._where}: unexpected tensor {names[0]!r}{more}; the config has no place for it")


def load_target(source: Source, place: Place) -> Loaded:
    """A target; see `llama.parameter_specs` for the parameters.

    Raises InputError naming the file and the field or tensor that does not fit.
    """
    with _naming(source):
        config = TargetConfig.from_hf(source.config)
    if config.tie_embeddings and _has_own_head(source.tensors):
        config = dataclasses.replace(config, tie_embeddings=False)
    tensors = Tensors(source.tensors, source.path)
    params = _target_params(tensors, config, place)
    tensors.finish()
    return Loaded(config, params)


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Puts the checkpoint's path in front of what is wrong with its config."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source.path}: {error}") from None


def _has_own_head(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether a config that says tied is contradicted by a stored head with other values; then that head is used,
    as transformers does."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    return head in tensors and embed in tensors and not np.array_equal(tensors[embed], tensors[head])


def _target_params(tensors: Tensors, config: TargetConfig, place: Place) -> dict[str, Any]:
    specs = parameter_specs(config)
    hidden, vocab = config.block.hidden_size, config.vocab_size
    params = {
        "embed": place(tensors.take("model.embed_tokens.weight", vocab, hidden), specs["embed"]),
        "final_norm": place(tensors.take("model.norm.weight", hidden), specs["final_norm"]),
        "layers": [],
    }
    if config.tie_embeddings:
        tensors.drop("lm_head.weight")  # some files hold the tied matrix twice
    else:
        params["head"] = place(tensors.take("lm_head.weight", vocab, hidden).T, specs["head"])
    for index, layer_specs in enumerate(specs["layers"]):
        prefix = f"model.layers.{index}."
        layer = _block(tensors, prefix, config.block, config.attention_bias, config.mlp_bias)
        layer["attention_norm"] = tensors.take(prefix + "input_layernorm.weight", hidden)
        params["layers"].append({key: place(array, layer_specs[key]) for key, array in layer.items()})
    return params


def _block(
    tensors: Tensors, prefix: str, block: BlockConfig, attention_bias: bool = False, mlp_bias: bool = False
) -> dict[str, np.ndarray]:
    """The tensors that a target's layer and a specialist have in common."""
    hidden, inner, size = block.hidden_size, block.intermediate_size, block.head_dim
    queries, keys = block.num_heads * size, block.num_kv_heads * size

    def weight(name: str, *shape: int) -> np.ndarray:
        return tensors.take(f"{prefix}{name}.weight", *shape)

    def bias(name: str, size: int) -> np.ndarray:
        return tensors.take(f"{prefix}{name}.bias", size)

    params = {
        "query_key_value": fuse_query_key_value(
            block,
            weight("self_attn.q_proj", queries, hidden),
            weight("self_attn.k_proj", keys, hidden),
            weight("self_attn.v_proj", keys, hidden),
        ),
        "attention_output": split_attention_output(block, weight("self_attn.o_proj", hidden, queries)),
        "gate_up": fuse_gate_up(weight("mlp.gate_proj", inner, hidden), weight("mlp.up_proj", inner, hidden)),
        "down": weight("mlp.down_proj", hidden, inner).T,
        "mlp_norm": weight("post_attention_layernorm", hidden),
    }
    if attention_bias:
        params["query_key_value_bias"] = fuse_query_key_value(
            block,
            bias("self_attn.q_proj", queries),
            bias("self_attn.k_proj", keys),
            bias("self_attn.v_proj", keys),
        )
        params["attention_output_bias"] = bias("self_attn.o_proj", hidden)
    if mlp_bias:
        params["gate_up_bias"] = fuse_gate_up(bias("mlp.gate_proj", inner), bias("mlp.up_proj", inner))
        params["down_bias"] = bias("mlp.down_proj", hidden)
    return params


def load_draft(source: Source, place: Place, spans: Sequence[int] | None = None) -> Loaded:
    """A drafter in the published key layout: parameters of `Drafter`, and `embed` if the checkpoint holds one.

    `spans` come from the caller, else from `spans` in the config; a single specialist is one span. Raises
    InputError where that leaves them open or contradicts the number of specialists, and for any tensor that is
    missing, too much or of another shape.
    """
    spans = _spans(source, spans)
    with _naming(source):
        config = DraftConfig.from_hf(source.config, spans)
    tensors = Tensors(source.tensors, source.path)
    params = _draft_params(tensors, config, place)
    tensors.finish()
    return Loaded(config, params)


def count_specialists(source: Source) -> int:
    """How many specialists a drafter's checkpoint holds. Raises InputError if there is none."""
    matches = [re.match(r"layers\.(\d+)\.", name) for name in source.tensors]
    specialists = len({match.group(1) for match in matches if match})
    if not specialists:
        raise InputError(f"{source.path}: holds no specialist; tensors named layers.0.* are missing")
    return specialists


def _spans(source: Source, given: Sequence[int] | None) -> tuple[int, ...]:
    path, specialists = source.path, count_specialists(source)
    spans = _stored_spans(source) if given is None else tuple(given)
    if spans is None and specialists == 1:
        return (1,)
    if spans is None:
        raise InputError(
            f"{path}: holds {specialists} specialists and its config does not say which draft positions each "
            f"serves; pass --spans with {specialists} numbers, such as --spans {format_spans((2,) * specialists)}"
        )
    if len(spans) != specialists:
        origin = "config.json" if given is None else "--spans"
        raise InputError(
            f"{path}: spans {format_spans(spans)} of {origin} are for {len(spans)} specialist(s), "
            f"but the checkpoint holds {specialists}"
        )
    return spans


def _stored_spans(source: Source) -> tuple[int, ...] | None:
    spans = source.config.get("spans")
    if spans is None:
        return None
    if not isinstance(spans, list) or not spans or not all(type(n) is int and n > 0 for n in spans):
        raise InputError(f"{source.path}: spans {spans!r} in config.json must be a list of whole numbers from 1 up")
    return tuple(spans)


def _draft_params(tensors: Tensors, config: DraftConfig, place: Place) -> dict[str, Any]:
    hidden = config.block.hidden_size
    params: dict[str, Any] = {"fc": {"kernel": tensors.take("fc.weight", hidden, 2 * hidden).T}}
    if config.fc_bias:
        params["fc"]["bias"] = tensors.take("fc.bias", hidden)
    for index in range(len(config.spans)):
        params[f"specialist_{index}"] = _block(tensors, f"layers.{index}.", config.block)
    placed = jax.tree.map(place, params, draft_specs(config))
    if "embed_tokens.weight" in tensors:
        spec = ParameterSpec((config.vocab_size, hidden), ("vocab", "hidden"))
        placed["embed"] = place(tensors.take("embed_tokens.weight", *spec.shape), spec)
    return placed
