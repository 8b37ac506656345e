"""From names of checkpoints to weights on devices."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from convert.checkpoint import Source, read_json
from convert.load import Loaded, Place, load_draft, load_target, on_devices, target_config
from convert.tokenizer import tokenizer_for
from infer.draft_vocab import read_draft_vocab, trimmed_head
from poss_jax import sharding
from poss_jax.config import parse_spans
from poss_jax.errors import InputError

DTYPES = ("float32", "bfloat16")


def precise(dtype: str) -> contextlib.AbstractContextManager:
    """Full float32 products where float32 was asked for: GPUs and TPUs default to fewer bits."""
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


@dataclasses.dataclass(frozen=True)
class Models:
    """A target, perhaps a drafter for it, and what belongs to them.

    tokenizer: a transformers tokenizer, or None. eos_ids: every id that ends a text. notes: what a user may want to
    know about the checkpoints, a line each.
    """

    target: Loaded
    draft: Loaded | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    dtype: str
    notes: tuple[str, ...] = ()


def load_models(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    spans: Sequence[int] | str | None = None,
    dtype: str = "float32",
    mesh: str | None = None,
    tokenizer: str | Path | None = None,
    draft_vocab: str | Path | None = None,
) -> Models:
    """See `Generator.from_pretrained`. Every file is opened, and so checked, before any weight is read."""
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    spans = parse_spans(spans) if isinstance(spans, str) else spans
    place, notes = _place_on(mesh, jnp.dtype(dtype))
    source = Source.open(target)
    draft_source = None if draft is None else Source.open(draft)
    if draft_vocab is not None:
        if draft is None:
            raise InputError(f"draft vocabulary {draft_vocab}: there is no drafter to use it")
        kept = read_draft_vocab(draft_vocab, target_config(source).vocab_size)
    text = tokenizer_for(source, tokenizer)
    eos_ids = find_eos_ids(source, text)
    loaded = load_target(source, place)
    if loaded.config.window is not None:
        notes.append(f"attention of the target slides; texts end at its window, {loaded.config.context} tokens")
    models = Models(loaded, None, text, eos_ids, dtype, tuple(notes))
    if draft_source is None:
        return models
    models = _with_draft(models, load_draft(draft_source, place, spans))
    if draft_vocab is not None:
        models.draft.params["vocab"] = trimmed_head(loaded.params, kept)
    return models


def with_draft(models: Models, draft: str | Path, spans: Sequence[int] | str | None = None) -> Models:
    """The same target, on one device and read only once, with another drafter. Arguments and errors as for
    `load_models`.
    """
    spans = parse_spans(spans) if isinstance(spans, str) else spans
    place, _ = _place_on(None, jnp.dtype(models.dtype))
    return _with_draft(models, load_draft(Source.open(draft), place, spans))


def _with_draft(models: Models, drafter: Loaded) -> Models:
    _check_pair(models.target, drafter)
    notes = _settle_embedding(models.target, drafter)
    return dataclasses.replace(models, draft=drafter, notes=(*models.notes, *notes))


def find_eos_ids(source: Source, tokenizer) -> tuple[int, ...]:
    """Every id that ends a text: of generation_config.json, else of config.json; and of the tokenizer."""
    declared = source.config.get("eos_token_id")
    if source.path.is_dir() and (source.path / "generation_config.json").exists():
        generation = read_json(source.path / "generation_config.json").get("eos_token_id")
        declared = declared if generation is None else generation
    ids = list(declared) if isinstance(declared, list) else [declared]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    ids = [token for token in ids if token is not None]
    if not all(isinstance(token, int) and 0 <= token < 2**31 for token in ids):
        raise InputError(f"{source.path}: eos_token_id {declared!r} must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _place_on(mesh_text: str | None, dtype: jnp.dtype) -> tuple[Place, list[str]]:
    """How to put a parameter on the devices, and what to say about it."""
    if mesh_text is None:
        return on_devices(dtype), []
    mesh = sharding.make_mesh(sharding.parse_mesh(mesh_text, ("tensor",)))
    return on_devices(dtype, mesh), [f"weights are split over {mesh.size} devices"]


def _check_pair(target: Loaded, draft: Loaded) -> None:
    for name, theirs, ours in (
        ("hidden_size", draft.config.block.hidden_size, target.config.block.hidden_size),
        ("vocab_size", draft.config.vocab_size, target.config.vocab_size),
    ):
        if theirs != ours:
            raise InputError(f"the draft's {name} is {theirs}, the target's is {ours}; it was made for another target")


def _settle_embedding(target: Loaded, draft: Loaded) -> list[str]:
    """Drops a draft embedding that equals the target's; says so where it differs, since that may be a mistake."""
    if "embed" not in draft.params:
        return []
    rows = int(jnp.sum(jnp.any(draft.params["embed"] != target.params["embed"], axis=1)))
    if rows:
        return [f"the draft's own embedding differs from the target's in {rows} rows and is used for drafting"]
    del draft.params["embed"]
    return []
