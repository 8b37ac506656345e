"""How a parameter of ours lies in tensors of Hugging Face checkpoints, both ways and in pieces.

Their matrices are separate and [out, in]; ours are fused and [in, out] (`poss_jax.layers`). A `Layout` knows which part
of each tensor a part of the parameter is made of, so that a host reads only what its devices hold, and never a whole
matrix at once. h: hidden size, k: key/value heads, g: queries that share one, d: head size, i: inner size of the MLP,
v: vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]  # of explicit starts and stops

PIECE_BYTES = 32 * 2**20  # of a parameter that is being read


class Layout(Protocol):
    """One way for a parameter to lie in one or several tensors.

    axis: along which a parameter may be put together piece by piece.
    """

    axis: int

    def pick(self, index: Index) -> tuple[Index, ...]:
        """Which part of each tensor `join` makes `parameter[index]` of. Axes that a layout never splits are whole."""

    def join(self, *tensors: np.ndarray) -> np.ndarray:
        """The parameter, or the part of it that `pick` chose tensors for."""

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        """The inverse of `join`, of a whole parameter."""


@dataclasses.dataclass(frozen=True)
class Same:
    """The tensor as it is: the embedding [v, h], norms and biases [h]."""

    axis: int = 0

    def pick(self, index: Index) -> tuple[Index, ...]:
        return (index,)

    def join(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter,)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """[out, in] to [in, out]."""

    axis: int = 1

    def pick(self, index: Index) -> tuple[Index, ...]:
        return (index[::-1],)

    def join(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.T

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter.T,)


@dataclasses.dataclass(frozen=True)
class QueryKeyValue:
    """Matrices [k * g * d, h], [k * d, h], [k * d, h] to [h, k, g + 2, d]."""

    group: int
    head_dim: int
    axis: int = 1

    def pick(self, index: Index) -> tuple[Index, ...]:
        hidden, heads = index[0], index[1]
        keys = (_times(heads, self.head_dim), hidden)
        return (_times(heads, self.group * self.head_dim), hidden), keys, keys

    def join(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.moveaxis(_by_head(self, query, key, value), -1, 0)

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return _by_kind(self, np.moveaxis(parameter, 0, -1))


@dataclasses.dataclass(frozen=True)
class QueryKeyValueBias:
    """Biases [k * g * d], [k * d], [k * d] to [k, g + 2, d]."""

    group: int
    head_dim: int
    axis: int = 0

    def pick(self, index: Index) -> tuple[Index, ...]:
        keys = (_times(index[0], self.head_dim),)
        return (_times(index[0], self.group * self.head_dim),), keys, keys

    def join(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        return _by_head(self, query, key, value)

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return _by_kind(self, parameter)


def _by_head(layout, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """[k, g + 2, d, ...]: for each KV head its queries, its key, its value."""
    parts = (
        query.reshape(-1, layout.group, layout.head_dim, *query.shape[1:]),
        key.reshape(-1, 1, layout.head_dim, *key.shape[1:]),
        value.reshape(-1, 1, layout.head_dim, *value.shape[1:]),
    )
    return np.concatenate(parts, axis=1)


def _by_kind(layout, rows_first: np.ndarray) -> tuple[np.ndarray, ...]:
    """The inverse of `_by_head`."""
    group, rest = layout.group, rows_first.shape[3:]
    parts = rows_first[:, :group], rows_first[:, group], rows_first[:, group + 1]
    return tuple(part.reshape(-1, *rest) for part in parts)


@dataclasses.dataclass(frozen=True)
class AttentionOutput:
    """[h, k * g * d] to [k, g, d, h]."""

    group: int
    head_dim: int
    axis: int = 3

    def pick(self, index: Index) -> tuple[Index, ...]:
        return ((index[3], _times(index[0], self.group * self.head_dim)),)

    def join(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.T.reshape(-1, self.group, self.head_dim, len(tensor))

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return (parameter.reshape(-1, parameter.shape[-1]).T,)


@dataclasses.dataclass(frozen=True)
class GateUp:
    """Two matrices [i, h] to [h, 2, i]."""

    axis: int = 2

    def pick(self, index: Index) -> tuple[Index, ...]:
        return ((index[2], index[0]),) * 2

    def join(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.stack([gate, up]), -1, 0)

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.moveaxis(parameter, 0, -1))


@dataclasses.dataclass(frozen=True)
class GateUpBias:
    """Two biases [i] to [2, i]."""

    axis: int = 1

    def pick(self, index: Index) -> tuple[Index, ...]:
        return ((index[1],),) * 2

    def join(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up])

    def split(self, parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(parameter)


def whole(shape: Sequence[int]) -> Index:
    """The index of a whole array."""
    return tuple(slice(0, size) for size in shape)


def shape_of(index: Index) -> tuple[int, ...]:
    """Shape of what an index picks."""
    return tuple(part.stop - part.start for part in index)


def part_shapes(layout: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors that a parameter of `shape` lies in."""
    return tuple(shape_of(index) for index in layout.pick(whole(shape)))


def pieces(layout: Layout, index: Index, item_bytes: int) -> Iterator[Index]:
    """`index` cut along the layout's axis into pieces of at most `PIECE_BYTES`, or of one row where that is more."""
    first, last = index[layout.axis].start, index[layout.axis].stop
    row_bytes = item_bytes * math.prod(shape_of(index)) // max(last - first, 1)
    rows = max(1, PIECE_BYTES // max(row_bytes, 1))
    for start in range(first, last, rows):
        piece = slice(start, min(start + rows, last))
        yield (*index[: layout.axis], piece, *index[layout.axis + 1 :])


def _times(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)
