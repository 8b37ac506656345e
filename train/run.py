"""`python -m train.run`: trains a drafter for a frozen target, from conversations to a directory that generates.

In --out: `drafter/` (the last weights) and `best/` (the best on held-out conversations), which `infer.generate --draft`
takes as they are; `checkpoints/`, from which --resume goes on; `metrics.jsonl` and `evaluations.jsonl`, also as
TensorBoard files; `settings.json`.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from convert.checkpoint import Source, first_line, read_json, write_json
from convert.command import OneLineParser, exit_status
from convert.load import target_config
from convert.save import save_draft
from convert.tokenizer import tokenizer_for
from infer.loading import DTYPES
from infer.programs import kept_programs
from poss_jax import sharding
from poss_jax.attention import TRAINING_KERNELS
from poss_jax.config import format_spans, parse_spans
from poss_jax.errors import InputError
from poss_jax.losses import LossWeights
from poss_jax.objective import Objective, Params
from poss_jax.specialist import draft_specs
from train import STARTED
from train.checkpoint import Checkpoints
from train.conversations import DataSource
from train.data import add_data_flags, dataset_from
from train.evaluate import Evaluation
from train.examples import Dataset
from train.features import check_features
from train.feed import Feed, stack
from train.loop import Logs, Loop, Pace
from train.metrics import EVALUATIONS, MetricsLog, last_line
from train.models import StartDrafter, choose_attention, load_frozen, start_drafter
from train.packing import PACKINGS, Batches
from train.schedule import RunLength, Schedule
from train.step import CLIPPINGS, OptimizerConfig, Trainer, TrainState

HELD_OUT_SHARE, MOST_HELD_OUT = 0.01, 256
# What a resumed run may not change without being told so: these decide what is learned, the others where and how long.
FREE_ON_RESUME = {
    *("mesh", "resume", "out", "save_every", "evaluate_every", "keep", "steps", "epochs", "minutes", "tensorboard"),
    *("coordinator", "processes", "process_id", "attention"),
}


def build_parser() -> argparse.ArgumentParser:
    optimizer, weights = OptimizerConfig(), LossWeights()
    parser = OneLineParser(prog="python -m train.run", description="Train a drafter for a frozen Llama-type target.")
    models = parser.add_argument_group("models")
    models.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    models.add_argument(
        "--spans",
        required=True,
        help="draft positions of each specialist: 1 is EAGLE, 6 HASS with six steps, 3,3 PosS-3, 1,1,1,1,1,1 PosS-1",
    )
    models.add_argument(
        "--init-from",
        metavar="DRAFTER",
        help="EAGLE, HASS or PosS drafter to start from: a directory, a hub id, or the --out of a training run",
    )
    models.add_argument(
        "--no-fc-bias",
        action="store_true",
        help="a new drafter's fc has no bias, as vLLM wants it (default: it has one)",
    )
    models.add_argument("--out", required=True, metavar="DIR", help="where everything goes")
    models.add_argument(
        "--dtype", choices=DTYPES, help="to compute in; masters are float32 (float32 on CPU, else bfloat16)"
    )
    models.add_argument(
        "--attention",
        choices=("auto", *TRAINING_KERNELS),
        default="auto",
        help="of the target; auto: cudnn where it can run",
    )

    data = parser.add_argument_group("data")
    add_data_flags(data)
    data.add_argument("--packing", choices=PACKINGS, default="rows", help="none: one conversation a row (%(default)s)")
    data.add_argument(
        "--held-out", type=int, help=f"examples kept for evaluation; 0: none (1%% of them, at most {MOST_HELD_OUT})"
    )

    length = parser.add_argument_group("length (one of the first three; default: one epoch)")
    length.add_argument("--steps", type=int, help="updates")
    length.add_argument("--epochs", type=int, help="passes over the data")
    length.add_argument("--minutes", type=float, help="from the start of the process, compilation included")
    length.add_argument("--batch-size", type=int, default=16, help="rows of --max-length tokens (%(default)s)")
    length.add_argument("--accumulate", type=int, default=1, help="batches an update (%(default)s)")
    length.add_argument("--seed", type=int, default=0, help="of weights, order and noise (%(default)s)")

    optimizing = parser.add_argument_group("optimizer (AdamW)")
    optimizing.add_argument("--learning-rate", type=float, default=optimizer.learning_rate, help="peak (%(default)s)")
    optimizing.add_argument("--warmup", type=float, default=optimizer.warmup, help="share of all updates (%(default)s)")
    optimizing.add_argument("--beta1", type=float, default=optimizer.beta1, help="(%(default)s)")
    optimizing.add_argument("--beta2", type=float, default=optimizer.beta2, help="(%(default)s)")
    optimizing.add_argument("--weight-decay", type=float, default=optimizer.weight_decay, help="(%(default)s)")
    optimizing.add_argument("--clip", choices=CLIPPINGS, default=optimizer.clip, help="gradients by (%(default)s)")
    optimizing.add_argument("--clip-at", type=float, default=optimizer.clip_at, help="(%(default)s)")

    losses = parser.add_argument_group("loss")
    losses.add_argument("--feature-weight", type=float, default=weights.feature, help="of SmoothL1 (%(default)s)")
    losses.add_argument("--token-weight", type=float, default=weights.token, help="of cross-entropy (%(default)s)")
    losses.add_argument("--top-k-weight", type=float, default=weights.top_k, help="of top-K (%(default)s)")
    losses.add_argument("--top-k", type=int, default=weights.likeliest, help="K of top-K (%(default)s)")
    losses.add_argument("--noise", type=float, default=0.2, help="width of the noise on features (%(default)s)")
    losses.add_argument("--step-weights", metavar="W,W,...", help="of each draft position's loss (all 1)")

    running = parser.add_argument_group("running")
    running.add_argument("--mesh", help="such as data=2,fsdp=2,tensor=2 (default: all devices on data)")
    running.add_argument("--save-every", type=int, default=500, help="updates between checkpoints (%(default)s)")
    running.add_argument("--evaluate-every", type=int, default=500, help="updates between evaluations (%(default)s)")
    running.add_argument("--keep", type=int, default=2, help="checkpoints kept besides the best (%(default)s)")
    running.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    running.add_argument(
        "--no-tensorboard", dest="tensorboard", action="store_false", help="write no TensorBoard files"
    )

    hosts = parser.add_argument_group("several hosts (run the same command on each)")
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process; 'auto' on TPU pods and Slurm")
    hosts.add_argument("--processes", type=int, help="how many there are")
    hosts.add_argument("--process-id", type=int, help="number of this one, from 0")
    return parser


def connect(options: argparse.Namespace) -> None:
    """Joins the other processes, before anything touches a device."""
    if options.coordinator is None:
        if options.processes is not None or options.process_id is not None:
            raise InputError("--processes and --process-id need --coordinator")
        return
    if options.coordinator == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:  # it found no cluster, or not all that it must know of it
            raise InputError(
                f"--coordinator auto: this is no TPU pod or Slurm job ({first_line(error)}); "
                "give --coordinator HOST:PORT, --processes and --process-id"
            ) from error
        return
    if options.processes is None or options.process_id is None:
        raise InputError("--coordinator needs --processes and --process-id, or 'auto'")
    host, _, port = options.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise InputError(f"--coordinator {options.coordinator}: must be HOST:PORT, such as 10.0.0.1:1234, or 'auto'")
    if options.processes < 1:
        raise InputError(f"--processes {options.processes}: must be at least 1")
    if not 0 <= options.process_id < options.processes:
        raise InputError(f"--process-id {options.process_id}: must be from 0 to {options.processes - 1}")
    jax.distributed.initialize(options.coordinator, options.processes, options.process_id)


def check_flags(options: argparse.Namespace) -> None:
    """Raises InputError for numbers that cannot be, and for an --out that cannot be used."""
    for name in ("batch_size", "accumulate", "save_every", "evaluate_every", "keep"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.held_out is not None and options.held_out < 0:
        raise InputError(f"--held-out {options.held_out}: must not be negative")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"--seed {options.seed}: must be from 0 to {2**32 - 1}")
    if not 0 <= options.noise < float("inf"):
        raise InputError(f"--noise {options.noise}: must be at least 0")
    if options.no_fc_bias and options.init_from:
        raise InputError("--no-fc-bias: is for drafters that start from nothing; leave it or --init-from out")
    run_length(options)
    out = Path(options.out).expanduser()
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {options.out}: is no directory")
    if not options.resume and (out / "checkpoints").exists() and any((out / "checkpoints").iterdir()):
        raise InputError(f"--out {options.out}: holds checkpoints of another run; give --resume, or another --out")


def loss_weights(options: argparse.Namespace) -> LossWeights:
    try:
        steps = tuple(float(part) for part in options.step_weights.split(",")) if options.step_weights else ()
    except ValueError:
        raise InputError(f"--step-weights {options.step_weights!r}: must be numbers, such as 1,1,0.5") from None
    return LossWeights(options.feature_weight, options.token_weight, options.top_k_weight, options.top_k, steps)


def run_length(options: argparse.Namespace) -> RunLength:
    given = (options.steps, options.epochs, options.minutes)
    return RunLength(epochs=1) if given == (None, None, None) else RunLength(*given)


def check_settings(options: argparse.Namespace, out: Path) -> None:
    """Writes the settings of a new run; for a resumed one, refuses others than it began with."""
    settings = {name: value for name, value in vars(options).items() if name not in FREE_ON_RESUME}
    path = out / "settings.json"
    if options.resume and path.exists():
        before = read_json(path)
        for name, value in settings.items():
            if name in before and before[name] != value:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"cannot resume {out}: it began with {flag} {before[name]}, this is {flag} {value}")
    elif jax.process_index() == 0:
        write_json(path, settings)


def split(dataset: Dataset, options: argparse.Namespace) -> tuple[Dataset, Dataset | None]:
    """What to train on and what to evaluate on."""
    share = min(MOST_HELD_OUT, round(HELD_OUT_SHARE * len(dataset.examples)))
    count = share if options.held_out is None else options.held_out
    if not count:
        return dataset, None
    if count >= len(dataset.examples):
        raise InputError(f"--held-out {count}: there are {len(dataset.examples)} examples in all; hold out fewer")
    training, held_out = dataset.split(count, options.seed)
    # Weights are shares of what is trained on; of what is held out every example counts.
    return training, dataclasses.replace(held_out, sources=tuple(DataSource(s.name) for s in held_out.sources))


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run is made of, once it is loaded."""

    options: argparse.Namespace
    out: Path
    trainer: Trainer
    frozen: Params
    drafter: StartDrafter
    batches: Batches
    evaluation: Evaluation | None


