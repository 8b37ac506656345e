"""`python -m train.regenerate`: the target answers the prompts of conversations itself, as data to train drafters on.

A drafter learns what its target says, and someone else's answers are not that: drafters trained on the target's own
have more tokens accepted. System and user turns are kept, the target answers turn after turn with its own answers in
the context. One JSON object a line:

    {"messages": [...], "source": "a.json", "record": 12, "stop_reasons": ["eos", "max_new_tokens"], "tokens": [80, 99]}

`stop_reasons` and `tokens` hold one entry for each reply that was asked for. A conversation goes on only behind an
"eos". Any other reply, cut by the lengths or "blank", is its last one and is left out with its user turn: training ends
every reply with an end-of-turn token, and would teach one where the target said none. `--truncated keep` leaves it
in. `messages` is empty where no reply is left; training counts such lines and goes on.

Interrupted and started again with the same flags, the command goes on behind the lines that are there.
"""

import argparse
import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from convert.command import OneLineParser, exit_status
from infer import generate
from infer.batch import bucket
from infer.engine import Generator
from infer.programs import kept_programs
from infer.results import Generation
from infer.settings import Settings
from poss_jax.errors import InputError
from train.conversations import DUPLICATE, DataSource, Dropped, Messages, clean, parse_sources, read_records
from train.data import Encoder, add_data_flags, read_template
from train.regenerated_file import Conversation, Output

TRAINED_LENGTH = 2048  # what training takes of a conversation, unless told otherwise
BATCHES_AHEAD = 8  # conversations to choose a batch from, in batches

# Why conversations are not asked.
PLAIN_TEXT = "plain text, which has no prompt"
TOO_LONG = "prompt too long for --max-length"


@dataclasses.dataclass
class Tally:
    """Figures of one run. skipped: conversations or records by reason. reread: replies that a tokenizer reads as other
    tokens than those generated. seconds: of generation, compilation not counted.
    """

    skipped: Counter = dataclasses.field(default_factory=Counter)
    replies: Counter = dataclasses.field(default_factory=Counter)
    conversations: int = 0
    empty: int = 0
    tokens: int = 0
    reread: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def rows(self, before: int) -> list[tuple[str, str]]:
        """Lines of the summary; `before`: conversations that the file held already."""
        lines = [("conversations written before", before), ("conversations written now", self.conversations)]
        lines += [("of these without a reply", self.empty)]
        lines += [(f"skipped: {reason}", count) for reason, count in self.skipped.most_common()]
        lines += [(f"replies that ended by {reason}", count) for reason, count in self.replies.most_common()]
        lines += [("replies whose text is read as other tokens", self.reread), ("tokens generated", self.tokens)]
        return [(name, f"{count:,}") for name, count in lines] + [("tokens a second", f"{self.speed:,.1f}")]

    def describe(self, before: int) -> str:
        """The summary as a table."""
        width = max(len(name) for name, _ in self.rows(before))
        return "\n".join(f"{name:<{width}} {value:>14}" for name, value in self.rows(before))


def read_conversations(
    sources: Sequence[DataSource], turns: int | None, limit: int | None, skipped: Counter
) -> list[Conversation]:
    """The prompts of cleaned conversations, no two the same: `turns` user turns at most, `limit` conversations."""
    found = islice(_prompts(sources, turns, skipped), limit)
    return list(tqdm(found, desc="reading", unit=" conversations", file=sys.stderr, disable=None))


def _prompts(sources: Sequence[DataSource], turns: int | None, skipped: Counter) -> Iterator[Conversation]:
    seen: set[tuple] = set()
    for number, source in enumerate(sources):
        for record, value in enumerate(read_records(source.name)):
            try:
                cleaned = clean(value, Counter())
                if isinstance(cleaned, str):
                    raise Dropped(PLAIN_TEXT)
                conversation = Conversation.of(cleaned, source.name, number, record, turns)
                if conversation.prompts in seen:
                    raise Dropped(DUPLICATE)
            except Dropped as reason:
                skipped[str(reason)] += 1
                continue
            seen.add(conversation.prompts)
            yield conversation


def conversation_seed(seed: int, source: int, record: int) -> int:
    """The seed of a conversation's answers: it depends on nothing that runs beside it, nor on when it runs."""
    return int(np.random.SeedSequence([seed, source, record]).generate_state(1)[0])


@dataclasses.dataclass(eq=False)
class Dialogue:
    """A conversation on its way. messages: with the replies kept so far. prompt: token ids of the turn that waits."""

    conversation: Conversation
    messages: Messages
    prompt: list[int] = dataclasses.field(default_factory=list)
    stop_reasons: list[str] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, conversation: Conversation) -> "Dialogue":
        """One with nothing asked yet."""
        return cls(conversation, [{"role": "system", "content": text} for text in conversation.system])

    def asked(self) -> Messages:
        """Messages up to the user turn that waits for a reply."""
        turn = {"role": "user", "content": self.conversation.users[len(self.stop_reasons)]}
        return [*self.messages, turn]

    def to_json(self) -> dict:
        """What is written."""
        replied = any(message["role"] == "assistant" for message in self.messages)
        return {
            "messages": self.messages if replied else [],
            "source": self.conversation.source,
            "record": self.conversation.record,
            "stop_reasons": self.stop_reasons,
            "tokens": self.tokens,
        }


