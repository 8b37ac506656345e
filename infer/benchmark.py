"""`python -m infer.benchmark`: how much drafters bring on sets of prompts, measured so that it can be relied on.

Everything measured is in --out at once. The same command goes on where it was interrupted, or where --minutes ended it,
and never measures a thing twice; other sets, drafters, levels, temperatures and more seeds may be added. It ends with a
table, and with a report in --out.

With --shape it times rounds of a model with random weights instead: see `infer.rounds`.
"""

import argparse
import datetime
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.load import draft_plan
from infer import report, rounds, tables
from infer.benchmark_jobs import Jobs, Outline
from infer.benchmark_join import conflict, join
from infer.benchmark_store import PLAIN, Store, Study
from infer.clock import Clock, Stopped
from infer.engine import Generator
from infer.loading import DTYPES, Models, load_models, with_draft
from infer.programs import kept_programs
from infer.prompt_sets import PromptSet, read_prompt_sets
from infer.settings import Settings, add_attention_flag, add_width_flags
from infer.timing import Runner, bytes_of, peak_memory
from poss_jax.config import DraftConfig, parse_spans
from poss_jax.errors import InputError

NAMED = {  # flags of names and values: an example, and what to do instead of naming one twice
    "--drafts": ("poss3=DIR", "training seeds of one drafter are written NAME=DIR,DIR"),
    "--spans": ("poss3=3,3", "the spans of a drafter are one list"),
}
REPORT_SECONDS = 30.0  # kept of --minutes for the table and the report


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m infer.benchmark",
        description=__doc__.split("\n\n")[0].split(": ", 1)[1],
        epilog="--shape SHAPE --random-weights times rounds of a model of a known shape instead; with --help, how.",
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    what.add_argument(
        "--drafts",
        nargs="+",
        required=True,
        metavar="NAME=DIR",
        help="drafters under names of your choice (DIR also the --out of train.run or a hub id); NAME=DIR,DIR are "
        "training seeds of one drafter",
    )
    what.add_argument(
        "--spans",
        nargs="+",
        default=[],
        metavar="NAME=SPANS",
        help="draft positions of each specialist, such as poss3=3,3, where a drafter's config does not say",
    )
    what.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and caches (%(default)s)")
    add_attention_flag(what)
    on = parser.add_argument_group("on what")
    on.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="sets: JSON lines with turns, prompt or messages, or hub data sets; question.jsonl is called as its "
        "directory",
    )
    on.add_argument("--limit", type=int, help="take the first so many questions of each set (default: all)")
    on.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0], help="0 is greedy (0 1)")
    on.add_argument("--levels", nargs="+", type=int, default=[6], help="levels of the draft tree (6)")
    on.add_argument("--seeds", type=int, default=1, help="sampling seeds at temperatures above 0 (%(default)s)")
    on.add_argument("--max-new-tokens", type=int, default=128, help="of each answer (%(default)s)")
    add_width_flags(on)
    how = parser.add_argument_group("how")
    how.add_argument("--batch-size", type=int, default=16, help="prompts decoded together for acceptance (%(default)s)")
    how.add_argument(
        "--timing-prompts", type=int, default=10, help="questions of each set that are timed (%(default)s)"
    )
    how.add_argument(
        "--timing-temperature",
        nargs="+",
        type=float,
        help="time at these of the temperatures only (default: at all of them)",
    )
    how.add_argument("--timing-repeats", type=int, default=3, help="timings of a prompt, for the median (%(default)s)")
    how.add_argument("--drift-prompts", type=int, default=10, help="questions of each set for drift (%(default)s)")
    how.add_argument("--minutes", type=float, help="end in time, with what there is; the same command goes on")
    how.add_argument("--commit", help="what the report says was run (default: asked of git)")
    how.add_argument("--out", required=True, metavar="DIR", help="for records and the report")
    return parser