def prepare(options: argparse.Namespace) -> Run:
    """Reads and loads everything. Raises InputError for what does not fit together."""
    check_flags(options)
    spans, weights, dtype = parse_spans(options.spans), loss_weights(options), options.dtype
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    weights.by_step(sum(spans))  # what can be refused is refused before anything is loaded
    kernel = choose_attention(options.attention, dtype)
    optimizer = OptimizerConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(OptimizerConfig)}
    )
    mesh = sharding.training_mesh(options.mesh or f"data={jax.device_count()}")
    if jax.process_count() > 1 and mesh.size < jax.device_count():
        raise InputError(f"--mesh {options.mesh}: has {mesh.size} devices; all {jax.device_count()} must be in it")
    if options.batch_size % (groups := sharding.row_groups(mesh)):
        raise InputError(
            f"--batch-size {options.batch_size}: must be a multiple of {groups}, the mesh's data axis times fsdp axis"
        )
    source = Source.open(options.target)
    dataset = dataset_from(options, tokenizer_for(source, options.tokenizer))
    check_features(dataset, source)
    if jax.process_index() == 0:
        print(dataset.summary, file=sys.stderr)
    config = target_config(source)
    dataset.check_tokens(config)
    dataset.check_length(config)
    training, held_out = split(dataset, options)
    config, params = load_frozen(source, mesh, dtype, features_stored=dataset.features is not None)
    fc_bias = not options.no_fc_bias
    drafter = start_drafter(config, spans, options.init_from, mesh, dtype, options.seed, fc_bias=fc_bias)
    objective = Objective(config, drafter.config, weights, options.noise, groups, kernel)
    trainer = Trainer(objective, optimizer, mesh, draft_specs(drafter.config), options.seed)
    frozen = {"target": params} | ({} if drafter.embed is None else {"embed": drafter.embed})
    batches = Batches(training, options.batch_size, packing=options.packing, seed=options.seed)
    evaluation = None
    if held_out is not None:
        evaluation = Evaluation(trainer, Batches(held_out, options.batch_size, packing=options.packing))
    out = Path(options.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    check_settings(options, out)
    return Run(options, out, trainer, frozen, drafter, batches, evaluation)


def export(run: Run, params: Params, name: str, notes: dict[str, Any]) -> None:
    """Writes a drafter in the published layout to `out`/name."""
    whole = NamedSharding(run.trainer.mesh, PartitionSpec())
    gathered = jax.jit(lambda tree: tree, out_shardings=whole)(
        params | ({} if run.drafter.embed is None else {"embed": run.drafter.embed})
    )
    if jax.process_index() == 0:
        notes = _origin(run) | notes
        save_draft(run.out / name, run.drafter.config, jax.device_get(gathered), notes=notes)


def _origin(run: Run) -> dict[str, Any]:
    """What a drafter's card tells of its training."""
    options = run.options
    origin = {"target": options.target, "init_from": run.drafter.origin, "data": list(options.data)}
    return origin | {"seed": options.seed, "evaluation": last_line(run.out / EVALUATIONS)}


def compile_programs(run: Run, state: TrainState):
    """The update for this run's shapes, and beside it the evaluation: compilers use one core for the most part."""
    shape = [run.batches.batch(0, 0)] * run.options.accumulate
    with ThreadPoolExecutor(1) as beside, jax.set_mesh(run.trainer.mesh):
        evaluation = beside.submit(run.evaluation.compile, state.params, run.frozen) if run.evaluation else None
        rows = run.trainer.put_rows(stack(shape))
        update = run.trainer.jit_update().lower(state, run.frozen, rows, np.float32(0)).compile()
        if evaluation:
            evaluation.result()
    return update


def train(run: Run, process_started: float) -> tuple[Path, str]:
    """Trains to the end, or until SIGTERM: the drafter's directory, and "done" or "stopped"."""
    options, checkpoints = run.options, Checkpoints(run.out / "checkpoints", keep=run.options.keep)
    try:
        state = run.trainer.start(run.drafter.params)
        meta = {"position": None, "seconds": [0.0, 0.0], "best": None}
        if options.resume and checkpoints.latest is not None:
            state, meta = checkpoints.restore(run.trainer.abstract_state())
        meta |= {"spans": list(run.drafter.config.spans), "draft": run.drafter.config.to_hf(), "seed": options.seed}
        logs = _open_logs(run, int(state.step)) if jax.process_index() == 0 else None
        feed = Feed(run.trainer, run.batches, options.accumulate, meta["position"])
        update = compile_programs(run, state)
        length = run_length(options)
        updates = length.updates(run.batches, options.accumulate)
        loop = Loop(
            run.trainer,
            Schedule(length, updates, run.trainer.optimizer, process_started, tuple(meta["seconds"])),
            feed,
            run.frozen,
            checkpoints,
            run.evaluation,
            logs,
            Pace(options.save_every, options.evaluate_every),
            meta,
            on_best=lambda params, step: export(run, params, "best", {"step": step}),
            best=meta["best"],
        )
        try:
            state, ending = loop.run(state, update)
        finally:
            feed.close()
            if logs:
                logs.updates.close(), logs.evaluations.close()
        export(run, state.params, "drafter", {"step": int(state.step)})
    finally:
        checkpoints.close()
    return run.out / "drafter", ending


def _open_logs(run: Run, step: int) -> Logs:
    resumed = step if run.options.resume else None
    options = {"resume_step": resumed, "tensorboard": run.options.tensorboard}
    return Logs(MetricsLog(run.out, **options), MetricsLog(run.out, filename=EVALUATIONS, **options))


def run(options: argparse.Namespace, started: float) -> None:
    """Everything after the flags. started: the moment, on the monotonic clock, from which --minutes counts."""
    connect(options)
    directory, ending = train(prepare(options), started)
    if jax.process_index() == 0:
        if ending == "stopped":
            print("stopped by SIGTERM; the same command with --resume goes on", file=sys.stderr)
        print(f"{directory}: drafter with spans {format_spans(parse_spans(options.spans))}, for infer.generate --draft")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`. Called with arguments, it is one of several runs in a process."""
    started = STARTED if arguments is None else time.monotonic()
    options = build_parser().parse_args(arguments)
    # Several hosts would have to share the directory, and may not: then only one that JAX was told of is used.
    with kept_programs() if options.coordinator is None else contextlib.nullcontext():
        return exit_status(lambda options: run(options, started), options)


if __name__ == "__main__":
    sys.exit(main())
