"""How much host memory loading a checkpoint takes beyond the arrays themselves (Linux).

    python -m tests.host_memory DIRECTORY [--mesh tensor=2] [--dtype bfloat16]

prints one JSON object, in bytes: `peak`, the highest resident size while loading; `before`, that of the process with
JAX; `arrays`, the live arrays; `largest`, the largest tensor of the checkpoint; `beyond` = peak - before - arrays.
`python -m tests.host_memory DIRECTORY --make GIGABYTES` writes a checkpoint of random weights to measure with.
"""

import argparse
import gc
import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from convert.checkpoint import Source
from convert.load import load_target, on_devices
from convert.names import target_entries
from convert.output import write_tensors
from poss_jax import sharding
from poss_jax.config import TargetConfig


def make(directory: Path, gigabytes: float) -> None:
    """A bfloat16 checkpoint in Llama's proportions: a tenth of it is the embedding, and as much the head."""
    hidden = max(64, 64 * round((gigabytes * 2**30 / 512) ** 0.5 / 64))  # 18 layers hold about 250 hidden^2
    config = {
        "model_type": "llama",
        "vocab_size": 25 * hidden,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": 18,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    entries = target_entries(TargetConfig.from_hf(config))
    shapes = {name: shape for entry in entries for name, shape in entry.stored_shapes.items()}
    random = np.random.default_rng(0)
    directory.mkdir(parents=True)
    write_tensors(
        directory,
        (
            (name, random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))
            for name, shape in shapes.items()
        ),
    )
    (directory / "config.json").write_text(json.dumps(config))


def measure(directory: Path, mesh: str | None, dtype: str) -> dict[str, int]:
    """See above."""
    jnp.zeros(()).block_until_ready()
    source = Source.open(directory)
    largest = max(
        math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in map(source.tensors.stored, source.tensors)
    )
    place = on_devices(dtype, mesh and sharding.make_mesh(sharding.parse_mesh(mesh, ("tensor",))))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmRSS")
    params = jax.block_until_ready(load_target(source, place).params)
    peak, arrays = _resident("VmHWM"), sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"peak": peak, "before": before, "arrays": arrays, "largest": largest, "beyond": peak - before - arrays}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--make", type=float)
    parser.add_argument("--mesh")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.make:
        make(options.directory, options.make)
    else:
        print(json.dumps(measure(options.directory, options.mesh, options.dtype)))