class Regenerator:
    """Lets a generator answer conversations, many at a time. `settings.max_length` must be set.

    Batches are made of prompts of one bucket, which share a compiled program, out of a bounded number of conversations.
    """

    def __init__(self, generator: Generator, settings: Settings, encoder: Encoder, *, keep_truncated: bool = False):
        self.generator, self.settings, self.encoder = generator, settings, encoder
        self.keep_truncated = keep_truncated
        self.tally = Tally()

    def run(self, conversations: Sequence[Conversation]) -> Iterator[Dialogue | None]:
        """Conversations as they end; None for one that could not be asked at all."""
        rows = min(self.settings.batch_size, len(conversations))
        waiting, pool = iter(conversations), []
        while True:
            while len(pool) < rows * BATCHES_AHEAD and (conversation := next(waiting, None)):
                dialogue = Dialogue.of(conversation)
                if self._ask(dialogue):
                    pool.append(dialogue)
                else:
                    yield None
            if not pool:
                return
            group = _fullest(pool, rows)
            for dialogue, answer in zip(group, self._answers(group, rows), strict=True):
                if not (self._reply(dialogue, answer) and self._ask(dialogue)):
                    pool.remove(dialogue)
                    self.tally.conversations += 1
                    self.tally.empty += not dialogue.to_json()["messages"]
                    yield dialogue

    def _ask(self, dialogue: Dialogue) -> bool:
        """Encodes the next turn; False if there is none or it cannot be asked, which ends the conversation."""
        if len(dialogue.stop_reasons) == len(dialogue.conversation.users):
            return False
        try:
            dialogue.prompt = self._ids(self.encoder.render(dialogue.asked(), opened=True))
            if len(dialogue.prompt) >= self.settings.max_length:
                raise Dropped(TOO_LONG)
        except Dropped as reason:
            if not dialogue.stop_reasons:  # later it only means that the conversation is over
                self.tally.skipped[str(reason)] += 1
            return False
        return True

    def _ids(self, text: str) -> list[int]:
        return self.encoder.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def _answers(self, group: list[Dialogue], rows: int) -> list[Generation]:
        """Answers to one batch. It is filled up, since another number of rows would need another program."""
        filled = [*group, *[group[-1]] * (rows - len(group))]
        seeds = tuple(
            conversation_seed(self.settings.seed, dialogue.conversation.number, dialogue.conversation.record)
            for dialogue in filled
        )
        settings = dataclasses.replace(self.settings, seeds=seeds, batch_size=rows)
        (answers,) = self.generator.batches([dialogue.prompt for dialogue in filled], settings)
        self.tally.seconds += max(answer.seconds for answer in answers)
        return answers[: len(group)]

    def _reply(self, dialogue: Dialogue, answer: Generation) -> bool:
        """Takes a reply; False if it ends the conversation."""
        reason = answer.stop_reason if answer.text.strip() else "blank"
        asked = dialogue.asked()
        dialogue.stop_reasons.append(reason)
        dialogue.tokens.append(len(answer.token_ids))
        self.tally.replies[reason] += 1
        self.tally.tokens += len(answer.token_ids)
        if reason == "blank" or (reason != "eos" and not self.keep_truncated):
            return False
        dialogue.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self.tally.reread += not self._reads_back(dialogue, answer)
        return reason == "eos"

    def _reads_back(self, dialogue: Dialogue, answer: Generation) -> bool:
        """Whether the conversation as text holds the very tokens that were generated. Special tokens inside an answer
        are no part of its text, templates may trim it, and a text has tokens that the target did not choose.
        """
        generated = answer.token_ids[:-1] if answer.stop_reason == "eos" else answer.token_ids
        expected = [*answer.prompt_ids, *generated]
        try:
            return self._ids(self.encoder.render(dialogue.messages))[: len(expected)] == expected
        except Dropped:
            return False


