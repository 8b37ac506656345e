"""How other programs want a drafter: which architecture they look for, and what they cannot run.

`eagle` is the published layout of EAGLE-1 and EAGLE-2 (and HASS). vLLM and SGLang read the same tensor names. Both take
the `bias` of a config for biases of attention, which EAGLE's own code takes for that of `fc`; so it is false there.
vLLM's `fc` has no bias and SGLang's always has one. Both draft with the target's embedding.
"""

import dataclasses
from typing import Any

import numpy as np

from poss_jax.config import SGLANG_ARCHITECTURE, DraftConfig, format_spans
from poss_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Engine:
    """A reader of drafters with one specialist. fc_bias: whether its `fc` has a bias; None: as the config says.
    query_key_value_bias, embedding: whether it can have these.
    """

    architecture: str
    fc_bias: bool | None = None
    query_key_value_bias: bool = True
    embedding: bool = True


ENGINES = {
    "eagle": Engine("LlamaForCausalLM"),
    "vllm": Engine("EagleLlamaForCausalLM", fc_bias=False, embedding=False),
    "sglang": Engine(SGLANG_ARCHITECTURE, fc_bias=True, query_key_value_bias=False, embedding=False),
}
FORMATS = ("poss", *ENGINES)


def for_engine(
    name: str, config: DraftConfig, tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The `config.json` and the tensors of a drafter in one of `FORMATS`. "poss" is our own form: the authors' layout,
    with the spans in the config.

    Raises InputError saying why an engine cannot run the drafter.
    """
    contents = config.to_hf()
    if name == "poss":
        return contents, tensors
    engine, tensors = ENGINES[name], dict(tensors)
    _check(name, engine, config, tensors)
    if not engine.embedding:
        tensors.pop("embed_tokens.weight", None)
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
        raise InputError(f"format {name} has no bias in fc, and this drafter's is not zero; it would draft worse")
    if not engine.query_key_value_bias and config.query_key_value_bias:
        raise InputError(f"format {name} has no biases of queries, keys and values alone, as this drafter has")


def only_specialist(config: DraftConfig, params: dict[str, Any], number: int) -> tuple[DraftConfig, dict[str, Any]]:
    """A drafter of one specialist of another drafter. Raises InputError if there is no such specialist."""
    if not 0 <= number < len(config.spans):
        raise InputError(f"--specialist {number}: the drafter has specialists 0 to {len(config.spans) - 1}")
    kept = {name: value for name, value in params.items() if not name.startswith("specialist_")}
    kept["specialist_0"] = params[f"specialist_{number}"]
    return dataclasses.replace(config, spans=(config.spans[number],)), kept
