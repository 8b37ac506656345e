"""A drafter that knows one text by heart, without training."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from infer import Generator
from poss_jax import llama
from tests import fixtures


def overfit(directory, target: str, prompt: list[int], new_tokens: int):
    """Writes a one-specialist drafter that drafts the target's greedy continuation of `prompt`.

    Its attention and MLP give nothing, so its prediction is fc([embedding; feature]). With fewer rows than the
    2 h inputs of `fc`, least squares hits every next feature of the text, and so follows it at any depth.
    """
    generator = Generator.from_pretrained(target)
    (answer,) = generator.generate([prompt], max_new_tokens=new_tokens, ignore_eos=True)
    tokens = jnp.array([prompt + answer.token_ids])
    params, config = generator.target.params, generator.target.config
    positions = jnp.arange(tokens.shape[1])[None]
    features, _ = llama.forward(params, config, tokens, positions, positions + 1, None)
    inputs = np.concatenate([params["embed"][tokens[0, 1:]], features[0, :-1]], axis=-1)
    assert len(inputs) < inputs.shape[1]
    weights = np.linalg.lstsq(inputs, np.asarray(features[0, 1:]), rcond=None)[0]
    hf_config = json.loads((Path(target) / "config.json").read_text())
    fixtures.draft(directory, hf_config, 1, bias=False, gain=0.0)
    replace_tensors(directory, {"fc.weight": weights.T}, drop=("embed_tokens.weight",))
    return directory


def replace_tensors(directory, tensors: dict, drop: tuple[str, ...] = ()) -> None:
    """Writes a draft's safetensors file anew with some tensors replaced and some left out."""
    path = directory / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if name not in drop}
    fixtures.save(path, {**kept, **tensors})
