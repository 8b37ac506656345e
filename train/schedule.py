"""How long a run is, and what learning rate that gives each of its updates."""

import dataclasses
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from poss_jax.errors import InputError
from train.packing import Batches
from train.step import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RunLength:
    """Exactly one of the three is set. minutes count from the start of the process, loading and compiling included."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None

    def __post_init__(self):
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if len(given) != 1:
            raise InputError("give the length of the run in one way: --steps, --epochs or --minutes")
        ((name, value),) = given.items()
        if not 0 < value < float("inf"):
            raise InputError(f"--{name} {value}: must be above 0")

    def updates(self, batches: Batches, accumulate: int) -> int | None:
        """Number of updates; None if time decides. Packed epochs differ by a few batches, so they are all counted."""
        return self.steps if self.epochs is None else -(-batches.total(self.epochs) // accumulate)


class Schedule:
    """Learning rates by update, or by the time that has passed.

    `used`: (seconds of the whole run, seconds of training) of earlier processes of this run.
    """

    def __init__(
        self,
        length: RunLength,
        updates: int | None,
        optimizer: OptimizerConfig,
        process_started: float,
        used: tuple[float, float] = (0.0, 0.0),
    ):
        self.updates, self._optimizer, self._before = updates, optimizer, used
        self._process_started, self._training_started = process_started, time.monotonic()
        self._seconds = None if length.minutes is None else 60 * length.minutes
        self.used = used
        self.tick()

    def tick(self) -> None:
        """Looks at the clock: `used` seconds so far, of the whole run and of training alone.

        Where time decides, several processes take the first one's, so that all end at the same update.
        """
        now = time.monotonic()
        used = (self._before[0] + now - self._process_started, self._before[1] + now - self._training_started)
        if self._seconds is not None and jax.process_count() > 1:
            used = tuple(multihost_utils.broadcast_one_to_all(np.array(used, np.float32)).tolist())
        self.used = used

    @property
    def seconds_left(self) -> float | None:
        """Until the end of a run that time ends, at the last `tick`; else None."""
        return None if self._seconds is None else self._seconds - self.used[0]

    def rate(self, step: int) -> float:
        """Learning rate of update `step`, from 1 on."""
        if self._seconds is None:
            return self._optimizer.rate(step, self.updates)
        whole, training = self.used
        length = training + max(self._seconds - whole, 0.0)  # what training gets in all
        return self._optimizer.rate(1000 * training / length, 1000)  # by thousandths, so that warm-up has a length

    def done(self, step: int) -> bool:
        """Whether no update follows number `step`."""
        return step >= self.updates if self._seconds is None else self.seconds_left <= 0
