"""How long the parts of a round take for a model of a given shape: `python -m infer.benchmark --shape SHAPE`.

Weights are random, so nothing has to be there but the device, and next to nothing is accepted: what is measured is the
round, and its speed-up follows from the tokens per round of a real drafter. Decoding at batch 1 is reading, so every
time is put beside the bytes that it must read and the device's own read bandwidth, measured in the same run.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from convert.command import OneLineParser, exit_status
from infer.draft_vocab import trimmed_head
from infer.loading import DRAFT_DTYPES, DTYPES, choose_kernel, precise
from infer.programs import kept_programs
from infer.settings import Settings, add_attention_flag, add_width_flags
from infer.shapes import SHAPES, random_params
from infer.timing import peak_memory, repeat_draft, repeat_verify
from poss_jax import decode, sharding
from poss_jax.attention import KERNEL_TILE
from poss_jax.config import DraftConfig, TargetConfig, parse_spans
from poss_jax.decode import Params, Plan, State
from poss_jax.errors import InputError
from poss_jax.int8 import quantize_draft
from poss_jax.llama import ParameterSpec, parameter_specs
from poss_jax.sampling import Sampling
from poss_jax.specialist import draft_specs

REPEATS = 16  # of a part in one program
READ_BYTES = {"cpu": 2**28, "gpu": 2**32, "tpu": 2**31}  # of the array that tells the bandwidth
KERNELS_SHOWN = 20
NEVER = np.asarray([-1], np.int32)  # no end of text


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    defaults = Settings()
    parser = OneLineParser(prog="python -m infer.benchmark --shape SHAPE", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, required=True, help="of the target; the drafter's follows from it")
    parser.add_argument("--random-weights", action="store_true", required=True, help="the only kind there is here")
    parser.add_argument("--spans", default="3,3", help="draft positions of each specialist (%(default)s)")
    parser.add_argument("--levels", type=int, default=defaults.levels, help="levels below the root (%(default)s)")
    add_width_flags(parser)
    parser.add_argument("--draft-vocab-size", type=int, help="draft only so many tokens (default: all)")
    parser.add_argument("--draft-dtype", choices=DRAFT_DTYPES, help="of the drafter's weights (default: as --dtype)")
    parser.add_argument("--batch-size", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=1000, help="tokens before the measured ones (%(default)s)")
    parser.add_argument("--slots", type=int, default=2048, help="of the caches (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches (%(default)s)")
    parser.add_argument("--mesh", default="tensor=1", help="tensor=N splits the weights over N devices (%(default)s)")
    add_attention_flag(parser)
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement, for the median (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="also the kernels of plain tokens and rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def check_flags(options: argparse.Namespace, target: TargetConfig) -> None:
    """Raises InputError for what cannot be, before anything is made."""
    for name in ("batch_size", "repeats", "draft_vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if (options.draft_vocab_size or 1) > target.vocab_size:
        raise InputError(f"--draft-vocab-size {options.draft_vocab_size}: the target has {target.vocab_size} tokens")
    if not 2 <= options.context <= target.context:
        raise InputError(f"--context {options.context}: must be from 2 to the {target.context} tokens of the target")
    needed = options.context + 4 * REPEATS * (options.levels + 1)
    if options.slots < needed:
        raise InputError(f"--slots {options.slots}: --context {options.context} needs at least {needed}")
    plan = make_plans(options, target)[1]
    if plan.kernel == "mosaic" and options.slots % KERNEL_TILE:
        raise InputError(f"--slots {options.slots}: --attention mosaic needs a multiple of {KERNEL_TILE}")
    if plan.draft is None:
        raise InputError(f"--levels {options.levels} --total-nodes {options.total_nodes}: leave no tree to draft")
    if options.profile and jax.default_backend() == "cpu":
        raise InputError("--profile: this device does not tell its kernels; leave it out")
    _check_memory(options, target)


def _check_memory(options: argparse.Namespace, target: TargetConfig) -> None:
    there = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    mesh = make_mesh(options)
    specs = jax.tree.leaves(parameter_specs(target), is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    shapes = (sharding.parameter_sharding(mesh, spec).shard_shape(spec.shape) for spec in specs)
    needed = sum(math.prod(shape) for shape in shapes) * jnp.dtype(options.dtype).itemsize
    if there is not None and needed > there:
        raise InputError(
            f"--shape {options.shape}: {needed / 2**30:.0f} GiB of weights on a device of {there / 2**30:.0f} GiB; "
            "give --mesh tensor=N"
        )


def make_mesh(options: argparse.Namespace) -> Mesh:
    """The devices that weights are split over."""
    return sharding.make_mesh(sharding.parse_mesh(options.mesh, ("tensor",)))


def make_plans(options: argparse.Namespace, target: TargetConfig) -> tuple[Plan, Plan]:
    """Plain and drafted decoding."""
    draft = DraftConfig(target.block, target.vocab_size, parse_spans(options.spans))
    shape = Settings(levels=options.levels, total_nodes=options.total_nodes, draft_top_k=options.draft_top_k).tree
    shape = shape.clamp(options.draft_vocab_size or target.vocab_size)
    kernel = choose_kernel(options.attention, options.dtype, make_mesh(options).size, target.block.head_dim)
    return tuple(Plan.create(target, config, shape, Sampling(), kernel) for config in (None, draft))


def make_params(options: argparse.Namespace, target: TargetConfig, draft: DraftConfig) -> Params:
    """Random weights on the devices."""
    dtype, mesh = jnp.dtype(options.dtype), make_mesh(options)
    weights = random_params(parameter_specs(target), mesh, dtype)
    drafter = random_params(draft_specs(draft), mesh, dtype)
    if options.draft_vocab_size:
        drafter["vocab"] = trimmed_head(weights, np.arange(options.draft_vocab_size))
    if options.draft_dtype:
        drafter = jax.jit(quantize_draft)(drafter, weights)
    return Params(weights, drafter)


def start(params: Params, plan: Plan, options: argparse.Namespace) -> State:
    """The state after a prompt of `--context` random tokens, each row another one."""
    rows, vocab = options.batch_size, plan.target.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, options.context)).astype(np.int32)
    length, limit = np.full(rows, options.context, np.int32), np.full(rows, options.slots - plan.slack, np.int32)
    keys = jax.vmap(jax.random.key)(np.arange(rows, dtype=np.uint32))
    return decode.jit_prefill(params, plan, options.slots, tokens, length, limit, keys, NEVER)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures; times in seconds."""
    target = SHAPES[options.shape]
    check_flags(options, target)
    plain, plan = make_plans(options, target)
    params, kernels = make_params(options, target, plan.draft), {}
    with precise(options.dtype):
        rounds = Rounds(Params(params.target), plain, start(params, plain, options))
        times = {"plain": _median(options.repeats, rounds, rounds.prepare)}
        if options.profile:
            kernels["plain"] = top_kernels(rounds)
        del rounds  # its caches are gone before those of drafting come
        state = start(params, plan, options)
        times |= round_seconds(params, plan, state, options.repeats)
        if options.profile:
            kernels["round"] = top_kernels(Rounds(params, plan, state))
    reads, peak = bytes_read(options, params, plan, state), peak_memory()  # before the array of the bandwidth is there
    bandwidth = read_bandwidth(options.repeats)
    return {
        "device": jax.local_devices()[0].device_kind,
        "attention": plan.kernel,
        "jax": jax.__version__,
        **{name: getattr(options, name) for name in ("shape", "spans", "draft_vocab_size", "draft_dtype")},
        **{name: getattr(options, name) for name in ("batch_size", "context", "slots", "dtype", "mesh")},
        **dataclasses.asdict(plan.tree),
        "seconds": times,
        "bytes_read": reads,
        "read_bandwidth": bandwidth,
        "share_of_bandwidth": {name: reads[name] / times[name] / bandwidth for name in times},
        "break_even_tokens_per_round": times["round"] / times["plain"],
        "peak_bytes": peak,
        "kernels": kernels,
    }


