"""`python -m infer.study`: tables of what `infer.benchmark` has measured, from its directory. Nothing is run again."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from convert.command import OneLineParser, exit_status
from infer import report, tables
from infer.benchmark_join import join_studies
from infer.benchmark_store import Study
from infer.summary import Results
from infer.tables import Table


def _acceptance(results: Results) -> list[Table]:
    return [tables.acceptance(results), tables.spreads(results), tables.losslessness(results)]


STUDIES: dict[str, tuple[str, Callable[[Results], list[Table]]]] = {
    "overall": ("one line for each drafter and setting", lambda results: [tables.overall(results)]),
    "sets": ("the paper's table", lambda r: [tables.by_set(r, setting) for setting in r.settings]),
    "tests": ("which drafter beats which, and how sure that is", lambda results: [tables.comparisons(results)]),
    "ablation": ("spans and levels", tables.ablation),
    "acceptance": ("by draft position; spread; losslessness", _acceptance),
    "tasks": ("by set and category", tables.tasks),
    "time": ("throughput, speed-up, draft and verify", lambda results: [tables.times(results), tables.parts(results)]),
    "specialists": ("memory, latency and break-even", lambda results: [tables.specialists(results)]),
    "drift": ("features moving away from the target's", lambda results: [tables.drift(results)]),
}


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m infer.study", description=__doc__.split(": ", 1)[1])
    studies = parser.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name, (about, _) in STUDIES.items():
        _add(studies, name, about)
    _add(studies, "report", "writes the page and the figures anew")
    about = "puts directories of several devices, drafters, levels or temperatures together"
    joined = _add(studies, "join", about, "a new directory, with a report of all of them")
    joined.add_argument("parts", nargs="+", metavar="PART", help="a directory that infer.benchmark wrote to")
    return parser


def _add(studies, name: str, about: str, out: str = "the directory that infer.benchmark wrote to") -> OneLineParser:
    parser = studies.add_parser(name, help=about, description=about)
    parser.add_argument("--out", required=True, metavar="DIR", help=out)
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    if options.study == "join":
        join_studies(options.parts, [Study.read(part) for part in options.parts]).write(options.out)
    study = Study.read(options.out)
    if options.study in ("join", "report"):
        print(report.write(study, Path(options.out).expanduser()))
        return
    results = Results(study)
    print("\n\n".join(table.as_text() for table in STUDIES[options.study][1](results)))
    if options.study == "tests":
        print("\n" + "\n".join(tables.verdicts(results.comparisons())))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
