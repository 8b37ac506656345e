"""Shards of prepared data sets (`train.store`): safetensors files of whole examples, each with a sidecar.

A shard's m examples lie back to back in arrays, n tokens together:

    tokens [n] int32        supervised [n] uint8     features [n, h] float32 or bfloat16, if there are any
    lengths [m] int32       source [m] int32         record [m] int32

The sidecar, `shard-00003-of-00040.json`, is written last. It holds size and SHA-256 of the shard, and names the
manifest that the shard is of.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.checkpoint import read_json
from poss_jax.errors import InputError
from train.examples import Example, FeatureKind

PATTERN = "shard-*-of-*.safetensors"
UNFINISHED = ".partial"
BLOCK = 1 << 22  # bytes hashed at once
KINDS = {"int32": "I32", "uint8": "U8", "float32": "F32", "bfloat16": "BF16"}  # numpy's names and safetensors'


class Shard(NamedTuple):
    """A file that holds `examples` examples of the set from number `first` on, of `tokens` tokens together."""

    file: str
    first: int
    examples: int
    tokens: int


def divide(lengths: Sequence[int], examples: int) -> list[Shard]:
    """Shards of that many examples each, but for the last, of a set of examples with these lengths."""
    starts = range(0, len(lengths), examples)
    shards = []
    for number, first in enumerate(starts, 1):
        some = lengths[first : first + examples]
        shards.append(Shard(f"shard-{number:05d}-of-{len(starts):05d}.safetensors", first, len(some), sum(some)))
    return shards


class Field(NamedTuple):
    """Where an array of a shard lies in its file: from byte `start` on."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize


class Layout(NamedTuple):
    """The first bytes of a shard, where its arrays lie, and its size in bytes."""

    header: bytes
    fields: dict[str, Field]
    size: int

    @classmethod
    def of(cls, shard: Shard, features: FeatureKind | None) -> "Layout":
        """Follows from what the manifest says, so that features can be written in any order."""
        arrays = {"tokens": ("int32", shard.tokens)}
        arrays |= dict.fromkeys(("lengths", "source", "record"), ("int32", shard.examples))
        if features is not None:
            arrays["features"] = (features.dtype, shard.tokens, features.hidden_size)
        arrays["supervised"] = ("uint8", shard.tokens)  # last, so that wider numbers stay aligned
        described, fields, end = {}, {}, 0
        for name, (kind, *shape) in arrays.items():
            field = Field(np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind), tuple(shape), end)
            described[name] = {"dtype": KINDS[kind], "shape": shape, "data_offsets": [end, field.end]}
            fields[name], end = field, field.end
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        fields = {name: field._replace(start=field.start + len(header)) for name, field in fields.items()}
        return cls(header, fields, end + len(header))


def sidecar_of(file: Path) -> Path:
    """The file that says that a shard is finished."""
    return file.with_suffix(".json")


def fault_of(directory: Path, shard: Shard, features: FeatureKind | None, manifest: str) -> str | None:
    """Why a shard does not count as finished, or None. Its contents are not looked at. manifest: its fingerprint."""
    file, sidecar = directory / shard.file, sidecar_of(directory / shard.file)
    if not file.exists():
        return "is missing"
    if not sidecar.exists():
        return f"is not finished, since {sidecar.name} is missing"
    try:
        said = read_json(sidecar)
    except InputError:
        return f"cannot be checked, since {sidecar.name} is not readable"
    if said.get("manifest") != manifest:
        return f"is of another run, since {sidecar.name} is not of this manifest"
    size, expected = file.stat().st_size, Layout.of(shard, features).size
    if not size == expected == said.get("size"):
        return f"has {size} bytes instead of {expected}"
    return None


