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
from poss_jax.attention import DECODING_KERNELS, KERNEL_HEAD_SIZES
from poss_jax.config import parse_spans
from poss_jax.errors import InputError
from poss_jax.int8 import quantize_draft

DTYPES, DRAFT_DTYPES = ("float32", "bfloat16"), ("int8",)
HOPPER = "9.0"  # compute capability of the GPUs that the attention kernel is written for


def precise(dtype: str) -> contextlib.AbstractContextManager:
    """Full float32 products where float32 was asked for: GPUs and TPUs default to fewer bits."""
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


@dataclasses.dataclass(frozen=True)
class Models:
    """A target, perhaps a drafter for it, and what belongs to them.

    tokenizer: a transformers tokenizer, or None. eos_ids: every id that ends a text. notes: what a user may want to
    know about the checkpoints, a line each. kernel: of attention in rounds, see `choose_kernel`.
    """

    target: Loaded
    draft: Loaded | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    dtype: str
    notes: tuple[str, ...] = ()
    kernel: str = "plain"

    @property
    def draft_choices(self) -> int:
        """How many tokens may be drafted: those of a trimmed vocabulary, else all of the target's."""
        vocab = self.draft.params.get("vocab", {}) if self.draft else {}
        return len(vocab["ids"]) if "ids" in vocab else self.target.config.vocab_size


def choose_kernel(name: str, dtype: str, devices: int, head_size: int) -> str:
    """The kernel of attention in rounds: `name`, with "auto" made definite. Raises InputError for one that cannot run
    here on weights split over so many devices.
    """
    if name not in ("auto", *DECODING_KERNELS):
        raise InputError(f"attention {name!r} is not known; known: auto, {', '.join(DECODING_KERNELS)}")
    device = jax.local_devices()[0]
    if name == "auto" and device.platform != "gpu":
        return "plain"
    needs = {
        "a Hopper GPU": getattr(device, "compute_capability", None) == HOPPER,
        "bfloat16": dtype == "bfloat16",
        "weights on one device": devices == 1,
        "heads of 64 or 128": head_size in KERNEL_HEAD_SIZES,
    }
    missing = [need for need, there in needs.items() if not there]
    if name == "mosaic" and missing:
        raise InputError(f"--attention mosaic needs {missing[0]}; give plain, or leave it out")
    if name == "auto":
        return "plain" if missing else "mosaic"
    return name


def load_models(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    spans: Sequence[int] | str | None = None,
    dtype: str = "float32",
    mesh: str | None = None,
    tokenizer: str | Path | None = None,
    draft_vocab: str | Path | None = None,
    draft_dtype: str | None = None,
    attention: str = "auto",
) -> Models:
    """See `Generator.from_pretrained`. Every file is opened, and so checked, before any weight is read."""
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    spans = parse_spans(spans) if isinstance(spans, str) else spans
    place, notes, devices = _place_on(mesh, jnp.dtype(dtype))
    source = Source.open(target)
    kernel = choose_kernel(attention, dtype, devices, target_config(source).block.head_dim)
    draft_source = None if draft is None else Source.open(draft)
    if draft_dtype not in (None, *DRAFT_DTYPES):
        raise InputError(f"draft dtype {draft_dtype!r} is not supported; supported: {', '.join(DRAFT_DTYPES)}")
    if draft_dtype is not None and draft is None:
        raise InputError(f"draft dtype {draft_dtype}: there is no drafter to round")
    if draft_vocab is not None:
        if draft is None:
            raise InputError(f"draft vocabulary {draft_vocab}: there is no drafter to use it")
        kept = read_draft_vocab(draft_vocab, target_config(source).vocab_size)
    text = tokenizer_for(source, tokenizer)
    eos_ids = find_eos_ids(source, text)
    loaded = load_target(source, place)
    if loaded.config.window is not None:
        notes.append(f"attention of the target slides; texts end at its window, {loaded.config.context} tokens")
    models = Models(loaded, None, text, eos_ids, dtype, tuple(notes), kernel)
    if draft_source is None:
        return models
    models = _with_draft(models, load_draft(draft_source, place, spans))
    if draft_vocab is not None:
        models.draft.params["vocab"] = trimmed_head(loaded.params, kept)
    if draft_dtype is not None:
        rounded = jax.jit(quantize_draft)(models.draft.params, loaded.params)
        models = dataclasses.replace(models, draft=models.draft._replace(params=rounded))
    return models


def with_draft(models: Models, draft: str | Path, spans: Sequence[int] | str | None = None) -> Models:
    """The same target, on one device and read only once, with another drafter. Arguments and errors as for
    `load_models`.
    """
    spans = parse_spans(spans) if isinstance(spans, str) else spans
    place, *_ = _place_on(None, jnp.dtype(models.dtype))
    return _with_draft(models, load_draft(Source.open(draft), place, spans))


def _with_draft(models: Models, drafter: Loaded) -> Models:
    _check_pair(models.target, drafter)
    notes, kernel = _settle_embedding(models.target, drafter), models.kernel
    if kernel == "mosaic" and drafter.config.block.head_dim not in KERNEL_HEAD_SIZES:
        kernel = "plain"
        notes.append(f"attention is plain, since the drafter has heads of {drafter.config.block.head_dim}")
    return dataclasses.replace(models, draft=drafter, notes=(*models.notes, *notes), kernel=kernel)


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


def _place_on(mesh_text: str | None, dtype: jnp.dtype) -> tuple[Place, list[str], int]:
    """How to put a parameter on the devices, what to say about it, and how many devices they are."""
    if mesh_text is None:
        return on_devices(dtype), [], 1
    mesh = sharding.make_mesh(sharding.parse_mesh(mesh_text, ("tensor",)))
    return on_devices(dtype, mesh), [f"weights are split over {mesh.size} devices"], mesh.size


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