def check_flags(options: argparse.Namespace) -> None:
    """Numbers that make no sense are refused before anything is loaded. Trees and temperatures: `Settings` does."""
    least = {"limit": 1, "seeds": 1, "batch_size": 1, "timing_repeats": 1, "timing_prompts": 0, "drift_prompts": 0}
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise InputError(f"--{name.replace('_', '-')} {value} must be at least {lowest}")
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise InputError(f"--minutes {options.minutes} must be a number above 0")
    for name in ("temperature", "levels"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise InputError(f"--{name} names {max(values, key=values.count)} twice")
    if options.timing_temperature is not None and not options.timing_prompts:
        raise InputError("--timing-temperature needs prompts to time; leave it out, or --timing-prompts 0")
    for temperature in timed_temperatures(options):
        if temperature not in options.temperature:
            raise InputError(f"--timing-temperature {temperature} is not among --temperature; add it there")
    for temperature in options.temperature:
        for levels in options.levels:
            settings_from(options, temperature=temperature, levels=levels)


def timed_temperatures(options: argparse.Namespace) -> list[float]:
    """Empty where nothing is timed."""
    if not options.timing_prompts:
        return []
    return options.temperature if options.timing_temperature is None else options.timing_temperature


def settings_from(options: argparse.Namespace, **changes: Any) -> Settings:
    """Lengths and the tree."""
    names = ("max_new_tokens", "total_nodes", "draft_top_k")
    return Settings(**{name: getattr(options, name) for name in names}, **changes)


def parse_named(texts: Sequence[str], flag: str) -> dict[str, str]:
    """["a=x", "b=y"] gives {"a": "x", "b": "y"}. Raises InputError naming what is not of this form, or is twice."""
    found: dict[str, str] = {}
    example, remedy = NAMED[flag]
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{flag} {text!r} must be a name and a value, such as {example}")
        if name in found:
            raise InputError(f"{flag} names {name} twice; {remedy}")
        found[name] = value
    return found


def named_drafters(options: argparse.Namespace) -> dict[str, tuple[list[str], str | None]]:
    """--drafts and --spans: of each name the directories, one a training seed, and the spans if given.

    The target takes long to load, so all that can be told without it raises InputError here: also directories without
    a drafter, and spans that do not fit it.
    """
    drafts, spans = parse_named(options.drafts, "--drafts"), parse_named(options.spans, "--spans")
    if PLAIN in drafts:
        raise InputError(f"--drafts: {PLAIN} is what decoding without a drafter is called; choose another name")
    for name in spans.keys() - drafts.keys():
        raise InputError(f"--spans {name}={spans[name]}: --drafts has no {name}")
    named = {name: (directories.split(","), spans.get(name)) for name, directories in drafts.items()}
    for name, (directories, given) in named.items():
        if len({_drafter_config(name, directory, given) for directory in directories}) > 1:
            raise InputError(f"--drafts {name}: training seeds of one drafter must have the same spans and shape")
    return named


def _drafter_config(name: str, directory: str, spans: str | None) -> DraftConfig:
    """Errors about a drafter advise to pass --spans 2,2: here spans have a name in front."""
    try:
        return draft_plan(Source.open(directory), spans and parse_spans(spans))[0]
    except InputError as error:
        raise InputError(str(error).replace("such as --spans ", f"such as --spans {name}=")) from None


def load_drafters(
    named: dict[str, tuple[list[str], str | None]], models: Models
) -> dict[tuple[str, int], tuple[Generator, dict]]:
    """By name and training seed: the drafter with the target, and what the report says of it."""
    loaded = {}
    for name, (directories, spans) in named.items():
        for training_seed, directory in enumerate(directories):
            with_drafter = with_draft(models, directory, spans)
            loaded[name, training_seed] = (Generator(with_drafter), describe_drafter(directory, with_drafter))
    return loaded


def describe_drafter(directory: str, models: Models) -> dict[str, Any]:
    """What identifies a trained drafter, and what it costs. Its own embedding is counted where it has one."""
    source, draft = Source.open(directory), models.draft
    notes = source.config.get("notes")
    return {
        "directory": "/".join(source.path.parts[-2:]) if Path(directory).expanduser().exists() else directory,
        "fingerprint": _fingerprint(source.path),
        "spans": list(draft.config.spans),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(draft.params)),
        "weight_bytes": bytes_of(draft.params),
        "training_steps": notes.get("step") if isinstance(notes, dict) else None,
    }


