"""The training loop: updates, figures of every one, evaluations, checkpoints, and clean ends."""

import collections
import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from poss_jax.errors import InputError
from poss_jax.objective import Params
from train.checkpoint import Checkpoints
from train.evaluate import Evaluation
from train.feed import Feed, UpdateRows
from train.metrics import MetricsLog
from train.schedule import Schedule
from train.step import Metrics, Trainer, TrainState


@dataclasses.dataclass(frozen=True)
class Pace:
    """How often, in updates: save checkpoints, evaluate. Both are done at the end as well."""

    save_every: int
    evaluate_every: int


@dataclasses.dataclass(frozen=True)
class Logs:
    """Where figures go: of updates and of evaluations. Only the first process has them."""

    updates: MetricsLog
    evaluations: MetricsLog


@dataclasses.dataclass
class Running:
    """An update whose figures have not been looked at. host_seconds: what it took to feed and to start it."""

    step: int
    metrics: Metrics
    rate: float
    fed: UpdateRows
    host_seconds: float


@dataclasses.dataclass
class Loop:
    """One run, or what is left of it. meta: what checkpoints hold besides the state and what the loop adds.

    on_best: called with the parameters whenever no evaluation before was better. best: the highest figure of
    earlier processes of this run.
    """

    trainer: Trainer
    schedule: Schedule
    feed: Feed
    frozen: Params
    checkpoints: Checkpoints
    evaluation: Evaluation | None
    logs: Logs | None
    pace: Pace
    meta: dict[str, Any]
    on_best: Callable[[Params, int], None]
    best: float | None = None

    def run(self, state: TrainState, update: Callable) -> tuple[TrainState, str]:
        """Trains to the end of the schedule or to SIGTERM: the last state, and "done" or "stopped".

        `update` is the compiled `Trainer.update`. Raises InputError, naming the batch, where the loss or a gradient is
        not finite; the checkpoints before it stay.
        """
        self._step = self._first = int(state.step)
        self._running: collections.deque[Running] = collections.deque()
        self._reported = time.monotonic()
        asked = StopRequest()
        with asked, self._bar() as self._progress, jax.set_mesh(self.trainer.mesh):
            while not self.schedule.done(self._step) and not asked.at(self._step):
                self.schedule.tick()
                began = time.monotonic()
                fed, rate = next(self.feed), self.schedule.rate(self._step + 1)
                state, metrics = update(state, self.frozen, fed.rows, np.float32(rate))
                self._step += 1
                self._running.append(Running(self._step, metrics, rate, fed, time.monotonic() - began))
                if len(self._running) > 1:  # the update before is done by now, and the devices have work
                    self._report(self._running.popleft())
                self._save_if_due(state, fed)
            self._report_all()
            stopped = not self.schedule.done(self._step)
            if self._step == 0 and not stopped:
                raise InputError("the time was over before the first update; --minutes must leave some for training")
            if self._step > self._first or self.checkpoints.latest is None:
                position = fed.position if self._step > self._first else self.meta["position"]
                self._save(state, position, None if stopped else self._evaluate(state))
            self.checkpoints.wait()
        return state, "stopped" if stopped else "done"

    @contextlib.contextmanager
    def _bar(self) -> Iterator[tqdm]:
        """Counts updates, or seconds where time ends the run."""
        whole = self.schedule.seconds_left
        total = self.schedule.updates if whole is None else round(whole)
        with tqdm(
            total=total,
            initial=self._step if whole is None else 0,
            unit="update" if whole is None else "s",
            desc="training",
            file=sys.stderr,
            disable=None if self.logs else True,
        ) as progress:
            yield progress

    def _save_if_due(self, state: TrainState, fed: UpdateRows) -> None:
        def due(every: int) -> bool:
            return self._step % every == 0 and not self.schedule.done(self._step)

        evaluated = self.evaluation is not None and due(self.pace.evaluate_every)
        if evaluated or due(self.pace.save_every):
            self._report_all()  # which finds what is not finite before it is saved
            self._save(state, fed.position, self._evaluate(state) if evaluated else None)

    def _save(self, state: TrainState, position: dict, figure: float | None) -> None:
        self.schedule.tick()  # evaluations take time
        whole, training = self.schedule.used
        added = {"position": position, "seconds": [whole, training], "best": self.best}
        self.checkpoints.save(self._step, state, self.meta | added, figure=figure)

    def _evaluate(self, state: TrainState) -> float | None:
        if self.evaluation is None:
            return None
        figures = self.evaluation(state.params, self.frozen)
        figure = figures["tokens_per_round"]
        if self.logs:
            self.logs.evaluations.write(self._step, figures)
            shown = " ".join(f"{value:.3f}" for value in figures["acceptance"])
            self._progress.write(
                f"step {self._step}: held-out loss {figures['loss']:.4f}, {figure:.3f} tokens per round of a chain, "
                f"acceptance by position {shown}",
                file=sys.stderr,
            )
        if self.best is None or figure >= self.best:  # of equals the newest, as `Checkpoints` has it
            self.best = figure
            self.on_best(state.params, self._step)
        return figure

    def _report_all(self) -> None:
        while self._running:
            self._report(self._running.popleft())

    def _report(self, running: Running) -> None:
        asked = time.monotonic()
        metrics = jax.device_get(running.metrics)  # waits for the update
        now = time.monotonic()
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        # Not the time since the update before: where the host is slower than the devices, a checkpoint's or the end's
        # last update has long been done when that one is looked at.
        speed = running.fed.tokens / max(running.host_seconds + now - asked, 1e-9)
        if self.logs:
            figures = {
                "loss": loss,
                **{name: part.tolist() for name, part in metrics.terms._asdict().items()},
                "gradient_norm": norm,
                "learning_rate": running.rate,
                "tokens": running.fed.tokens,
                "epoch": running.fed.position["epoch"],
                "tokens_per_second": speed,
            }
            self.logs.updates.write(running.step, figures)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._not_finite(running, loss, norm)
        self._progress.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
        self._progress.update(1 if self.schedule.seconds_left is None else now - self._reported)
        self._reported = now

    def _not_finite(self, running: Running, loss: float, norm: float) -> InputError:
        self.checkpoints.wait()
        kept = self.checkpoints.latest
        return InputError(
            f"step {running.step}: loss {loss}, gradient norm {norm}, with {running.fed.names}; "
            + ("no checkpoint was saved before it" if kept is None else f"the checkpoint of step {kept} is kept")
            + "; try a smaller --learning-rate, or leave those records out"
        )


class StopRequest:
    """Notes SIGTERM, as schedulers send it before they take a machine away. With several processes JAX's preemption
    service notes it, and `at` is true for all of them at the same step.
    """

    def __init__(self):
        self._asked = False

    def __enter__(self) -> "StopRequest":
        self._alone = jax.process_count() == 1
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_) -> None:
        self._asked = True

    def at(self, step: int) -> bool:
        """Whether to stop before the update after `step`."""
        return self._asked if self._alone else multihost_utils.reached_preemption_sync_point(step)
