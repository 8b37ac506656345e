"""The directory of a benchmark: `study.json` says what it is of, `records.jsonl` holds one measured thing a line.

Lines are written whole and never changed. Where a run was killed inside one, the piece is cut off and measured again; a
record that is there is never measured a second time, and never counted twice.
"""

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from convert.checkpoint import read_json, write_json
from convert.output import new_directory
from poss_jax.errors import InputError

RECORDS, STUDY = "records.jsonl", "study.json"
PLAIN = "plain"  # the drafter's name in records of decoding without one
KINDS = ("plain", "drafted", "timing", "split", "drift")


class Key(NamedTuple):
    """What a record is of.

    kind: `plain` answers and `drafted` ones (in batches, for acceptance), `timing` (alone on the device), `split`
    (draft and verify apart), `drift`. training_seed: which directory of the drafter. turn: from 0. seed: of sampling.
    levels: 0 without a tree.
    """

    kind: str
    drafter: str
    training_seed: int
    set: str
    question: str
    turn: int
    temperature: float
    seed: int
    levels: int

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Key":
        """Raises KeyError where the record lacks a field."""
        return cls(**{name: record[name] for name in cls._fields})


Record = dict[str, Any]  # the fields of the key, and what was measured


class Store:
    """An open directory. Use it as a context: another run that writes there at the same time is refused."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory).expanduser()
        self.records: dict[Key, Record] = {}

    def __enter__(self) -> "Store":
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self.directory / RECORDS, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise InputError(f"--out {self.directory}: not writable ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InputError(
                f"--out {self.directory}: another run writes there; wait for it, or take another"
            ) from None
        try:
            self.records, end = read_records(self.directory)
            self._file.truncate(end)
        except InputError:
            self._file.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self.records

    def add(self, key: Key, **values: Any) -> None:
        """Appends a record, out of reach of whatever happens to this process afterwards. Raises ValueError for a key
        that is there.
        """
        if key in self.records:
            raise ValueError(f"{key} is recorded already")
        record = {**key._asdict(), **values}
        try:
            self._file.write(_line(record))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"{self.directory / RECORDS}: not writable ({error.strerror})") from error
        self.records[key] = record

    def describe(self, study: dict[str, Any]) -> None:
        """Writes `study.json`."""
        write_json(self.directory / STUDY, study)

    def description(self) -> dict[str, Any] | None:
        """`study.json`, None in a new directory."""
        path = self.directory / STUDY
        return read_json(path) if path.exists() else None


def read_records(directory: Path) -> tuple[dict[Key, Record], int]:
    """All whole records, and how many bytes they are. Raises InputError for a line that is none, or is there twice."""
    path, records, end = directory / RECORDS, {}, 0
    if not path.exists():
        raise InputError(f"{directory}: holds no {RECORDS}; python -m infer.benchmark --out {directory} makes it")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # a run was killed here
            key, record = _parse(line, f"{path}, line {number}")
            if key in records:
                raise InputError(f"{path}, line {number}: is there twice; remove one of the two lines")
            records[key] = record
            end += len(line)
    return records, end


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _parse(line: bytes, where: str) -> tuple[Key, Record]:
    try:
        record = json.loads(line)
        key = Key.of(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{where}: not a line that this command writes ({error!r:.80}); remove it") from error
    if key.kind not in KINDS:
        raise InputError(f"{where}: has the unknown kind {key.kind!r}; a newer version may have written it")
    return key, record


@dataclasses.dataclass(frozen=True)
class Study:
    """What a directory holds: the description and all records."""

    description: dict[str, Any]
    records: list[Record]

    @classmethod
    def read(cls, directory: str | Path) -> "Study":
        """Raises InputError where there is none."""
        directory = Path(directory).expanduser()
        records, _ = read_records(directory)
        return cls(read_json(directory / STUDY), list(records.values()))

    def write(self, directory: str | Path) -> None:
        """A new directory, which is there whole or not at all. Raises InputError where it holds something already."""
        with new_directory(directory) as unfinished:
            (unfinished / RECORDS).write_bytes(b"".join(map(_line, self.records)))
            write_json(unfinished / STUDY, self.description)


def last_runs(description: dict[str, Any]) -> list[int]:
    """Places in `runs` of those whose end says whether everything was done: the last one, and of directories that were
    joined the last one of each.
    """
    return description.get("last_runs", list(range(len(description["runs"])))[-1:])
