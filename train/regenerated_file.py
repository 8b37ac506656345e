"""The file that `train.regenerate` writes: which conversations it is to hold, and going on where it ends.

Beside FILE.jsonl stands FILE.jsonl.settings.json with what its answers depend on, so that no run goes on with others.
Each line is written whole; where a run was killed inside one, the piece is cut off and its conversation asked again.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.checkpoint import read_json, write_json
from poss_jax.errors import InputError
from train.conversations import Messages

FIX = "give the same flags and data, another --out, or --overwrite to begin anew"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What is asked. source, number: name of its source and which of all it is; record: its place there, from 0.

    system: the system turn or nothing; users: texts of the user turns.
    """

    source: str
    number: int
    record: int
    system: tuple[str, ...]
    users: tuple[str, ...]

    @classmethod
    def of(cls, messages: Messages, source: str, number: int, record: int, turns: int | None) -> "Conversation":
        """From cleaned messages; `turns` user turns at most."""
        system, users = (tuple(_texts(messages, role)) for role in ("system", "user"))
        return cls(source, number, record, system, users[:turns])

    @property
    def key(self) -> tuple[str, int]:
        """By this its line is known."""
        return self.source, self.record

    @property
    def prompts(self) -> tuple:
        """By this two are known to be the same."""
        return self.system, self.users

    def begins_with(self, messages: Messages) -> bool:
        """Whether these messages, without their replies, may be the beginning of this conversation."""
        system, users = _texts(messages, "system"), _texts(messages, "user")
        return not messages or (tuple(system) == self.system and tuple(users) == self.users[: len(users)])


def _texts(messages: Messages, role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


class Output:
    """The file, used as a context around its writing. `settings`: JSON values by flag.

    Opening it raises InputError if it cannot be written to, or was begun with other settings.
    """

    def __init__(self, name: str, settings: dict[str, Any], *, overwrite: bool = False):
        self.path, self.settings, self.overwrite = Path(name).expanduser(), settings, overwrite
        self.sidecar = self.path.with_name(self.path.name + ".settings.json")
        self.end = 0  # bytes of whole lines
        if self.path.suffix != ".jsonl" or self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise InputError(f"--out {name}: must be a .jsonl file in a directory that exists")
        if not overwrite and self._size():
            self._check_settings()

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _check_settings(self) -> None:
        if not self.sidecar.exists():
            raise InputError(f"{self.path}: is there already, without {self.sidecar.name}; {FIX}")
        begun = read_json(self.sidecar)
        for name in sorted(self.settings.keys() | begun.keys()):
            then, now = begun.get(name), self.settings.get(name)
            if then != now:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{self.path}: was begun with {flag} {_shown(then)}, and now is {_shown(now)}; {FIX}")

    def resume(self, conversations: Sequence[Conversation]) -> set[tuple[str, int]]:
        """Keys of the conversations that have their line. Raises InputError for a line that is of none of them."""
        self.end, done = 0, set()
        if self.overwrite or not self._size():
            return done
        expected = {conversation.key: conversation for conversation in conversations}
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                key, messages = _parse(line, f"{self.path}, line {number}")
                if key not in expected or not expected[key].begins_with(messages):
                    raise InputError(
                        f"{self.path}, line {number}: {key[0]}, record {key[1]} is not, or not as it was, among the "
                        f"conversations asked for; the data changed or --limit is lower; {FIX}"
                    )
                done.add(key)
                self.end += len(line)
        return done

    def __enter__(self) -> "Output":
        try:
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
            self._file.truncate(self.end)
            write_json(self.sidecar, self.settings)
        except OSError as error:
            raise InputError(f"--out {self.path}: not writable ({error})") from error
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line, out of reach of whatever happens to this process afterwards."""
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self.path}: not writable ({error})") from error


def _parse(line: bytes, where: str) -> tuple[tuple[str, int], Messages]:
    try:
        value = json.loads(line)
        return (str(value["source"]), int(value["record"])), [dict(message) for message in value["messages"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{where}: not a line that this command writes ({error!r:.80}); {FIX}") from error


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