def _fingerprint(path: Path) -> str:
    """Of the weights, by which a changed drafter is known."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".bin"))
    for file in files:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def describe(
    options: argparse.Namespace, sets: Sequence[PromptSet], models: Models, drafters, limited
) -> dict[str, Any]:
    """`study.json`. Under `fixed` is what no record of the directory may differ in."""
    target = Source.open(options.target).path
    return {
        "fixed": {
            "target": _fingerprint(target),
            "dtype": options.dtype,
            "attention": models.kernel,
            "max_new_tokens": options.max_new_tokens,
            "total_nodes": options.total_nodes,
            "draft_top_k": options.draft_top_k,
        },
        "target": {"name": target.name, "weight_bytes": bytes_of(models.target.params)},
        "sets": {prompts.name: {"fingerprint": prompts.fingerprint} for prompts in sets},
        "questions": {prompts.name: {q.id: q.turns for q in prompts.questions} for prompts in limited},
        "drafters": {
            name: [about for (other, _), (_, about) in drafters.items() if other == name]
            for name in dict.fromkeys(name for name, _ in drafters)
        },
        "temperatures": options.temperature,
        "levels": options.levels,
        "seeds": options.seeds,
        "timing_prompts": options.timing_prompts,
        "timed_temperatures": timed_temperatures(options),
        "drift_prompts": options.drift_prompts,
        "runs": [],
    }


def go_on(before: dict[str, Any] | None, now: dict[str, Any], out: str) -> dict[str, Any]:
    """The description of a directory that is gone on with. Raises InputError for what would not be comparable."""
    if before is None:
        return now
    found = conflict(before, now)
    if found is None:
        return join(before, now)
    if found.field == "fixed":
        flag = "--" + found.name.replace("_", "-")
        raise InputError(f"--out {out} was begun with another {flag} ({found.before}); give that, or another --out")
    if found.field == "sets":
        raise InputError(f"--prompts: {found.name} is not what it was when --out {out} was begun; take another --out")
    raise InputError(f"--drafts {found.name}: not the drafter that --out {out} was begun with; rename it")


def this_run(options: argparse.Namespace, drafters: Sequence[str]) -> dict[str, Any]:
    """What the report says of one run of the command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": options.commit or _commit(),
        "device": device_name(),
        "jax": jax.__version__,
        "drafters": list(drafters),
        "flags": {
            name.replace("_", "-"): value
            for name, value in vars(options).items()
            if name not in ("target", "drafts", "prompts", "out", "commit") and value not in (None, [])
        },
        "peak_bytes": None,
        "ended": "was interrupted",
    }


def _commit() -> str:
    """Of the checkout that this file is in, with + where it was changed."""
    here = Path(__file__).parent
    try:
        asked = [["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
        commit, changes = (
            subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return commit + ("+ (with changes)" if changes else "")


def device_name() -> str:
    """Kind of the first device, and how many there are."""
    devices = jax.local_devices()
    return devices[0].device_kind + (f" (1 of {len(devices)})" if len(devices) > 1 else "")


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    started = time.monotonic()
    check_flags(options)
    sets = read_prompt_sets(options.prompts)
    limited = [PromptSet(prompts.name, prompts.questions[: options.limit]) for prompts in sets]
    named = named_drafters(options)
    models = load_models(options.target, dtype=options.dtype, attention=options.attention)
    drafters = load_drafters(named, models)
    runners = {(PLAIN, 0): Runner(Generator(models))}
    runners |= {key: Runner(generator) for key, (generator, _) in drafters.items()}
    counts = {name: sum(other == name for other, _ in drafters) for name, _ in drafters}
    outline = Outline(
        tuple(limited),
        counts,
        tuple(options.temperature),
        tuple(options.levels),
        options.seeds,
        options.timing_prompts,
        tuple(timed_temperatures(options)),
        options.drift_prompts,
    )
    with Store(options.out) as store:
        study = go_on(store.description(), describe(options, sets, models, drafters, limited), options.out)
        study["runs"].append(this_run(options, list(counts)))
        store.describe(study)
        for note in dict.fromkeys(note for generator, _ in drafters.values() for note in generator.notes):
            print(f"note: {note}", file=sys.stderr)
        jobs = Jobs(
            outline, store, runners, settings_from(options), options.batch_size, options.timing_repeats, device_name()
        )
        study["runs"][-1]["ended"] = ended = _work(jobs, options, started)
        study["runs"][-1]["peak_bytes"] = peak_memory()
        store.describe(study)
    finished = Study.read(options.out)
    path = report.write(finished, Path(options.out).expanduser())
    print(tables.overview(finished))
    if ended != "done":
        print(f"partial: {ended}; the same command goes on", file=sys.stderr)
    print(f"{path}: the report; python -m infer.study --help has the tables")
    if "SIGINT" in ended:
        raise KeyboardInterrupt  # a shell's loop is to end as well


def _work(jobs: Jobs, options: argparse.Namespace, started: float) -> str:
    """Works to the end, "done", or until it is stopped: why."""
    reserve = 0.0 if options.minutes is None else min(REPORT_SECONDS, 30 * options.minutes)
    keys = jobs.outline.keys()
    there = sum(key in jobs.store for key in keys)
    there += sum(key.kind == "split" and key.drafter in jobs.outline.drafters for key in jobs.store.records)
    size = len(keys) + jobs.outline.splits()
    with (
        Clock(options.minutes, started, reserve) as clock,
        tqdm(total=size, initial=there, unit="record", smoothing=0.05, file=sys.stderr) as progress,
    ):
        try:
            jobs.run(clock, progress)
        except Stopped as reason:
            return str(reason)
    return "done"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if any(argument.split("=")[0] == "--shape" for argument in arguments):
        return rounds.main(arguments)
    options = build_parser().parse_args(arguments)
    with kept_programs():
        return exit_status(run, options)


if __name__ == "__main__":
    sys.exit(main())
