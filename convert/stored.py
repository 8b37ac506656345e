"""Parameters that are still in their files: they know their shape, and are read part by part when asked for.

So each host reads only what its devices hold, and no matrix is on the host twice.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from convert.layout import pieces, shape_of, whole
from convert.names import Entry
from poss_jax.errors import InputError

# Tables that old checkpoints hold although they follow from the config.
COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
# What is transposed is copied this many rows at a time: five times as fast as at once, since the caches hold them.
COPY_ROWS = 64
EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


class Stored(Protocol):
    """A tensor in a file, or a numpy array: `stored[slices]` is a numpy array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a stored tensor, as if they were one of their own."""

    tensor: Stored
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index
        return self.tensor[(slice(self.start + rows.start, self.start + rows.stop), *others)]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of ours in a checkpoint. `parameter[slices]` and `numpy.asarray(parameter)` read it, in `dtype`.

    Raises InputError while reading, naming the tensor, where a value is not finite.
    """

    entry: Entry
    parts: tuple[Stored, ...]
    dtype: np.dtype
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.spec.shape

    def astype(self, dtype: Any) -> "Parameter":
        """The same, to be read in another dtype; values are rounded to nearest even."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, self.shape, strict=True))
        layout = self.entry.layout
        result, first = np.empty(shape_of(index), self.dtype), index[layout.axis].start
        along = (slice(None),) * layout.axis
        for piece in pieces(layout, index, self.dtype.itemsize):
            parts = [self._read(number, part) for number, part in enumerate(layout.pick(piece))]
            common = common_dtype(part.dtype for part in parts)  # numpy cannot join bfloat16 and float16
            parts = [part.astype(common, copy=False) for part in parts]
            joined, offset = layout.join(*parts), piece[layout.axis].start - first
            with np.errstate(over="ignore"):  # beyond the range of a narrower type a value becomes infinite
                for start in range(0, joined.shape[layout.axis], COPY_ROWS):
                    rows = joined[(*along, slice(start, start + COPY_ROWS))]
                    stop = offset + start + rows.shape[layout.axis]
                    result[(*along, slice(offset + start, stop))] = rows
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return (self if dtype is None else self.astype(dtype))[whole(self.shape)]

    def _read(self, number: int, index: tuple[slice, ...]) -> np.ndarray:
        values = self.parts[number][index]
        if not all_finite(values):
            names = self.entry.names
            raise InputError(
                f"{self.path}: tensor {names[min(number, len(names) - 1)]!r} holds values that are not finite numbers; "
                "the file is damaged, or was written after a training that failed"
            )
        return values


def all_finite(values: np.ndarray) -> bool:
    """Whether no value is infinite or not a number. Half precision is looked at as bits, which is many times faster."""
    ones = EXPONENTS.get(values.dtype)
    if ones is None:
        return bool(np.isfinite(values).all())
    return not bool(((values.view(np.uint16) & ones) == ones).any())


class Tensors:
    """Finds the tensors of parameters in a checkpoint, and knows at the end that each was used exactly once.

    Nothing is read: names, shapes and dtypes are enough.
    """

    def __init__(self, source: Mapping[str, np.ndarray], path: Path):
        self._source, self._path = source, path
        self._left = {name for name in source if not COMPUTED.match(name)}

    def parameter(self, entry: Entry) -> Parameter:
        """Raises InputError naming a tensor that is missing, of another shape or not of floating point numbers."""
        parts = tuple(self._take(name, shape) for name, shape in entry.stored_shapes.items())
        if len(parts) < len(entry.part_shapes):
            parts = _rows_of(*parts, entry.part_shapes)
        return Parameter(entry, parts, common_dtype(part.dtype for part in parts), self._path)

    def _take(self, name: str, shape: tuple[int, ...]) -> Stored:
        tensor = self._tensor(name)
        if problem := misfit(name, tensor, shape):
            raise InputError(f"{self._path}: {problem}")
        self._left.remove(name)
        return tensor

    def drop(self, name: str) -> None:
        """Leaves a tensor out on purpose."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises InputError if any tensor was not taken."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"{self._path}: unexpected tensor {names[0]!r}{more}; the config has no place for it")

    def problems(self, entries: Iterable[Entry]) -> list[str]:
        """All that `parameter` and `finish` would refuse, a sentence each. Takes nothing."""
        expected = {name: shape for entry in entries for name, shape in entry.stored_shapes.items()}
        found = [misfit(name, self._tensor(name), shape) for name, shape in expected.items()]
        unexpected = [name for name in self._source if name in self._left and name not in expected]
        found += [f"tensor {name!r} is not expected; the config has no place for it" for name in unexpected]
        return [problem for problem in found if problem]

    def _tensor(self, name: str) -> Stored | None:
        return stored(self._source, name) if name in self._left else None


def _rows_of(tensor: Stored, shapes: Sequence[tuple[int, ...]]) -> tuple[Rows, ...]:
    """The parts of a tensor that holds several one after another."""
    starts = itertools.accumulate((shape[0] for shape in shapes), initial=0)
    return tuple(Rows(tensor, start, shape) for start, shape in zip(starts, shapes, strict=False))


def misfit(name: str, tensor: Stored | None, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor (None: it is not there) that should have a shape."""
    if tensor is None:
        return f"tensor {name!r} is missing"
    if tuple(tensor.shape) != shape:
        return f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
    if not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype.name != "bfloat16":
        return f"tensor {name!r} holds {tensor.dtype}, expected floating point numbers"
    return None


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The narrowest type that holds the values of all; float32 for bfloat16 and float16 together."""
    kinds = set(map(np.dtype, dtypes))
    if kinds >= set(EXPONENTS):  # which numpy cannot join
        kinds = kinds - set(EXPONENTS) | {np.dtype(np.float32)}
    return np.result_type(*kinds)


def stored(source: Mapping[str, np.ndarray], name: str) -> Stored:
    """A tensor of a checkpoint, left in its file where the checkpoint can do that."""
    return source.stored(name) if hasattr(source, "stored") else source[name]