def round_seconds(params: Params, plan: Plan, state: State, repeats: int) -> dict[str, float]:
    """Of draft, verify and a whole round."""
    tree = repeat_draft(params, plan, state, np.int32(1))[0]
    rounds = Rounds(params, plan, state)
    return {
        "draft": _median(repeats, lambda n: repeat_draft(params, plan, state, n)),
        "verify": _median(repeats, lambda n: repeat_verify(params, plan, state, tree, NEVER, n)),
        "round": _median(repeats, rounds, rounds.prepare),
    }


class Rounds:
    """Runs rounds from the same state again and again. A run uses up a copy of the state, made by `prepare`."""

    def __init__(self, params: Params, plan: Plan, state: State):
        self._params, self._plan, self._state = params, plan, state

    def prepare(self) -> None:
        """Before the clock starts."""
        self._copy = jax.block_until_ready(jax.tree.map(jnp.copy, self._state))

    def __call__(self, rounds: np.int32) -> State:
        state, self._copy = self._copy, None
        return decode.jit_decode(self._params, self._plan, state, NEVER, rounds, np.zeros(state.length.shape, bool))


def _median(repeats: int, run: Callable[[np.int32], Any], prepare: Callable[[], None] = lambda: None) -> float:
    """Seconds of one repetition of a part, from runs of `REPEATS`, after one that compiles."""
    seconds = []
    for number in range(repeats + 1):
        prepare()
        started = time.perf_counter()
        jax.block_until_ready(run(np.int32(REPEATS)))
        if number:
            seconds.append((time.perf_counter() - started) / REPEATS)
    return statistics.median(seconds)