def read_shard(file: Path, shard: Shard, features: FeatureKind | None) -> list[Example]:
    """The examples of a finished shard; their features are mapped into memory, all else is read.

    Raises InputError where the file does not hold what is expected.
    """
    layout = Layout.of(shard, features)
    mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
    if mapped[: len(layout.header)].tobytes() != layout.header:
        raise InputError(f"{file}: holds other arrays than the manifest says; prepare the data set again")
    arrays = {name: mapped[f.start : f.end].view(f.dtype).reshape(f.shape) for name, f in layout.fields.items()}
    ends = np.cumsum(arrays["lengths"])
    if ends[-1] != shard.tokens:
        raise InputError(f"{file}: its lengths do not add up to its tokens; prepare the data set again")
    tokens, supervised = arrays["tokens"].copy(), arrays["supervised"].astype(bool)
    places = [slice(start, end) for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    origins = zip(arrays["source"].tolist(), arrays["record"].tolist(), strict=True)
    rows = [None] * len(places) if features is None else [arrays["features"][place] for place in places]
    return [
        Example(tokens[place], supervised[place], *origin, row)
        for place, origin, row in zip(places, origins, rows, strict=True)
    ]


class ShardWriter:
    """A shard being written, with everything but features in it, which may come in any order.

    Use it in a `with` statement, which removes what was written if something goes wrong, and call `finish` at the end.
    Raises InputError where the file cannot be written.
    """

    def __init__(
        self, directory: Path, shard: Shard, features: FeatureKind | None, manifest: str, examples: list[Example]
    ):
        """manifest: its fingerprint. examples: those of the shard; their features are not written by this."""
        self._path, self._manifest = directory / shard.file, manifest
        self._layout = Layout.of(shard, features)
        lengths = np.array([len(example.tokens) for example in examples])
        self._ends = np.cumsum(lengths)
        with writing(self._path):
            self._whole = WholeFile(self._path)
        try:
            with writing(self._path):
                self._put(0, np.frombuffer(self._layout.header, np.uint8))
                self._put_field("lengths", lengths)
                for name in ("source", "record"):
                    self._put_field(name, np.array([getattr(example, name) for example in examples]))
                for name in ("tokens", "supervised"):
                    self._put_field(name, np.concatenate([getattr(example, name) for example in examples]))
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is not None:
            self.abandon()

    def put_features(self, number: int, features: np.ndarray) -> None:
        """Of the shard's example `number`, from 0: [n, h] in the dtype of the set."""
        field = self._layout.fields["features"]
        end = int(self._ends[number])
        start = int(self._ends[number - 1]) if number else 0
        if features.shape != (end - start, field.shape[1]) or features.dtype != field.dtype:
            raise ValueError(f"{features.dtype} features {features.shape} are not those of example {number}")
        with writing(self._path):
            self._put(field.start + start * field.shape[1] * field.dtype.itemsize, features)

    def finish(self) -> None:
        """Gives the shard its name, and then its sidecar."""
        try:
            with writing(self._path):
                digest = self._whole.finish()
                sidecar = {"manifest": self._manifest, "size": self._layout.size, "sha256": digest}
                write_whole(sidecar_of(self._path), (json.dumps(sidecar, indent=1) + "\n").encode())
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Removes what was written."""
        self._whole.abandon()

    def _put_field(self, name: str, values: np.ndarray) -> None:
        field = self._layout.fields[name]
        self._put(field.start, values.astype(field.dtype))

    def _put(self, start: int, values: np.ndarray) -> None:
        self._whole.file.seek(start)
        self._whole.file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


class WholeFile:
    """A file that appears under its name when it is finished, so that a kill never leaves half of one.

    It is locked until then, by which `remove_leftovers` tells it from one whose writer was killed.
    """

    def __init__(self, path: Path):
        self.path = path
        while True:
            self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
            self.file = open(self._temporary, "w+b")  # noqa: SIM115 - closed by finish or abandon
            with contextlib.suppress(OSError):  # a file system without locks does not let others remove it either
                fcntl.flock(self.file, fcntl.LOCK_EX)
            if self._temporary.exists():  # else it was taken for a leftover before it was locked
                return
            self.file.close()

    def finish(self) -> str:
        """Gives it its name; returns its SHA-256."""
        self.file.flush()
        os.fsync(self.file.fileno())
        digest = sha256(self._temporary)
        os.replace(self._temporary, self.path)
        self.file.close()
        return digest

    def abandon(self) -> None:
        """Removes it, if it is not finished."""
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is not written yet may find the disk full
            self.file.close()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    whole = WholeFile(path)
    try:
        whole.file.write(content)
        whole.finish()
    except BaseException:
        whole.abandon()
        raise


def remove_leftovers(directory: Path) -> None:
    """Removes files that killed writers left, on whatever host; those that are being written are locked."""
    for path in directory.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in one line that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error


def sha256(file: Path, advance: Callable[[int], Any] = lambda count: None) -> str:
    """Of a file's contents; `advance` is told how many bytes were read."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    try:
        with open(file, "rb", buffering=0) as opened:
            while count := opened.readinto(block):
                digest.update(block[:count])
                advance(count)
    except OSError as error:
        raise InputError(f"{file}: not readable ({error.strerror or error})") from error
    return digest.hexdigest()
