"""Training examples: token ids of rendered conversations, and which rows of the draft unroll are supervised.

Which rows. At row i stands (embedding of token i + 1, feature i); what is predicted there is feature i + 1, whose head
gives the law of token i + 2. A row is supervised if that token i + 2 belongs to a reply or ends one, and token i + 1
is there, since it is the row's own input and its feature is what the prediction is compared with:

    token       0 bos   1 user   2 "w1"  3 eot   4 assistant  5 "w2"   6 "w3"  7 eot
    row         0       1        2       3       4            5        6       7
    its law of  2       3        4       5       6            7        8       9
    supervised  no      no       no      yes     yes          yes      no      no

So the supervised predictions are the reply's tokens and its end-of-turn token, with one shift in every turn. A reply
cut at the greatest length keeps its last row: token i + 2 was cut, but the target's law of it is known. The same holds
at the end of a plain text, all of which is supervised: rows 0 to n - 2 of n tokens. The golden training batch is such
a case: supervised up to row n - 2, where token i + 2 is from 7 (or 8) on.

`python -m train.data show` prints examples for a person to check, `prepare` writes them to disk (`train.store`), so
that text is read, cleaned and tokenised once.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from convert.checkpoint import first_line, locate
from convert.command import OneLineParser, exit_status
from convert.tokenizer import load_tokenizer
from poss_jax.errors import InputError
from train.conversations import (
    DUPLICATE,
    DataSource,
    Dropped,
    Messages,
    Summary,
    clean,
    parse_sources,
    read_records,
)
from train.examples import NO_REPLY_LEFT, Dataset, Example, join
from train.store import is_prepared, open_prepared, write_prepared

ENCODED_TOGETHER = 256  # texts given to the tokenizer at once, which spreads them over the cores

# Why cleaned records go.
REFUSED = "refused by the chat template"
REWRITTEN = "the chat template alters or reorders turns"

# What the tokenizer makes of this tells whether a prepared data set was made with the same one.
PROBE = "Hello, world! It's 1234567 o'clock.\n\n  def f(x): return déjà_vu  # 你好"


@dataclasses.dataclass(frozen=True)
class Pending:
    """A cleaned record that waits for the tokenizer. messages: None for a plain text."""

    text: str
    messages: Messages | None
    record: int


class Encoder:
    """From conversations and texts to examples of at most `max_length` tokens."""

    def __init__(self, tokenizer, max_length: int, chat_template: str | None = None):
        if tokenizer is None:
            raise InputError("the target has no tokenizer, so it cannot read text; pass --tokenizer DIR")
        if not tokenizer.is_fast:
            raise InputError("the tokenizer has no tokenizer.json, which tells where in the text each token stands")
        _check_length(max_length)
        self.tokenizer, self.max_length = tokenizer, max_length
        self.chat_template = chat_template or tokenizer.chat_template
        self._chosen = {"chat_template": chat_template} if chat_template else {}

    def render(self, messages: Messages, *, opened: bool = False) -> str:
        """The text of a conversation; `opened`: with the beginning of an assistant's turn behind it."""
        if not self.chat_template:
            raise InputError("the target's tokenizer has no chat template; pass --chat-template FILE")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opened, **self._chosen
            )
        except Exception as error:  # a template is foreign code and raises what it likes
            raise Dropped(f"{REFUSED} ({first_line(error)[:80]})") from error

    def encode(self, pending: Sequence[Pending], summary: Summary) -> Iterator[Example]:
        """Examples of those that can be used, the others counted in the summary."""
        for plain in (False, True):
            group = [item for item in pending if (item.messages is None) == plain]
            if not group:
                continue
            # A rendered text holds the special tokens that it is to have; a plain one gets the tokenizer's.
            encoded = self.tokenizer(
                [item.text for item in group],
                add_special_tokens=plain,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            for item, ids, offsets in zip(group, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                try:
                    yield self._example(item, ids, offsets, summary)
                except Dropped as reason:
                    summary.dropped_records[str(reason)] += 1

    def _example(self, item: Pending, ids: list[int], offsets: list, summary: Summary) -> Example:
        if item.messages is None:
            begin = self.tokenizer.bos_token_id
            ids = ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids  # the text begins with one too
            in_reply = np.ones(len(ids) + 1, bool)
        else:
            in_reply = np.zeros(len(ids) + 1, bool)  # one more: what follows the last token is no reply
            kept = offsets[: self.max_length + 1]  # the token behind the cut decides about the last row
            starts, ends = np.array(kept, np.int64).reshape(-1, 2).T
            for start, end in self.reply_spans(item.messages, item.text, limit=ends.max(initial=0)):
                in_reply[: len(kept)] |= (starts < end) & (ends > start)
        tokens = np.array(ids[: self.max_length], np.int32)
        supervised = supervised_rows(in_reply, len(tokens))
        if not supervised.any():
            raise Dropped(NO_REPLY_LEFT)
        summary.kept += 1
        summary.truncated += len(ids) > len(tokens)
        summary.tokens += len(tokens)
        summary.supervised += int(supervised.sum())
        return Example(tokens, supervised, source=0, record=item.record)

    def reply_spans(self, messages: Messages, text: str, limit: int) -> Iterator[tuple[int, int]]:
        """Characters [start, end) of each reply in the rendered `text`, its end-of-turn included, up to `limit`.

        A turn lies between the renderings up to it and with it. Where the first is not the beginning of the whole, or
        the turn stands otherwise in it, the template alters or reorders turns, and no mask can be trusted. The second
        may have more before the reply, as Qwen3's template has in the last turn.
        """
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, prompt = self.render(messages[:index]), self.render(messages[:index], opened=True)
            # Phi-3's template ends every text that is no prompt with the end of sequence; the whole has it once.
            closing = "" if text.startswith(before) or prompt.startswith(before) else self.tokenizer.eos_token or ""
            before = before.removesuffix(closing)
            if not text.startswith(before):
                raise Dropped(REWRITTEN)
            after = self.render(messages[: index + 1]).removesuffix(closing)
            # What the prompt for a generation adds is no part of the reply. A template without such a prompt begins
            # the turn itself, and one may put more there ("<think>") than finished turns have.
            opened = _common_length(text, prompt, len(before))
            reply = message["content"].strip()
            latest = min(_common_length(text, after, len(before)) + len(reply), len(after))
            found = text.find(reply, opened, latest)
            found = text.find(reply, len(before), latest) if found < 0 else found
            if found < 0:
                raise Dropped(REWRITTEN)
            start = opened if len(before) < opened <= found else found
            if start >= limit:
                return
            yield start, _turn_end(text, after, reply, found)


def _turn_end(text: str, after: str, reply: str, found: int) -> int:
    """Where the turn of the reply that was found in `text` ends; `after` ends with the same turn."""
    place, end = after.find(reply, found), found + len(reply)
    while place >= 0:  # the reply may stand in the template's own words too
        tail = after[place + len(reply) :]
        if text.startswith(tail, end):
            return end + len(tail.rstrip())  # a line break after the end-of-turn token is never generated
        place = after.find(reply, place + 1)
    raise Dropped(REWRITTEN)


def _check_length(max_length: int) -> None:
    if max_length < 3:
        raise InputError(f"--max-length {max_length}: at least 3 tokens make a supervised row")


def _common_length(text: str, other: str, known: int) -> int:
    """How many characters two texts have in common from their beginning; the first `known` are taken to be."""
    return known + len(os.path.commonprefix([text[known : len(other)], other[known:]]))


def supervised_rows(in_reply: np.ndarray, length: int) -> np.ndarray:
    """[length] bool: row i counts if token i + 2 is of a reply and token i + 1 is there.

    in_reply: bool for every token, also those cut off behind `length`, and one more for what follows them all.
    """
    rows = np.zeros(length, bool)
    rows[: length - 1] = in_reply[2 : length + 1]
    return rows


def load_dataset(
    sources: Sequence[DataSource],
    tokenizer,
    *,
    max_length: int = 2048,
    chat_template: str | None = None,
    records: int | None = None,
) -> Dataset:
    """Reads, cleans and encodes all sources. `records`: read that many of each at most.

    A source may be the directory of a prepared data set, whose examples are taken as they are, or cut at `max_length`;
    if all are, there need be no tokenizer. Duplicates go: conversations and texts that were met before, and examples,
    prepared ones too, with the tokens of one of an earlier source.

    Raises InputError where a source cannot be read at all or gives no example, or two do not go together.
    """
    _check_length(max_length)
    encoder, parts = None, []
    seen: set[bytes] = set()
    met: set[bytes] = set()
    for source in sources:
        if is_prepared(source.name):
            part = _load_prepared(source, tokenizer, max_length, records)
        else:
            encoder = encoder or Encoder(tokenizer, max_length, chat_template)
            part = _load_records(source, encoder, seen, records)
        part = part.without(met) if len(sources) > 1 else part
        if not part.examples:
            reasons = part.summary.dropped_records.most_common(1)
            raise InputError(f"{source.name}: gives no example ({reasons[0][0] if reasons else 'holds no records'})")
        parts.append((source.name, part if source.weight is None else part.weighted(source.weight)))
    return join(parts, max_length)


def tokenizer_probe(tokenizer) -> tuple[int, ...]:
    """What the tokenizer makes of a fixed text."""
    return tuple(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def _load_prepared(source: DataSource, tokenizer, max_length: int, records: int | None) -> Dataset:
    if records is not None:
        raise InputError(f"{source.name}: is prepared already; pass --records where it is prepared")
    dataset = open_prepared(source.name)
    if tokenizer is not None and dataset.probe and dataset.probe != tokenizer_probe(tokenizer):
        raise InputError(f"{source.name}: was prepared with another tokenizer; prepare it again with this one")
    return dataset.cut(max_length)


def _load_records(source: DataSource, encoder: Encoder, seen: set[bytes], records: int | None) -> Dataset:
    """A data set of this source alone."""
    examples, summary = [], Summary()
    kept = _prepare(itertools.islice(read_records(source.name), records), encoder, seen, summary)
    with tqdm(desc=Path(source.name).name, unit=" examples", file=sys.stderr, disable=None) as progress:
        while group := list(itertools.islice(kept, ENCODED_TOGETHER)):
            examples += sorted(encoder.encode(group, summary), key=lambda example: example.record)
            progress.update(len(group))
    probe = tokenizer_probe(encoder.tokenizer)
    return Dataset(examples, (DataSource(source.name),), summary, encoder.max_length, probe=probe)


def _prepare(records: Iterable[Any], encoder: Encoder, seen: set[bytes], summary: Summary) -> Iterator[Pending]:
    """Cleaned and rendered records without duplicates; the others are counted."""
    for number, record in enumerate(records):
        summary.read += 1
        try:
            cleaned = clean(record, summary.dropped_turns)
            digest = hashlib.blake2b(json.dumps(cleaned).encode(), digest_size=16).digest()
            if digest in seen:
                raise Dropped(DUPLICATE)
            seen.add(digest)
            plain = isinstance(cleaned, str)
            text = cleaned if plain else encoder.render(cleaned)
            yield Pending(text, None if plain else cleaned, number)
        except Dropped as reason:
            summary.dropped_records[str(reason)] += 1


def read_template(path: str | None) -> str | None:
    """The text of --chat-template FILE."""
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--chat-template {path}: not readable ({error})") from error


def highlight(tokenizer, example: Example, *, colour: bool) -> str:
    """The example's text with the tokens that supervised rows predict in green, or in [[...]]."""
    predicted = [False, False, *example.supervised.tolist()]  # row i predicts token i + 2
    left, right = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    parts = []
    for marked, group in itertools.groupby(range(len(example.tokens)), lambda place: predicted[place]):
        text = tokenizer.decode(example.tokens[list(group)].tolist(), skip_special_tokens=False)
        parts.append(f"{left}{text}{right}" if marked else text)
    return "".join(parts)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of all programs that read training data; `dataset_from` takes them."""
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE[:WEIGHT]",
        help="JSON, JSONL or Parquet files, directories of them, hub data sets, or directories that train.data prepare "
        "or train.features wrote; weights are shares of an epoch",
    )
    parser.add_argument("--tokenizer", help="directory or hub id of the tokenizer (default: the target's)")
    parser.add_argument("--chat-template", metavar="FILE", help="use this template (default: the tokenizer's)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of an example at most (%(default)s)")
    parser.add_argument("--records", type=int, help="read only that many records of each source")


def dataset_from(options: argparse.Namespace, tokenizer) -> Dataset:
    """The data set that flags ask for."""
    if options.records is not None and options.records < 1:
        raise InputError(f"--records {options.records}: must be at least 1")
    return load_dataset(
        parse_sources(options.data),
        tokenizer,
        max_length=options.max_length,
        chat_template=read_template(options.chat_template),
        records=options.records,
    )


def show(options: argparse.Namespace) -> None:
    """Prints examples spread over the data, and the summary."""
    if options.count < 0:
        raise InputError(f"--count {options.count}: must not be negative")
    tokenizer = load_tokenizer(locate(options.tokenizer or options.target))
    if tokenizer is None:
        name = options.tokenizer or options.target
        raise InputError(f"{name}: has no tokenizer, which shows tokens as text; pass --tokenizer DIR")
    dataset = dataset_from(options, tokenizer)
    count = min(options.count, len(dataset.examples))
    for index in np.linspace(0, len(dataset.examples) - 1, count).astype(int).tolist():
        example = dataset.examples[index]
        figures = f"{len(example.tokens)} tokens, {int(example.supervised.sum())} supervised rows"
        print(f"--- {dataset.describe(index)}: {figures}")
        print(highlight(tokenizer, example, colour=sys.stdout.isatty()))
    print(f"---\n{dataset.summary}")


def prepare(options: argparse.Namespace) -> None:
    """Writes the examples to a directory, and prints the summary."""
    if not (options.tokenizer or options.target):
        raise InputError("no tokenizer given; pass --target MODEL or --tokenizer DIR")
    dataset = dataset_from(options, load_tokenizer(locate(options.tokenizer or options.target)))
    store = write_prepared(dataset, options.out)
    print(dataset.summary)
    print(f"{len(dataset.examples):,} examples are in {options.out}, {len(store.shards)} shards; give that to --data")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m train.data", description="Look at training data, and prepare it on disk.")
    commands = parser.add_subparsers(required=True, metavar="show|prepare", parser_class=OneLineParser)
    command = commands.add_parser("show", help="print examples, supervised tokens highlighted, and the summary")
    command.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    add_data_flags(command)
    command.add_argument("--count", type=int, default=3, help="examples to print (%(default)s)")
    command.set_defaults(run=show)
    command = commands.add_parser("prepare", help="tokenise once, and write a directory that --data takes everywhere")
    command.add_argument("--target", help="directory, hub id or GGUF file of the target, for its tokenizer")
    add_data_flags(command)
    command.add_argument("--out", required=True, metavar="DIR", help="directory to write, or to go on with")
    command.set_defaults(run=prepare)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    options = build_parser().parse_args(arguments)
    return exit_status(options.run, options)


if __name__ == "__main__":
    sys.exit(main())
