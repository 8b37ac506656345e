"""Batches on their way to the devices: the next update's are put there while the current one runs."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from poss_jax.objective import Rows
from train.packing import Batch, Batches
from train.step import Trainer


def stack(batches: list[Batch]) -> Rows:
    """Host arrays [a, b, t] of a micro-batches."""
    fields = (field.name for field in dataclasses.fields(Batch))
    parts = {name: [getattr(batch, name) for batch in batches] for name in fields}
    return Rows(**{name: None if part[0] is None else np.stack(part) for name, part in parts.items()})


@dataclasses.dataclass(frozen=True)
class UpdateRows:
    """Of one update. rows: on the devices. position: of the data behind it, to be saved. names: its batches, for
    messages. tokens: real ones, no padding.
    """

    rows: Rows
    position: dict
    names: str
    tokens: int


class Feed(Iterator[UpdateRows]):
    """The rows of update after update, `accumulate` batches each, from a saved position or the beginning."""

    def __init__(self, trainer: Trainer, batches: Batches, accumulate: int, position: dict | None = None):
        self._trainer, self._batches, self._accumulate = trainer, batches, accumulate
        self._stream = batches.start(position)
        self._worker = ThreadPoolExecutor(1, "feed")
        self._next = self._worker.submit(self._make)

    def _make(self) -> UpdateRows:
        taken, names = [], []
        for _ in range(self._accumulate):
            taken.append(next(self._stream))
            after = self._stream.position
            names.append(self._batches.describe(after["epoch"], after["batch"] - 1))
        rows = self._trainer.put_rows(stack(taken))
        return UpdateRows(rows, self._stream.position, "; ".join(names), sum(batch.real_tokens for batch in taken))

    def __next__(self) -> UpdateRows:
        ready = self._next.result()
        self._next = self._worker.submit(self._make)
        return ready

    def close(self) -> None:
        """Waits for the batch that nobody will take."""
        self._worker.shutdown(cancel_futures=True)
