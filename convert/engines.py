"""How other programs want a drafter: which architecture they look for, and what they cannot run.

`eagle` is the published layout of EAGLE-1 and EAGLE-2 (and HASS), whose code wants the target's embedding in the file.
vLLM and SGLang read the same tensor names and draft with the target's embedding themselves. Both take the `bias` of a
config for biases of attention, which EAGLE's code takes for that of `fc`; so it is false there. vLLM's `fc` has no bias
and SGLang's always has one.
"""

import dataclasses
from typing import Any

import numpy as np

from convert.names import DRAFT_EMBEDDING
from poss_jax.config import ROPE_KINDS, BlockConfig, DraftConfig, format_spans
from poss_jax.errors import InputError
from poss_jax.rotary import name_scaling


@dataclasses.dataclass(frozen=True)
class Engine:
    """A reader of drafters with one specialist. fc_bias: whether its `fc` has a bias; None: as the config says.
    query_key_value_bias: whether it can have these. embedding: whether it wants one in the file; others take the
    target's. rotary: the scalings it knows. head_dim: whether that may be another than hidden size / heads.
    """

    architecture: str
    fc_bias: bool | None = None
    query_key_value_bias: bool = True
    embedding: bool = False
    rotary: tuple[str, ...] = ROPE_KINDS
    head_dim: bool = True


SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle"
ENGINES = {
    "eagle": Engine("LlamaForCausalLM", embedding=True, rotary=("default", "linear", "dynamic"), head_dim=False),
    "vllm": Engine("EagleLlamaForCausalLM", fc_bias=False),
    "sglang": Engine(SGLANG_ARCHITECTURE, fc_bias=True, query_key_value_bias=False),
}
FORMATS = ("poss", *ENGINES)


def for_engine(
    name: str, config: DraftConfig, tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The `config.json` and the tensors of a drafter in one of `FORMATS`. "poss" is our own form: the authors' layout,
    with the spans in the config.

    Raises InputError saying why an engine cannot run the drafter.
    """
    rope = name_scaling(config.block.rope, config.block.head_dim)
    config = dataclasses.replace(config, block=dataclasses.replace(config.block, rope=rope))
    contents = config.to_hf()
    if name == "poss":
        return contents, tensors
    engine, tensors = ENGINES[name], dict(tensors)
    _check(name, engine, config, tensors)
    if not engine.embedding:
        tensors.pop(DRAFT_EMBEDDING, None)
    if engine.fc_bias is False:
        tensors.pop("fc.bias", None)
    if engine.fc_bias is True and "fc.bias" not in tensors:
        tensors["fc.bias"] = np.zeros(config.block.hidden_size, tensors["fc.weight"].dtype)
    del contents["spans"]
    contents["architectures"] = [engine.architecture]
    if engine.fc_bias is not None:
        contents["bias"] = False
    return contents, tensors


def _check(name: str, engine: Engine, config: DraftConfig, tensors: dict[str, np.ndarray]) -> None:
    if len(config.spans) > 1:
        raise InputError(
            f"format {name} has one layer for all draft positions, and this drafter has specialists for spans "
            f"{format_spans(config.spans)}; give --specialist 0 to export the first one alone, or --format poss"
        )
    if engine.fc_bias is False and np.any(tensors.get("fc.bias", 0)):
        raise InputError(
            f"format {name} has no bias in fc, and this drafter's is not zero, so it would draft worse; "
            "train one with train.run --no-fc-bias"
        )
    if not engine.query_key_value_bias and config.query_key_value_bias:
        raise InputError(f"format {name} has no biases of queries, keys and values alone, as this drafter has")
    if engine.embedding and DRAFT_EMBEDDING not in tensors:
        raise InputError(f"format {name} holds the target's embedding, and this drafter does not; give --target MODEL")
    _check_positions(name, engine, config.block)


def _check_positions(name: str, engine: Engine, block: BlockConfig) -> None:
    rope = block.rope
    if rope.kind not in engine.rotary or rope.frequency_factors:
        kind = "factors of its own" if rope.frequency_factors else f"type {rope.kind!r}"
        raise InputError(f"format {name} has no rotary scaling of {kind}, as this drafter has")
    if engine.rotary != ROPE_KINDS and rope.kind != "default" and rope.theta != 10000.0:
        raise InputError(
            f"format {name} forgets rope_theta where positions are scaled; this drafter's is {rope.theta:g}"
        )
    if not engine.head_dim and block.head_dim * block.num_heads != block.hidden_size:
        raise InputError(
            f"format {name} divides the hidden size by the number of heads; this drafter has {block.num_heads} of "
            f"{block.head_dim} for {block.hidden_size}"
        )


def only_specialist(
    config: DraftConfig, params: dict[str, Any], notes: Any, number: int
) -> tuple[DraftConfig, dict[str, Any], dict[str, Any]]:
    """A drafter of one specialist of another drafter, and what of the other's notes is true of it. Raises InputError if
    there is no such specialist.
    """
    if not 0 <= number < len(config.spans):
        raise InputError(f"--specialist {number}: the drafter has specialists 0 to {len(config.spans) - 1}")
    kept = {name: value for name, value in params.items() if not name.startswith("specialist_")}
    kept["specialist_0"] = params[f"specialist_{number}"]
    notes = {name: value for name, value in notes.items() if name != "evaluation"} if isinstance(notes, dict) else {}
    notes["specialist"] = f"{number} of a PosS drafter with spans {format_spans(config.spans)}, alone"
    return dataclasses.replace(config, spans=(config.spans[number],)), kept, notes
