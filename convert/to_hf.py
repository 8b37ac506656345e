"""The command that writes drafters for other programs.

python -m convert.to_hf CHECKPOINT OUT --format poss|eagle|vllm|sglang
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.engines import FORMATS, only_specialist
from convert.load import in_numpy, load_draft
from convert.output import new_directory
from convert.save import DTYPES, save_draft, stored_dtype
from poss_jax.config import format_spans, parse_spans
from poss_jax.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m convert.to_hf`."""
    parser = OneLineParser(prog="python -m convert.to_hf", description="Write a drafter for another program.")
    parser.add_argument("checkpoint", help="drafter: a directory, a hub id, or the --out of a training run")
    parser.add_argument("out", help="new directory")
    parser.add_argument("--format", choices=FORMATS, default="poss", help="who shall read it (poss: we and PosS' code)")
    parser.add_argument("--spans", help="draft positions of each specialist, such as 3,3, where its config lacks them")
    parser.add_argument("--specialist", type=int, help="only this one of several specialists, from 0")
    parser.add_argument("--dtype", choices=DTYPES, help="round weights to this type (default: as they are)")
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    source = Source.open(find_drafter(options.checkpoint))
    config, params = load_draft(source, in_numpy, options.spans and parse_spans(options.spans))
    dtype = options.dtype or stored_dtype(params)
    if options.specialist is not None:
        config, params = only_specialist(config, params, options.specialist)
    with new_directory(options.out) as unfinished:
        save_draft(unfinished, config, params, dtype=dtype, notes=source.config.get("notes"), layout=options.format)
    print(f"{options.out}: drafter with spans {format_spans(config.spans)}, {dtype}, in the format {options.format}")


def find_drafter(name: str) -> str | Path:
    """The drafter's directory, which a training run has inside its own."""
    path = Path(name).expanduser()
    if not path.is_dir() or (path / "config.json").exists():
        return name
    if (path / "drafter" / "config.json").exists():
        return path / "drafter"
    if (path / "checkpoints").exists():
        raise InputError(f"{name}: this run has not written its drafter yet; end it with train.run --resume")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
