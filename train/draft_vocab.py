"""The command that chooses the tokens a drafter may propose: the most frequent ones in the target's replies.

    python -m train.draft_vocab --target MODEL --data own.jsonl --size 32000 --out vocab.json

Best counted on the target's own answers (`train.regenerate`), for those are what drafts are compared with.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.load import target_config
from convert.tokenizer import tokenizer_for
from infer.draft_vocab import write_draft_vocab
from infer.loading import find_eos_ids
from poss_jax.errors import InputError
from train.data import add_data_flags, dataset_from
from train.examples import Dataset


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m train.draft_vocab`."""
    parser = OneLineParser(prog="python -m train.draft_vocab", description="Choose the tokens a drafter may propose.")
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    add_data_flags(parser)
    parser.add_argument("--size", type=int, default=32000, help="how many tokens to keep (%(default)s)")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write, for infer.generate --draft-vocab")
    return parser


def token_counts(dataset: Dataset, vocab_size: int) -> np.ndarray:
    """How often each token [vocab_size] of the vocabulary is one that supervised rows predict."""
    counts = np.zeros(vocab_size, np.int64)
    for example in dataset.examples:
        predicted = example.tokens[2:][example.supervised[:-2].astype(bool)]  # row i predicts token i + 2
        counts += np.bincount(predicted, minlength=vocab_size)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Sequence[int] = ()) -> np.ndarray:
    """The `size` most frequent token ids, ascending, `always` among them. Of equal counts the lower id is kept, which
    in byte-pair vocabularies is the older merge.
    """
    first = np.isin(np.arange(len(counts)), always)
    order = np.lexsort((np.arange(len(counts)), -counts, ~first))
    return np.sort(order[:size])


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    source = Source.open(options.target)
    config, tokenizer = target_config(source), tokenizer_for(source, options.tokenizer)
    if not 1 <= options.size <= config.vocab_size:
        raise InputError(f"--size {options.size}: must be from 1 to the {config.vocab_size} tokens of the target")
    if Path(options.out).expanduser().exists():
        raise InputError(f"--out {options.out}: is there already; give another file, or remove it")
    dataset = dataset_from(options, tokenizer)
    dataset.check_tokens(config)
    print(dataset.summary)
    counts = token_counts(dataset, config.vocab_size)
    ids = most_frequent(counts, options.size, find_eos_ids(source, tokenizer))
    covered = float(counts[ids].sum() / counts.sum())
    notes = {"data": list(options.data), "counted": int(counts.sum()), "covered": covered}
    write_draft_vocab(options.out, ids, config.vocab_size, notes)
    print(
        f"{options.out}: {len(ids):,} of {config.vocab_size:,} tokens, which are {covered:.2%} of "
        f"{counts.sum():,} tokens of replies; {np.count_nonzero(counts):,} different ones occur"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
