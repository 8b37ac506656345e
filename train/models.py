"""What training starts from: the frozen target and its kernel of attention, and the drafter, on the mesh."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from convert.checkpoint import Source
from convert.load import Loaded, count_specialists, in_numpy, load_draft, load_target, on_devices
from convert.stored import Parameter
from poss_jax.config import DraftConfig, TargetConfig, format_spans
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec
from poss_jax.objective import Params
from poss_jax.specialist import draft_specs, init_draft


def choose_attention(name: str, dtype: str) -> str:
    """ "auto" made definite. Raises InputError for a kernel that cannot run here."""
    possible = jax.default_backend() == "gpu" and dtype == "bfloat16"
    if name == "cudnn" and not possible:
        raise InputError("--attention cudnn needs an NVIDIA GPU and --dtype bfloat16")
    return ("cudnn" if possible else "plain") if name == "auto" else name


def load_frozen(source: Source, mesh: Mesh, dtype: str, *, features_stored: bool) -> tuple[TargetConfig, Params]:
    """The target; with stored features only its embedding and head, which are all that training needs then."""
    place = on_devices(dtype, mesh)

    def place_vocabulary(array: Parameter, spec: ParameterSpec) -> jax.Array | None:
        return place(array, spec) if "vocab" in spec.axes else None

    config, params = load_target(source, place_vocabulary if features_stored else place)
    if features_stored:
        params = {name: params[name] for name in ("embed", "head") if name in params}
    return config, params


@dataclasses.dataclass(frozen=True)
class StartDrafter:
    """A drafter to train. params: float32 on the mesh. embed: its own token embedding, frozen, or None. origin: where
    it comes from, for people.
    """

    config: DraftConfig
    params: Params
    embed: jax.Array | None
    origin: str


def start_drafter(
    target: TargetConfig,
    spans: tuple[int, ...],
    init_from: str | None,
    mesh: Mesh,
    dtype: str,
    seed: int,
    *,
    fc_bias: bool = True,
) -> StartDrafter:
    """A random drafter of the target's sizes, with a bias in `fc` or without, or one from a checkpoint with as many
    specialists or fewer: each that it lacks starts from the one before it. Raises InputError for a checkpoint of
    another target.
    """
    if init_from is None:
        config = DraftConfig(target.block, target.vocab_size, spans, fc_bias=fc_bias)
        params = jax.device_get(jax.jit(init_draft, static_argnums=0)(config, jax.random.key(seed)))
        return StartDrafter(config, _on(mesh, config, params), None, "random")
    loaded = _load(init_from)
    _check_sizes(init_from, loaded.config, target)
    there = len(loaded.config.spans)
    if there > len(spans):
        raise InputError(
            f"{init_from}: has {there} specialists; --spans {format_spans(spans)} has room for {len(spans)}"
        )
    config = dataclasses.replace(loaded.config, spans=spans)
    params = {"fc": loaded.params["fc"]}
    for index in range(len(spans)):
        params[f"specialist_{index}"] = loaded.params[f"specialist_{min(index, there - 1)}"]
    embed = loaded.params.get("embed")
    if embed is not None:
        embed = on_devices(dtype, mesh)(embed, ParameterSpec(embed.shape, ("vocab", "hidden")))
    return StartDrafter(config, _on(mesh, config, params), embed, init_from)


def _load(name: str) -> Loaded:
    """A drafter as host arrays, whatever its spans; one that a training run has made too."""
    source = Source.open(name)
    return load_draft(source, in_numpy, spans=(1,) * count_specialists(source))


def _on(mesh: Mesh, config: DraftConfig, params: dict[str, Any]) -> Params:
    return jax.tree.map(on_devices("float32", mesh), params, draft_specs(config))


def _check_sizes(name: str, draft: DraftConfig, target: TargetConfig) -> None:
    for size, theirs, ours in (
        ("hidden_size", draft.block.hidden_size, target.block.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise InputError(f"{name}: has {size} {theirs}, the target {ours}; it was made for another target")
