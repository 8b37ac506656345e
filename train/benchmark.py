"""`python -m train.benchmark`: tokens a second and peak memory of training updates, for models of a given shape.

Weights and tokens are random and every row but the last of a sequence is supervised, so nothing has to be there but the
accelerator. Every token of a batch is counted once, however many steps the unroll makes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from convert.command import OneLineParser, exit_status
from infer.shapes import SHAPES, random_params
from poss_jax import sharding
from poss_jax.attention import TRAINING_KERNELS
from poss_jax.config import DraftConfig, TargetConfig, parse_spans
from poss_jax.errors import InputError
from poss_jax.llama import parameter_specs
from poss_jax.objective import Objective, Rows
from poss_jax.specialist import draft_specs
from train.models import choose_attention
from train.step import OptimizerConfig, Trainer

PEAK_FLOPS = 989e12  # dense bfloat16 of one H100 or H200


def flops_per_token(config: DraftConfig, online: TargetConfig | None) -> float:
    """Floating point operations of a training update for one token, attention scores and recomputation left out.

    Two for each weight forwards; backwards as many for inputs and again for weights, but the head's weights and all of
    the target's are frozen.
    """
    block, steps = config.block, sum(config.spans)
    hidden, inner, size = block.hidden_size, block.intermediate_size, block.head_dim
    layer = hidden * size * (2 * block.num_heads + 2 * block.num_kv_heads) + 3 * hidden * inner
    head = config.vocab_size * hidden
    drafting = steps * (6 * (layer + 2 * hidden * hidden) + 4 * head) + 2 * head
    return drafting + (0 if online is None else 2 * online.num_layers * layer)


def random_rows(config: TargetConfig, batch: int, length: int, features: bool, dtype: jnp.dtype) -> Rows:
    """One micro-batch of sequences as long as the row: arrays [1, b, t]."""
    random = np.random.default_rng(0)
    shape = (1, batch, length)
    supervised = np.ones(shape, np.int32)
    supervised[..., -1] = 0
    stored = random.normal(size=(*shape, config.block.hidden_size)).astype(dtype) if features else None
    return Rows(
        tokens=random.integers(0, config.vocab_size, shape).astype(np.int32),
        segments=np.ones(shape, np.int32),
        offsets=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        supervised=supervised,
        features=stored,
    )


def check_flags(options: argparse.Namespace) -> None:
    """Raises InputError for numbers that cannot be, and for a kernel that cannot run here."""
    for name, least in (("batch_size", 1), ("max_length", 3), ("warmup", 0), ("repeats", 1)):
        if getattr(options, name) < least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    choose_attention(options.attention, options.dtype)


def measure(options: argparse.Namespace) -> dict:
    """The figures, as a dictionary."""
    check_flags(options)
    target = SHAPES[options.shape]
    mesh = sharding.training_mesh(options.mesh)
    if options.batch_size % (groups := sharding.row_groups(mesh)):
        raise InputError(f"--batch-size {options.batch_size}: must be a multiple of {groups}, as --mesh splits it")
    dtype = jnp.dtype(options.dtype)
    draft = DraftConfig(target.block, target.vocab_size, parse_spans(options.spans))
    objective = Objective(target, draft, row_groups=groups, kernel=options.attention)
    specs = draft_specs(draft)
    trainer = Trainer(objective, OptimizerConfig(), mesh, specs)
    needed = parameter_specs(target)
    if options.features == "stored":  # of the target only the embedding and the head are needed
        needed = {name: spec for name, spec in needed.items() if name in ("embed", "head")}
    frozen = {"target": random_params(needed, mesh, dtype)}
    state = trainer.start(random_params(specs, mesh, jnp.dtype("float32")))
    rows = trainer.put_rows(
        random_rows(target, options.batch_size, options.max_length, options.features == "stored", dtype)
    )
    rate = jnp.float32(1e-4)
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        update = trainer.jit_update().lower(state, frozen, rows, rate).compile()
        compiled = time.perf_counter() - started
        seconds = []
        for _ in range(options.warmup + options.repeats):
            started = time.perf_counter()
            state, metrics = update(state, frozen, rows, rate)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - started)
    tokens = options.batch_size * options.max_length
    median = statistics.median(seconds[options.warmup :])
    flops = flops_per_token(draft, target if options.features == "online" else None)
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "device": jax.local_devices()[0].device_kind,
        "shape": options.shape,
        "spans": options.spans,
        "rows": f"{options.batch_size} x {options.max_length}",
        "features": options.features,
        "dtype": options.dtype,
        "attention": options.attention,
        "mesh": options.mesh,
        "seconds_per_update": median,
        "slowest_and_fastest": [max(seconds[options.warmup :]), min(seconds[options.warmup :])],
        "tokens_per_second": tokens / median,
        "gflop_per_token": flops / 1e9,
        "model_flop_utilisation": flops * tokens / median / PEAK_FLOPS / mesh.size,
        "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30,
        "compile_seconds": compiled,
        "loss": float(metrics.loss),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m train.benchmark", description=__doc__.split("\n\n")[1])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--spans", default="3,3", help="draft positions of each specialist (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences an update (%(default)s)")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a sequence (%(default)s)")
    parser.add_argument(
        "--features",
        choices=("online", "stored"),
        default="online",
        help="online: the target runs in the update; stored: features are given, random ones (%(default)s)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(%(default)s)")
    parser.add_argument("--attention", choices=TRAINING_KERNELS, default="plain", help="of the target (%(default)s)")
    parser.add_argument("--mesh", default="data=1", help="such as data=2,fsdp=2,tensor=2 (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="updates before the measured ones (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="measured updates (%(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(lambda options: print(json.dumps(measure(options))), build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
