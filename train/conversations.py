"""Conversations and texts out of files and hub data sets: read, cleaned, and every loss counted by its reason.

A record holds `conversations` or `messages`, a list of turns ({"from", "value"} or {"role", "content"}), or a plain
`text`. Cleaned, a conversation is a system turn or none, then user and assistant in turn, ending with a reply.
Nothing stops on one bad record.
"""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from convert.checkpoint import first_line, is_hub_id
from poss_jax.errors import InputError

Messages = list[dict[str, str]]  # each {"role": "system" | "user" | "assistant", "content": text}

ROLES = {"system": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
TURN_FIELDS = ("conversations", "messages", "conversation")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
SUFFIXES = (*JSON_SUFFIXES, ".parquet")

# Why records go.
NOT_JSON = "not readable as JSON, or cut off"
NOT_OBJECT = "not an object"
NO_FIELD = "no conversations, messages or text"
EMPTY = "empty conversation"
BLANK_TEXT = "blank text"
NO_USER = "no user turn"
NO_REPLY = "no reply"
DUPLICATE = "duplicate"
# Why turns go; the first fault is also why a record goes that has nothing left.
NO_ROLE = "turn without a role"
UNKNOWN_ROLE = "turn with an unknown role"
NO_CONTENT = "turn without text"
BLANK = "blank turn"
NOT_UNICODE = "not valid Unicode"
LEAD = "before the first user turn"
REPEATED = "at or after a role out of turn"
DANGLING = "user turn without a reply"


class Dropped(Exception):  # noqa: N818 - an outcome, not an error
    """A record cannot be used; the text is the reason to count."""


class Unreadable(NamedTuple):
    """Stands where a file has something that is not a record."""

    reason: str


@dataclasses.dataclass
class Summary:
    """What became of the records.

    read: records met, broken ones included. kept: examples made of them. dropped_records, dropped_turns: numbers by
    reason; turns of dropped records are not counted as turns. truncated: examples cut at the greatest length.
    tokens, supervised: of the examples, as they are trained on.
    """

    read: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped_records: Counter = dataclasses.field(default_factory=Counter)
    dropped_turns: Counter = dataclasses.field(default_factory=Counter)

    def rows(self) -> list[tuple[str, int]]:
        """Lines of the table: what, and how many."""
        lines = [("records read", self.read), ("examples kept", self.kept)]
        lines += [(f"records dropped: {reason}", count) for reason, count in self.dropped_records.most_common()]
        lines += [(f"turns dropped: {reason}", count) for reason, count in self.dropped_turns.most_common()]
        lines += [("examples cut at the greatest length", self.truncated), ("tokens", self.tokens)]
        return [*lines, ("supervised rows", self.supervised)]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}} {count:>12,}" for name, count in self.rows())


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Where records come from, and the share of an epoch's examples that they make up (None: all are taken)."""

    name: str
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> "DataSource":
        """ "a.json" or "a.json:0.5"; a file whose very name ends so is that file."""
        name, colon, weight = text.rpartition(":")
        if not colon or not name or Path(text).exists() or not re.fullmatch(r"[-+.\deE]+|nan|inf", weight):
            return cls(text)
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InputError(f"{text}: the weight after the colon must be a number above 0, such as {name}:0.5")
        return cls(name, value)


def parse_sources(texts: list[str]) -> list[DataSource]:
    """Sources of --data; either all of them have weights or none has."""
    sources = [DataSource.parse(text) for text in texts]
    bare = [source.name for source in sources if source.weight is None]
    if not sources:
        raise InputError("no data given; pass --data FILE")
    if 0 < len(bare) < len(sources):
        raise InputError(f"{bare[0]}: has no weight where other sources have; write {bare[0]}:1")
    return sources