def _fullest(pool: list[Dialogue], rows: int) -> list[Dialogue]:
    """The next batch: of the bucket that fills it best, and of equals the one whose first dialogue waits longest."""
    groups: dict[int, list[Dialogue]] = defaultdict(list)
    for dialogue in pool:
        groups[bucket(len(dialogue.prompt))].append(dialogue)
    return max((group[:rows] for group in groups.values()), key=len)


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m train.regenerate",
        description="Let the target answer the prompts of conversations itself, as data to train drafters on.",
    )
    known, data_flags = generate.build_parser(), OneLineParser(add_help=False)
    add_data_flags(data_flags)
    models = parser.add_argument_group("models; a drafter makes it faster and changes no answer")
    _borrow(
        models,
        known,
        "target",
        "draft",
        "spans",
        "draft_vocab",
        "draft_dtype",
        "tokenizer",
        "dtype",
        "mesh",
        "attention",
    )
    data = parser.add_argument_group("conversations")
    data.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help="JSON, JSONL or Parquet files, directories of them or hub data sets",
    )
    _borrow(data, data_flags, "chat_template")
    data.add_argument("--turns", type=int, help="user turns of a conversation at most (default: all that fit)")
    data.add_argument(
        "--limit", type=int, help="conversations at most; raised later, the command goes on (default: all)"
    )
    sampling = parser.add_argument_group("sampling")
    _borrow(sampling, known, "temperature", "top_k", "top_p", "seed")
    _borrow(parser.add_argument_group("draft tree"), known, "levels", "total_nodes", "draft_top_k")
    limits = parser.add_argument_group("lengths and stopping")
    _borrow(limits, known, "max_new_tokens", "eos_ids")
    limits.add_argument(
        "--max-length",
        type=int,
        help=f"tokens of a conversation at most (default: {TRAINED_LENGTH} as in training, or a smaller context)",
    )
    limits.add_argument(
        "--truncated",
        choices=("drop", "keep"),
        default="drop",
        help="replies cut by the lengths; a kept one is trained on as if the target had ended it there (%(default)s)",
    )
    output = parser.add_argument_group("running and output")
    _borrow(output, known, "batch_size")
    output.add_argument("--out", required=True, metavar="FILE.jsonl", help="where to write; goes on where it is begun")
    output.add_argument("--overwrite", action="store_true", help="begin anew, whatever --out holds")
    # A cut reply is lost, so replies get more room than in infer.generate.
    parser.set_defaults(max_new_tokens=1024, stop=(), batch_size=8)
    return parser


def _borrow(group, parser: argparse.ArgumentParser, *names: str) -> None:
    """Puts flags of another command into a group, as `parents` does with all of them."""
    for action in parser._actions:
        if action.dest in names:
            group._add_action(action)


def check_flags(options: argparse.Namespace) -> list[DataSource]:
    """The sources. Raises InputError for what can be said before anything is read."""
    for name in ("turns", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
    for flag in ("spans", "draft_vocab", "draft_dtype"):
        if getattr(options, flag) and options.draft is None:
            raise InputError(f"--{flag.replace('_', '-')} needs --draft")
    sources = parse_sources(options.data)
    for source in sources:
        if source.weight is not None:
            raise InputError(f"{source.name}: has a weight, which is for training; write it without")
        out, path = (Path(name).expanduser().resolve() for name in (options.out, source.name))
        if path.exists() and path in (out, out.parent):
            raise InputError(f"--out {options.out}: is or lies in {source.name}, which is read; write elsewhere")
    return sources


def recorded_settings(options: argparse.Namespace) -> dict:
    """What answers depend on, and so what must be the same to go on. The drafter, its tree, the batch size and the
    devices are not among them.
    """
    names = ("target", "tokenizer", "dtype", "data", "turns", "temperature", "top_k", "top_p", "seed")
    names += ("max_new_tokens", "max_length", "eos_ids", "truncated")
    template = read_template(options.chat_template)
    return {name: getattr(options, name) for name in names} | {"chat_template": template}


def load(options: argparse.Namespace, settings: Settings) -> tuple[Generator, Settings, Encoder]:
    """The models, with settings whose `max_length` is set, and the encoder of the conversations."""
    generator = generate.generator_from(options)
    length = settings.max_length or min(TRAINED_LENGTH, generator.context(settings))
    settings = dataclasses.replace(settings, max_length=length)
    generator.check([], settings)
    if not (generator.models.eos_ids if settings.eos_ids is None else settings.eos_ids):
        raise InputError("the target names no end-of-text token, so no reply would ever end; pass --eos-ids")
    encoder = Encoder(generator.tokenizer, length, read_template(options.chat_template))
    if not encoder.chat_template:
        raise InputError("the target's tokenizer has no chat template; pass --chat-template FILE")
    return generator, settings, encoder


def run(options: argparse.Namespace) -> None:
    """Everything after the flags; what is wrong with them is said before anything is written."""
    sources, settings = check_flags(options), generate.settings_from(options)
    output = Output(options.out, recorded_settings(options), overwrite=options.overwrite)
    skipped: Counter = Counter()
    conversations = read_conversations(sources, options.turns, options.limit, skipped)
    if not conversations:
        reasons = skipped.most_common(1)
        raise InputError(f"the data holds no conversation ({reasons[0][0] if reasons else 'no records'})")
    done = output.resume(conversations)
    generator, settings, encoder = load(options, settings)
    for note in generator.notes:
        print(f"note: {note}", file=sys.stderr)
    regenerator = Regenerator(generator, settings, encoder, keep_truncated=options.truncated == "keep")
    regenerator.tally.skipped.update(skipped)
    left = [conversation for conversation in conversations if conversation.key not in done]
    with output, tqdm(total=len(conversations), initial=len(done), unit=" conversations", file=sys.stderr) as progress:
        for dialogue in regenerator.run(left):
            if dialogue is not None:
                output.write(dialogue.to_json())
            progress.set_postfix_str(f"{regenerator.tally.speed:,.0f} tokens/s", refresh=False)
            progress.update()
    print(regenerator.tally.describe(len(done)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    options = build_parser().parse_args(arguments)
    with kept_programs():
        return exit_status(run, options)


if __name__ == "__main__":
    sys.exit(main())
