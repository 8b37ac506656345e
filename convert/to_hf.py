"""Drafters out, in the key layout that EAGLE, HASS and PosS publish and that `from_hf.load_draft` reads.

A directory of `config.json` (`DraftConfig.to_hf`) and `model.safetensors`. Matrices are [out, in], as torch has them:

    fc.weight                                      [h, 2h]; embedding first, then feature
    fc.bias                                        [h]; only if the config's `bias` is true
    layers.N.self_attn.{q,k,v,o}_proj.weight       specialist N = 0, 1, ...
    layers.N.mlp.{gate,up,down}_proj.weight
    layers.N.post_attention_layernorm.weight       [h]; there is no norm in front of the attention
    embed_tokens.weight                            [v, h]; only if the drafter has an embedding of its own

Head and final norm are the target's and not in the file. Published configs lack `spans`; ours hold them.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from convert.layout import join_attention_output, unfuse_gate_up, unfuse_query_key_value
from poss_jax.config import BlockConfig, DraftConfig
from poss_jax.errors import InputError
from poss_jax.specialist import draft_specs

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def draft_tensors(config: DraftConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters of `Drafter` (and `embed` if they hold one) as contiguous tensors under their published names.

    `params`: jax or numpy arrays, sharded over the devices of this process or not; their dtype is kept. Raises
    InputError naming the parameter that is missing, too much or of another shape.
    """
    _check(config, params)
    params = jax.device_get(params)
    tensors = {"fc.weight": params["fc"]["kernel"].T}
    if config.fc_bias:
        tensors["fc.bias"] = params["fc"]["bias"]
    for index in range(len(config.spans)):
        block = _block_tensors(config.block, params[f"specialist_{index}"])
        tensors |= {f"layers.{index}.{name}.weight": tensor for name, tensor in block.items()}
    if "embed" in params:
        tensors["embed_tokens.weight"] = params["embed"]
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _block_tensors(block: BlockConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    query, key, value = unfuse_query_key_value(block, params["query_key_value"])
    gate, up = unfuse_gate_up(params["gate_up"])
    return {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": join_attention_output(params["attention_output"]),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": params["down"].T,
        "post_attention_layernorm": params["mlp_norm"],
    }


def _check(config: DraftConfig, params: dict[str, Any]) -> None:
    expected = {name: spec.shape for name, spec in _by_name(draft_specs(config)).items()}
    if "embed" in params:
        expected["embed"] = (config.vocab_size, config.block.hidden_size)
    given = {name: tuple(np.shape(array)) for name, array in _by_name(params).items()}
    for name in sorted(expected.keys() | given.keys()):
        if name not in given:
            raise InputError(f"parameter {name!r} of the drafter is missing")
        if name not in expected:
            raise InputError(f"unexpected parameter {name!r}; the drafter's config has no place for it")
        if given[name] != expected[name]:
            raise InputError(f"parameter {name!r} has shape {list(given[name])}, expected {list(expected[name])}")


def _by_name(tree: dict[str, Any]) -> dict[str, Any]:
    """{"fc": {"bias": x}} gives {"fc/bias": x}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def save_draft(
    directory: str | Path,
    config: DraftConfig,
    params: dict[str, Any],
    *,
    dtype: str = "float32",
    notes: dict[str, Any] | None = None,
) -> None:
    """Writes a drafter (see `draft_tensors` for `params`) that `from_hf.load_draft` reads back, spans included.

    `dtype`: "float32", "bfloat16" or "float16" of the file, to which values are rounded to nearest even. `notes`:
    whatever JSON can hold about the drafter's origin, kept under "notes" in config.json. Both files are written under
    other names first and then moved into place, config.json last. With several processes one of them calls this, with
    whole arrays. Raises InputError for parameters that do not fit the config or the dtype, and for a directory that
    cannot be written to.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    tensors = {name: _cast(name, tensor, dtype) for name, tensor in draft_tensors(config, params).items()}
    contents = config.to_hf() | {"torch_dtype": dtype} | ({"notes": notes} if notes else {})
    text = json.dumps(contents, indent=2) + "\n"
    _write_files(
        Path(directory).expanduser(),
        {
            "model.safetensors": lambda path: path.write_bytes(save(tensors, {"format": "pt"})),
            "config.json": lambda path: path.write_text(text, encoding="utf-8"),
        },
    )


def _cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # said better below
        cast = tensor.astype(DTYPES[dtype])
    if (np.isinf(cast) & np.isfinite(tensor)).any():
        raise InputError(f"tensor {name!r} holds values too large for {dtype}; write it as float32 or bfloat16")
    return cast


def _write_files(directory: Path, writers: dict[str, Callable[[Path], Any]]) -> None:
    """Writes all files beside their places, then moves them there in this order: none is ever seen in part."""
    unfinished = {directory / f".{name}.unfinished": directory / name for name in writers}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, write in zip(unfinished, writers.values(), strict=True):
            write(path)
            with open(path, "rb") as file:  # the data must not reach the disk after its name does
                os.fsync(file.fileno())
        for path, place in unfinished.items():
            os.replace(path, place)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{directory}: cannot write the drafter there ({error})") from error
    finally:
        for path in unfinished:
            with contextlib.suppress(OSError):
                path.unlink()
