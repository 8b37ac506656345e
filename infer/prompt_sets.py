"""Sets of questions to measure on: files of JSON lines and hub data sets, with all the turns that they hold."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.checkpoint import first_line, is_hub_id
from infer.prompts import Prompt, prompt_in, read_lines
from poss_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Question:
    """One question. prompt: the first turn, or messages, or token ids; later_turns: texts of the user's next turns.

    id: of the file, or its line number; no two of a set have the same.
    """

    id: str
    category: str
    prompt: Prompt
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> int:
        return 1 + len(self.later_turns)

    def conversation(self, answers: Sequence[str]) -> Prompt:
        """What the model is asked after it has given `answers` to the turns before."""
        if not answers:
            return self.prompt
        messages = [{"role": "user", "content": self.prompt}]
        for answer, turn in zip(answers, self.later_turns, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return messages


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Questions under a name; fingerprint: of all their texts."""

    name: str
    questions: tuple[Question, ...]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.questions).encode("utf-8", "replace")).hexdigest()[:16]


def read_prompt_sets(names: Sequence[str]) -> list[PromptSet]:
    """All sets. `question.jsonl` is called as its directory, other files as themselves without .jsonl.

    Raises InputError naming file and line, also where two sets have one name.
    """
    sets = [PromptSet(_name_of(name), tuple(_questions(name))) for name in names]
    name, count = Counter(prompts.name for prompts in sets).most_common(1)[0]
    if count > 1:
        raise InputError(f"--prompts holds {count} sets that are called {name}; rename a file or its directory")
    return sets


def _name_of(name: str) -> str:
    path = Path(name)
    return path.resolve().parent.name if path.stem == "question" else path.stem if path.suffix else path.name


def _questions(name: str) -> list[Question]:
    path = Path(name).expanduser()
    if not path.exists() and is_hub_id(name) and path.suffix != ".jsonl":
        records = list(enumerate(_hub_records(name), 1))
    else:
        records = read_lines(name)
    questions = [_question(record, number, f"{name}, line {number}") for number, record in records]
    if not questions:
        raise InputError(f"{name}: holds no questions")
    name_of_two, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise InputError(f"{name}: {count} questions have the question_id {name_of_two}; give each its own")
    return questions


def _hub_records(name: str) -> list[Any]:
    """Rows of the split of a hub data set that is meant for testing, else of its first one."""
    import datasets  # takes seconds to import

    try:
        splits = datasets.load_dataset(name)
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{name}: no such file, and not readable as a hub data set ({first_line(error)})") from error
    return list(splits["test"] if "test" in splits else next(iter(splits.values())))


def _question(record: Any, number: int, where: str) -> Question:
    """`turns`, or a `prompt` that is a list, hold all turns of the user; the other forms are one turn."""
    turns = record.get("turns", record.get("prompt")) if isinstance(record, dict) else None
    later: list[str] = []
    if isinstance(turns, list):
        if not turns or not all(isinstance(turn, str) for turn in turns):
            raise InputError(f"{where}: turns must be a list of texts that is not empty")
        prompt, *later = turns
    else:
        prompt = prompt_in(record, where)
    identity = str(record.get("question_id", number))
    return Question(identity, str(record.get("category") or ""), prompt, tuple(later))
