"""The command that writes drafters for other programs.

    python -m convert.to_hf CHECKPOINT OUT --format poss|eagle|vllm|sglang

What each program wants, and what it cannot run, is in `engines`.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.engines import FORMATS, only_specialist
from convert.load import in_numpy, load_draft, target_plan
from convert.output import new_directory
from convert.save import DTYPES, save_draft, stored_dtype
from poss_jax.config import DraftConfig, format_spans, parse_spans
from poss_jax.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m convert.to_hf`."""
    parser = OneLineParser(prog="python -m convert.to_hf", description="Write a drafter for another program.")
    parser.add_argument("checkpoint", help="drafter: a directory, a hub id, or the --out of a training run")
    parser.add_argument("out", help="new directory")
    parser.add_argument("--format", choices=FORMATS, default="poss", help="who shall read it (poss: we and PosS' code)")
    parser.add_argument("--spans", help="draft positions of each specialist, such as 3,3, where its config lacks them")
    parser.add_argument("--specialist", type=int, help="only this one of several specialists, from 0")
    parser.add_argument("--target", help="write its embedding too, where the drafter has none: EAGLE's code needs one")
    parser.add_argument("--dtype", choices=DTYPES, help="round weights to this type (default: as they are)")
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    source = Source.open(options.checkpoint)
    config, params = load_draft(source, in_numpy, options.spans and parse_spans(options.spans))
    dtype, notes = options.dtype or stored_dtype(params), source.config.get("notes")
    if options.target and "embed" not in params:
        params["embed"] = embedding_of(options.target, config)
    if options.specialist is not None:
        config, params, notes = only_specialist(config, params, notes, options.specialist)
    with new_directory(options.out) as unfinished:
        save_draft(unfinished, config, params, dtype=dtype, notes=notes, layout=options.format)
    for note in notes_on_embedding(options.format, "embed" in params):
        print(f"note: {note}", file=sys.stderr)
    print(f"{options.out}: drafter with spans {format_spans(config.spans)}, {dtype}, in the format {options.format}")


def notes_on_embedding(layout: str, there: bool) -> list[str]:
    """What a user may not expect."""
    if there and layout in ("vllm", "sglang"):
        return [f"{layout} drafts with the target's embedding; the drafter's own is left out"]
    if not there and layout == "poss":
        return ["the drafter uses the target's embedding; the authors' code needs it in the file: give --target MODEL"]
    return []


def embedding_of(target: str, config: DraftConfig) -> np.ndarray:
    """The embedding of a target, [v, h]. Raises InputError where that is of other sizes than the drafter's."""
    source = Source.open(target)
    _, entries, tensors = target_plan(source)
    (entry,) = (entry for entry in entries if entry.path == ("embed",))
    if entry.spec.shape != (config.vocab_size, config.block.hidden_size):
        raise InputError(f"--target {target}: has an embedding of {entry.spec.shape}; the drafter is another target's")
    return np.asarray(tensors.parameter(entry))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
