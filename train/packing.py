"""Batches of training examples: static shapes, nearly no padding, and the same ones after a resume.

A batch is a pure function of (data, settings, seed, epoch, number of the batch), so the position in the data is two
numbers, and nothing else has to be saved.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from poss_jax.errors import InputError
from train.examples import Dataset, Example

PACKINGS = ("rows", "none")
WINDOW = 1024  # examples that are packed among themselves, longest first
UNPACKED_STEP = 64  # with one conversation a row, rows are as long as the longest, rounded up to this


@dataclasses.dataclass(frozen=True)
class Batch:
    """b rows of t tokens; row i of the arrays is row i of the draft unroll.

    tokens [b, t] int32, 0 in padding. segments [b, t] int32: conversations of a row, numbered from 1; 0 is padding.
    offsets [b, t] int32: place within the conversation, from 0; 0 in padding. supervised [b, t] int32: 1 where
    predictions count; never the last row of a conversation, whose following token there is none (or a stranger's).
    features [b, t, h], 0 in padding, in the dtype that they were stored in, or None: the target's, at their tokens.
    """

    tokens: np.ndarray
    segments: np.ndarray
    offsets: np.ndarray
    supervised: np.ndarray
    features: np.ndarray | None = None

    @property
    def real_tokens(self) -> int:
        """How many tokens are no padding."""
        return int((self.segments > 0).sum())

    @classmethod
    def of(cls, rows: Sequence[Sequence[Example]], width: int) -> "Batch":
        """One row for each list of examples, which fit into `width` tokens together; all have features or none has."""
        known = next((example.features for row in rows for example in row), None)
        features = None if known is None else np.zeros((len(rows), width, known.shape[1]), known.dtype)
        batch = cls(*(np.zeros((len(rows), width), np.int32) for _ in range(4)), features)
        for row, examples in enumerate(rows):
            start = 0
            for number, example in enumerate(examples, 1):
                place = (row, slice(start, start + len(example.tokens)))
                batch.tokens[place], batch.supervised[place] = example.tokens, example.supervised
                batch.segments[place], batch.offsets[place] = number, np.arange(len(example.tokens))
                if features is not None:
                    features[place] = example.features  # which reads them, if they are on disk
                start += len(example.tokens)
        return batch


class Batches:
    """The batches of all epochs.

    With packing "rows" several examples share a row of `max_length` tokens. With "none" each has its own, and rows are
    no longer than the longest example needs. An epoch takes every example once; if sources have weights, it takes as
    many as it can of each in these shares, and following epochs go on where it stopped. The last batch of an epoch is
    filled up: packed, with rows of the same epoch again; otherwise, and if there are too few, with empty rows.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, packing: str = "rows", seed: int = 0):
        if packing not in PACKINGS:
            raise InputError(f"--packing {packing!r} is not supported; supported: {', '.join(PACKINGS)}")
        if batch_size < 1:
            raise InputError(f"--batch-size {batch_size}: must be at least 1")
        if seed < 0:
            raise InputError(f"--seed {seed}: must not be negative")
        if not dataset.examples:
            raise InputError("there are no examples to train on")
        if len({example.features is None for example in dataset.examples}) > 1:
            raise InputError("some examples have features of the target and others have not; run train.features on all")
        self.dataset, self.batch_size, self.packing, self.seed = dataset, batch_size, packing, seed
        self.lengths = np.array([len(example.tokens) for example in dataset.examples])
        longest = -(-int(self.lengths.max()) // UNPACKED_STEP) * UNPACKED_STEP
        self.width = dataset.max_length if packing == "rows" else min(dataset.max_length, longest)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
        self._count = functools.cache(lambda epoch: len(self._plan(epoch)))

    def count(self, epoch: int) -> int:
        """Number of batches of an epoch, from 0 on; packed, it may differ by a few between epochs."""
        return self._count(epoch)

    def total(self, epochs: int) -> int:
        """Number of batches of the first `epochs` epochs."""
        return sum(map(self.count, range(epochs)))

    def members(self, epoch: int, index: int) -> list[list[int]]:
        """Numbers of the examples in each row of a batch."""
        return self._plan(epoch)[index]

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index`, from 0, of an epoch."""
        rows = [[self.dataset.examples[number] for number in row] for row in self.members(epoch, index)]
        return Batch.of(rows, self.width)

    def describe(self, epoch: int, index: int) -> str:
        """A batch by name, for messages: its place, and where its first examples come from."""
        numbers = [number for row in self.members(epoch, index) for number in row]
        named = "; ".join(self.dataset.describe(number) for number in numbers[:4])
        more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
        return f"epoch {epoch}, batch {index} ({named}{more})"

    def start(self, position: dict | None = None) -> "Stream":
        """Batches without end, from the beginning or from a saved position."""
        return Stream(self, position)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names everything that decides what the batches are."""
        return f"{self.dataset.fingerprint()}-{self.packing}-{self.batch_size}x{self.width}-seed{self.seed}"

    def _make_plan(self, epoch: int) -> list[list[list[int]]]:
        """For each batch of the epoch, for each of its rows, numbers of examples."""
        random = np.random.default_rng((self.seed, 1, epoch))
        order = random.permutation(self._chosen(epoch))
        if self.packing == "none":
            rows = [[number] for number in order.tolist()]
            rows += [[] for _ in range(-len(rows) % self.batch_size)]
            return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        rows = pack(self.lengths, order, self.width)
        rows = [rows[index] for index in random.permutation(len(rows))]
        missing = -len(rows) % self.batch_size
        rows += rows[:missing] if len(rows) > self.batch_size else [[] for _ in range(missing)]
        # Rows with room are dealt out evenly, so that no step has many of them.
        rows.sort(key=lambda row: int(self.lengths[row].sum()))
        count = len(rows) // self.batch_size
        return [rows[index::count] for index in random.permutation(count).tolist()]

    def _chosen(self, epoch: int) -> np.ndarray:
        """Numbers of the examples that an epoch takes."""
        weights = [source.weight for source in self.dataset.sources]
        if weights[0] is None or len(weights) == 1:
            return np.arange(len(self.lengths))
        of_source = np.array([example.source for example in self.dataset.examples])
        members = [np.flatnonzero(of_source == number) for number in range(len(weights))]
        for source, numbers in zip(self.dataset.sources, members, strict=True):
            if not len(numbers):
                raise InputError(f"{source.name}: has a weight, but no example is left of it")
        scale = min(len(numbers) / weight for numbers, weight in zip(members, weights, strict=True))
        chosen = []
        for source, (numbers, weight) in enumerate(zip(members, weights, strict=True)):
            share = min(len(numbers), max(1, round(weight * scale)))
            order = np.random.default_rng((self.seed, 0, source)).permutation(numbers)
            chosen.append(order[(epoch * share + np.arange(share)) % len(order)])
        return np.concatenate(chosen)


class Stream(Iterator[Batch]):
    """Iterates over batches of epoch after epoch; `position` says where it stands, as plain values to save."""

    def __init__(self, batches: Batches, position: dict | None = None):
        self.batches, self.epoch, self.index = batches, 0, 0
        if position is not None:
            if position.get("fingerprint") != batches.fingerprint:
                raise InputError(
                    f"cannot resume: the saved position is of data or settings {position.get('fingerprint')!r}, "
                    f"these are {batches.fingerprint!r}; give the same --data, sizes and --seed"
                )
            self.epoch, self.index = int(position["epoch"]), int(position["batch"])

    @property
    def position(self) -> dict:
        """Where the next batch is: {"epoch", "batch", "fingerprint"}."""
        return {"epoch": self.epoch, "batch": self.index, "fingerprint": self.batches.fingerprint}

    def __next__(self) -> Batch:
        if self.index >= self.batches.count(self.epoch):
            self.epoch, self.index = self.epoch + 1, 0
        batch = self.batches.batch(self.epoch, self.index)
        self.index += 1
        return batch


def pack(lengths: np.ndarray, order: np.ndarray, width: int) -> list[list[int]]:
    """Rows of examples that fit into `width` tokens together, in windows of the given order.

    Within a window the longest come first and each goes into the fullest row that has room, which leaves less than
    the shortest remaining. Rows with room stay open for the windows that follow.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), ascending
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        for number in window[np.argsort(-lengths[window], kind="stable")].tolist():
            length = int(lengths[number])
            found = bisect.bisect_left(room, (length, -1))
            if found < len(room):
                free, row = room.pop(found)
                rows[row].append(number)
            else:
                free, row = width, len(rows)
                rows.append([number])
            if free > length:
                bisect.insort(room, (free - length, row))
    return rows