def bytes_read(options: argparse.Namespace, params: Params, plan: Plan, state: State) -> dict[str, int]:
    """What each part must read at least on one device: weights once, those of a draft once a level, and the filled part
    of the caches. Of small models some stays in the device's own caches, and shares of bandwidth may pass 100%.
    """
    weights, drafter = params.target, params.draft
    passes = bytes_each(weights) - (bytes_each(weights["embed"]) if "head" in weights else 0)
    passes += bytes_each(state.target_caches) * options.context // options.slots
    used = [plan.draft.specialist_at(level) for level in range(plan.tree.levels)]
    head = bytes_each(drafter["vocab"]["head"] if "vocab" in drafter else weights.get("head", weights["embed"]))
    draft = sum(bytes_each(drafter[f"specialist_{index}"]) for index in used)
    draft += len(used) * (bytes_each(drafter["fc"]) + head)
    draft += sum(bytes_each(state.draft_caches[index]) for index in used) * options.context // options.slots
    return {"plain": passes, "draft": draft, "verify": passes, "round": passes + draft}


def bytes_each(arrays: Any) -> int:
    """Memory of all arrays in a tree of them on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))


def read_bandwidth(repeats: int) -> float:
    """Bytes a second of a plain read of the device's memory."""
    size = READ_BYTES.get(jax.default_backend(), 2**28)
    array = jnp.zeros((size // 4,), jnp.float32)

    @jax.jit
    def read(array, times):
        # Each reading waits for the one before, or one would do for all.
        return jax.lax.fori_loop(0, times, lambda _, least: jnp.minimum(least, jnp.min(array + least)), jnp.float32(0))

    return size / _median(repeats, lambda times: read(array, times))


def top_kernels(run: Rounds) -> dict[str, Any]:
    """What the device is busy with: `busy` seconds a round, in all, and `top`: `name`, `seconds` and `count` a round of
    the kernels that take most of them.
    """
    run.prepare()
    jax.block_until_ready(run(np.int32(1)))
    run.prepare()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run(np.int32(REPEATS)))
        (file,) = Path(directory).rglob("*.xplane.pb")
        seconds, counts = kernel_times(jax.profiler.ProfileData.from_file(str(file)))
    top = [
        {"name": name, "seconds": total / REPEATS, "count": counts[name] / REPEATS}
        for name, total in seconds.most_common(KERNELS_SHOWN)
    ]
    return {"busy": seconds.total() / REPEATS, "top": top}


def kernel_times(profile: Any) -> tuple[Counter, Counter]:
    """Seconds and number of runs by name, of everything that ran on the streams of devices."""
    seconds, counts = Counter(), Counter()
    for plane in profile.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if line.name.startswith(("Stream", "XLA Ops")):
                for event in line.events:
                    seconds[event.name] += event.duration_ns / 1e9
                    counts[event.name] += 1
    return seconds, counts


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{figures['shape']}, {figures['dtype']}, batch {figures['batch_size']}, spans {figures['spans']}, "
        f"{figures['levels']} levels, {figures['total_nodes']} nodes, context {figures['context']} of "
        f"{figures['slots']} slots, {figures['mesh']}, attention {figures['attention']}; {figures['device']}, "
        f"JAX {figures['jax']}",
        f"plain read of memory: {figures['read_bandwidth'] / 1e9:,.0f} GB/s",
        f"{'':<8}{'ms':>9}{'GB read':>10}{'of bandwidth':>14}",
    ]
    for name, seconds in figures["seconds"].items():
        read, share = figures["bytes_read"][name] / 1e9, figures["share_of_bandwidth"][name]
        lines.append(f"{name:<8}{1e3 * seconds:>9.3f}{read:>10.2f}{share:>14.0%}")
    even = figures["break_even_tokens_per_round"]
    gains = ", ".join(f"{tokens / even:.2f} at {tokens}" for tokens in (2, 3, 4))
    lines.append(f"speed-up over plain decoding by tokens per round: {gains}; breaks even at {even:.2f}")
    if figures["peak_bytes"]:
        lines.append(f"peak device memory: {figures['peak_bytes'] / 2**30:.1f} GiB")
    for part, kernels in figures["kernels"].items():
        lines.append(f"{part}: the device is busy for {1e3 * kernels['busy']:.3f} ms of it")
        for kernel in kernels["top"]:
            lines.append(f"{1e3 * kernel['seconds']:>9.3f} ms, {kernel['count']:>6.1f} x {kernel['name']}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    figures = measure(options)
    print(json.dumps(figures) if options.json else table(figures))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    options = build_parser().parse_args(arguments)
    with kept_programs():
        return exit_status(run, options)


if __name__ == "__main__":
    sys.exit(main())
