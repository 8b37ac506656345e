"""Drafters out, in the key layout that EAGLE, HASS and PosS publish and that `load.load_draft` reads.

A drafter is a directory of `config.json` (`DraftConfig.to_hf`), `model.safetensors` and a model card, `README.md`,
which can be uploaded to the hub as it is. Matrices are [out, in], as torch has them:

    fc.weight                                      [h, 2h]; embedding first, then feature
    fc.bias                                        [h]; only if the config's `bias` is true
    layers.N.self_attn.{q,k,v,o}_proj.weight       specialist N = 0, 1, ...
    layers.N.self_attn.{q,k,v}_proj.bias           only if the config's `qkv_bias` is true
    layers.N.mlp.{gate,up,down}_proj.weight
    layers.N.post_attention_layernorm.weight       [h]; there is no norm in front of the attention
    embed_tokens.weight                            [v, h]; only if the drafter has an embedding of its own

Head and final norm are the target's and not in the file. Published configs lack `spans`; ours hold them.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from convert.card import model_card
from convert.engines import for_engine
from convert.names import Entry, draft_entries, leaves_of, target_entries
from convert.stored import common_dtype
from poss_jax.config import DraftConfig, TargetConfig
from poss_jax.errors import InputError

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def draft_tensors(config: DraftConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters of `Drafter` (and `embed` if they hold one) as contiguous tensors under their published names.

    `params`: jax or numpy arrays, sharded over the devices of this process or not; their dtype is kept. Raises
    InputError naming the parameter that is missing, too much or of another shape.
    """
    return _stored_tensors(draft_entries(config, embed="embed" in params), params, "drafter")


def target_tensors(config: TargetConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same of a target, under the names of its family; a head that is tied is left out, as transformers does."""
    return _stored_tensors(target_entries(config), params, "target")


def _stored_tensors(entries: Sequence[Entry], params: dict[str, Any], what: str) -> dict[str, np.ndarray]:
    leaves = leaves_of(jax.device_get(params))
    _check(entries, leaves, what)
    return {name: tensor for entry in entries for name, tensor in as_stored(entry, leaves[entry.path]).items()}


def as_stored(entry: Entry, parameter: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that a parameter lies in, contiguous, by name."""
    parts = entry.layout.split(parameter)
    if len(entry.names) < len(parts):
        parts = (np.concatenate(parts),)
    return {name: np.ascontiguousarray(part) for name, part in zip(entry.names, parts, strict=True)}


def _check(entries: Sequence[Entry], leaves: dict[tuple, Any], what: str) -> None:
    expected = {"/".join(map(str, entry.path)): entry.spec.shape for entry in entries}
    found = {"/".join(map(str, path)): leaf for path, leaf in leaves.items()}
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"parameter {name!r} of the {what} is missing")
        if found[name].shape != shape:
            raise InputError(f"parameter {name!r} has shape {list(found[name].shape)}, expected {list(shape)}")
    for name in found.keys() - expected:
        raise InputError(f"unexpected parameter {name!r}; the {what}'s config has no place for it")


def save_draft(
    directory: str | Path,
    config: DraftConfig,
    params: dict[str, Any],
    *,
    dtype: str = "float32",
    notes: dict[str, Any] | None = None,
    layout: str = "poss",
) -> None:
    """Writes a drafter (see `draft_tensors` for `params`) that `load.load_draft` reads back, spans included.

    `dtype`: "float32", "bfloat16" or "float16" of the file, to which values are rounded to nearest even. `notes`:
    whatever JSON can hold about the drafter's origin, kept under "notes" in config.json and told in the model card.
    `layout`: one of `engines.FORMATS`; other readers than ours do not know spans. All files are written under other
    names first and then moved into place, config.json last. With several processes one of them calls this, with
    whole arrays. Raises InputError for parameters that do not fit the config, the dtype or the layout, and for a
    directory that cannot be written to.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    contents, tensors = for_engine(layout, config, draft_tensors(config, params))
    tensors = {name: _cast(name, tensor, dtype) for name, tensor in tensors.items()}
    contents |= {"torch_dtype": dtype} | ({"notes": notes} if notes else {})
    text = json.dumps(contents, indent=2) + "\n"
    card = model_card(config, sum(tensor.size for tensor in tensors.values()), notes)
    _write_files(
        Path(directory).expanduser(),
        {
            "model.safetensors": lambda path: path.write_bytes(save(tensors, {"format": "pt"})),
            "README.md": lambda path: path.write_text(card, encoding="utf-8"),
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


def stored_dtype(params: dict[str, Any]) -> str:
    """The narrowest of `DTYPES` that holds every value as it is stored (float64 is rounded to float32)."""
    found = common_dtype(leaf.dtype for leaf in jax.tree.leaves(params)).name
    return found if found in DTYPES else "float32"