def read_records(name: str) -> Iterator[Any]:
    """Records of a .json, .jsonl or .parquet file, of a directory of them, or of a hub data set (its train split).

    JSON is read here and not with `datasets`, which stops at the first record that is broken or of another type.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _directory(path)
    elif path.is_file():
        yield from _file(path)
    elif is_hub_id(name) and path.suffix not in SUFFIXES:
        yield from _load(name, split="train", path=name)
    else:
        raise InputError(f"{name}: no such file or directory")


def _file(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return _load(str(path), split="train", path="parquet", data_files=str(path), streaming=True)
    if path.suffix in JSON_SUFFIXES:
        return _json_records(path)
    raise InputError(f"{path}: expected a .json, .jsonl or .parquet file")


def _directory(path: Path) -> Iterator[Any]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        raise InputError(f"{path}: a data set saved to disk; write it out with to_parquet and give that file")
    if (path / "manifest.json").exists():
        raise InputError(f"{path}: a prepared data set holds tokens and no conversations; give the data it was made of")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise InputError(f"{path}: holds no .json, .jsonl or .parquet files")
    for file in files:
        yield from _file(file)


def _load(name: str, **arguments) -> Iterator[Any]:
    import datasets  # takes seconds to import

    try:
        yield from datasets.load_dataset(**arguments)
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{name}: not readable as a data set ({first_line(error)})") from error


def _json_records(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")  # a file may be cut off inside a character
    except OSError as error:
        raise InputError(f"{path}: not readable ({error})") from error
    first = text.lstrip()[:1]
    if first == "[":
        return _values(text, text.index("[") + 1)
    if first != "{":
        raise InputError(f"{path}: holds no records; expected a JSON array or an object a line")
    if _decode(text.lstrip().split("\n", 1)[0]) == Unreadable(NOT_JSON) and _decode(text) != Unreadable(NOT_JSON):
        return iter([_decode(text)])  # one object over many lines
    return (_decode(line) for line in text.split("\n") if line.strip())


def _decode(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return Unreadable(NOT_JSON)


def _values(text: str, at: int) -> Iterator[Any]:
    """Values of a JSON array from behind its bracket. A broken one costs those up to the next line that begins like
    the first value's did, since deeper objects are indented otherwise; in an array on one line, all that follow.
    """
    decoder, between = json.JSONDecoder(strict=False), re.compile(r"[\s,]*")
    start = between.match(text, at).end()
    line_begin = text[at:start] + text[start : start + 1]
    at = start
    while at < len(text) and text[at] != "]":
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value = Unreadable(NOT_JSON)
            following = text.find(line_begin, at) if "\n" in line_begin else -1
            at = len(text) if following < 0 else following
        yield value
        at = between.match(text, at).end()


class _Turn(NamedTuple):
    role: str
    content: str
    fault: str | None


def clean(record: Any, dropped_turns: Counter) -> Messages | str:
    """The conversation or text of a record. Raises Dropped with the reason where there is none."""
    if isinstance(record, Unreadable):
        raise Dropped(record.reason)
    if not isinstance(record, dict):
        raise Dropped(NOT_OBJECT)
    turns = next((record[field] for field in TURN_FIELDS if record.get(field) is not None), None)
    if isinstance(turns, list):
        return _clean_turns(turns, dropped_turns)
    if turns is not None or not isinstance(record.get("text"), str):
        raise Dropped(NO_FIELD)
    if not record["text"].strip():
        raise Dropped(BLANK_TEXT)
    if not _is_unicode(record["text"]):
        raise Dropped(NOT_UNICODE)
    return record["text"]


def _clean_turns(turns: list, dropped_turns: Counter) -> Messages:
    """Lead turns before the first user turn go, but for a system turn that is the very first; then the conversation
    is cut at the first fault or role out of turn, and a last user turn without a reply goes.
    """
    if not turns:
        raise Dropped(EMPTY)
    parsed = [_parse_turn(turn) for turn in turns]
    system = [turn for turn in parsed[:1] if turn.role == "system" and not turn.fault]
    rest = parsed[len(system) :]
    lead = next((index for index, turn in enumerate(rest) if turn.role == "user"), len(rest))
    dropped = Counter(turn.fault or LEAD for turn in rest[:lead])
    rest = rest[lead:]
    expected = itertools.cycle(("user", "assistant"))
    faults = [turn.fault or (REPEATED if turn.role != role else None) for turn, role in zip(rest, expected)]  # noqa: B905
    end = next((index for index, fault in enumerate(faults) if fault), len(rest))
    if end < len(rest):
        dropped[faults[end]] += len(rest) - end
    if end % 2:
        dropped[DANGLING] += 1
    kept = rest[: end - end % 2]
    if not kept:
        first_fault = next((turn.fault for turn in parsed if turn.fault), None)
        raise Dropped(first_fault or (NO_REPLY if rest else NO_USER))
    dropped_turns.update(dropped)
    return [{"role": turn.role, "content": turn.content} for turn in system + kept]


def _parse_turn(turn: Any) -> _Turn:
    """Role and text of a turn, and what is wrong with it."""
    fields = turn if isinstance(turn, dict) else {}
    name = fields.get("from") if fields.get("from") is not None else fields.get("role")
    content = _as_text(fields.get("value") if fields.get("value") is not None else fields.get("content"))
    role = ROLES.get(name.strip().lower(), "") if isinstance(name, str) else ""
    if not isinstance(name, str) or not name.strip():
        return _Turn(role, "", NO_ROLE)
    if content is None:
        return _Turn(role, "", NO_CONTENT)
    faults = [(not role, UNKNOWN_ROLE), (not content.strip(), BLANK), (not _is_unicode(content), NOT_UNICODE)]
    return _Turn(role, content, next((fault for wrong, fault in faults if wrong), None))


def _as_text(content: Any) -> str | None:
    """A turn's text, also where it is a list of parts that are all texts."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = [part.get("text") for part in content]
        return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def _is_unicode(text: str) -> bool:
    """False with half of a surrogate pair in it, as text cut by other programs has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
