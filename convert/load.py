"""Hugging Face checkpoints in: targets and drafters, from names and shapes that must all fit."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from convert.checkpoint import Source
from convert.engines import SGLANG_ARCHITECTURE
from convert.layout import Same, pieces, whole
from convert.names import DRAFT_EMBEDDING, EMBEDDING, HEAD, Entry, draft_entries, target_entries, tree_of
from convert.stored import Parameter, Tensors, stored
from poss_jax import sharding
from poss_jax.config import DraftConfig, TargetConfig, format_spans
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec

EAGLE_3 = ("midlayer.", "t2d", "d2t")  # how names of tensors begin that only such heads have

Place = Callable[[Parameter | np.ndarray, ParameterSpec], Any]


class Loaded(NamedTuple):
    """A checkpoint in our form: a `TargetConfig` or `DraftConfig`, and the parameters."""

    config: Any
    params: dict[str, Any]


def on_devices(dtype: Any, mesh: Mesh | None = None) -> Place:
    """Puts parameters on the devices in `dtype`: on the default device, or split over a mesh, of which each process
    reads what its own devices hold.
    """

    def place(array: Parameter | np.ndarray, spec: ParameterSpec) -> jax.Array:
        array = array.astype(jnp.dtype(dtype))
        if mesh is None:
            return jnp.asarray(np.asarray(array))
        parts: dict[str, np.ndarray] = {}  # devices that hold the same part share one reading of it

        def part(index: tuple[slice, ...]) -> np.ndarray:
            key = str(index)  # slices cannot be keys before Python 3.12
            if key not in parts:
                parts[key] = np.asarray(array[index])
            return parts[key]

        return jax.make_array_from_callback(array.shape, sharding.parameter_sharding(mesh, spec), part)

    return place


def load_target(source: Source, place: Place) -> Loaded:
    """A target; see `llama.parameter_specs` for the parameters.

    Names, shapes and types are all checked before a weight is read. Raises InputError naming the file and the field or
    tensor that does not fit.
    """
    config, entries, tensors = target_plan(source)
    return Loaded(config, _placed(entries, tensors, place))


def target_config(source: Source) -> TargetConfig:
    """What a target's config says of it; stored weights may still say that its head is its own."""
    with _naming(source):
        return TargetConfig.from_hf(source.config)


def target_plan(source: Source) -> tuple[TargetConfig, list[Entry], Tensors]:
    """What a target is made of, as far as config and names say."""
    config = target_config(source)
    if config.tie_embeddings and HEAD in source.tensors:  # some files hold the tied matrix twice
        own = dataclasses.replace(config, tie_embeddings=False)
        parameters(target_entries(own), Tensors(source.tensors, source.path))  # before values are looked at
        if _has_own_head(source.tensors):
            config = own
    tensors = Tensors(source.tensors, source.path)
    if config.tie_embeddings:
        tensors.drop(HEAD)
    return config, target_entries(config), tensors


def load_draft(source: Source, place: Place, spans: Sequence[int] | None = None) -> Loaded:
    """A drafter in the published key layout: parameters of `Drafter`, and `embed` if the checkpoint holds one.

    `spans` come from the caller, else from `spans` in the config; a single specialist is one span. Raises
    InputError where that leaves them open or contradicts the number of specialists, and for any tensor that is
    missing, too much or of another shape.
    """
    config, entries, tensors = draft_plan(source, spans)
    return Loaded(config, _placed(entries, tensors, place))


def draft_plan(source: Source, spans: Sequence[int] | None = None) -> tuple[DraftConfig, list[Entry], Tensors]:
    """What a drafter is made of, as far as config and names say."""
    spans = _spans(source, spans)
    with _naming(source):
        config = DraftConfig.from_hf(source.config, spans)
    architectures = source.config.get("architectures")
    if isinstance(architectures, list) and SGLANG_ARCHITECTURE in architectures:
        config = dataclasses.replace(config, fc_bias=True)
    return config, draft_entries(config, embed=DRAFT_EMBEDDING in source.tensors), Tensors(source.tensors, source.path)


def parameters(entries: Sequence[Entry], tensors: Tensors) -> list[Parameter]:
    """The parameters where they lie. Raises InputError for any tensor that is missing, too much or misshapen."""
    found = [tensors.parameter(entry) for entry in entries]
    tensors.finish()
    return found


def _placed(entries: Sequence[Entry], tensors: Tensors, place: Place) -> dict[str, Any]:
    found = parameters(entries, tensors)
    leaves = {}
    # A short load shows no bar; neither does one whose output is not a terminal.
    for number, parameter in enumerate(tqdm(found, desc="loading", unit="tensor", delay=2, leave=False, disable=None)):
        leaves[parameter.entry.path] = place(parameter, parameter.entry.spec)
        found[number] = None  # with what it may have read
    return tree_of(leaves)


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
    head, embedding = stored(tensors, HEAD), stored(tensors, EMBEDDING)
    parts = pieces(Same(), whole(head.shape), head.dtype.itemsize)
    return not all(np.array_equal(head[part], embedding[part]) for part in parts)


def count_specialists(source: Source) -> int:
    """How many specialists a drafter's checkpoint holds. Raises InputError if there is none."""
    if any(name.startswith(EAGLE_3) for name in source.tensors):
        raise InputError(f"{source.path}: is an EAGLE-3 head, which reads several layers' features; not supported")
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


def is_draft(source: Source) -> bool:
    """Whether a checkpoint is a drafter's: only those have an `fc`, and layers without a model around them."""
    return "fc.weight" in source.tensors or any(re.match(r"layers\.\d+\.", name) for name in source.tensors)


def in_numpy(array: Parameter, spec: ParameterSpec) -> np.ndarray:
    """A `Place` on the host, in the dtype of the file."""
    return np.asarray(array)
