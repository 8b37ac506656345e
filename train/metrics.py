"""Figures of a training run by step: lines of JSON, and TensorBoard files."""

import json
import math
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from poss_jax.errors import InputError

EVALUATIONS = "evaluations.jsonl"  # name of the log of evaluations


class MetricsLog:
    """`directory`/`filename` with one object a step, and TensorBoard files in `directory`/tensorboard/.

    Lines are strict JSON, {"step": 3, "loss": 2.5, ...}: a figure that is not finite is null there (TensorBoard files
    keep it). Each line is handed to the system whole as it is written, so a kill loses none. One process writes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        filename: str = "metrics.jsonl",
    ):
        """A new log, or one that goes on after `resume_step`: lines of later steps are removed, to be written again.

        Raises InputError if a new log would be mixed with that of another run, and if files cannot be written.
        """
        self.path, self._events = Path(directory) / filename, None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _keep_until(self.path, resume_step)
            elif self.path.exists() and self.path.stat().st_size:
                raise InputError(f"{self.path}: holds the figures of another run; give --resume, or another --out")
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
            if tensorboard:
                self._events = _open_events(self.path.parent / "tensorboard" / self.path.stem, resume_step)
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, step: int, values: dict) -> None:
        """Adds a step. Values are numbers (Python's, numpy's, arrays of one) or lists of them.

        In TensorBoard each number has the tag of its name, item i of a list `name/i`.
        """
        plain = {name: _plain(value) for name, value in values.items()}
        try:
            line = {"step": int(step)} | {name: _finite(value) for name, value in plain.items()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            if self._events:
                scalars = [Summary.Value(tag=tag, simple_value=number) for tag, number in _tagged(plain)]
                self._events.write_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=scalars)))
                self._events.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def flush(self) -> None:
        """Hands everything to the system."""
        try:
            self._file.flush()
            if self._events:
                self._events.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Flushes and closes the files."""
        try:
            self._file.close()
            if self._events:
                self._events.close()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        reason = error.strerror or error
        return InputError(f"{self.path}: cannot be written: {reason}; make room, or give another --out")


def last_line(path: Path) -> dict:
    """The newest object of a log, {} if there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}


def _keep_until(path: Path, step: int) -> None:
    """Cuts a log off after the line of `step`, and a last line that a kill left unfinished.

    Raises InputError for any other line that is not one of ours.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        kept, ended = 0, True
        for number, line in enumerate(file, 1):
            try:
                later = json.loads(line)["step"] > step
            except (ValueError, TypeError, KeyError):
                if not line.endswith(b"\n"):
                    break
                raise InputError(f"{path}: line {number} is no object with a step; remove it to resume") from None
            if later:
                break
            kept, ended = kept + len(line), line.endswith(b"\n")
        file.truncate(kept)
        if not ended:  # the kill came between a line and its end
            file.seek(kept)
            file.write(b"\n")


def _open_events(directory: Path, resume_step: int | None) -> EventsWriter:
    """A new TensorBoard file; what those before it say of steps after `resume_step` is hidden.

    tensorboardX's SummaryWriter would pass events on through a queue: a thread whose disk is full dies silently and
    the queue then blocks training.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # The time is in the name so that no two runs share a file. TensorBoard reads them in this order.
    events = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
    if resume_step is not None:
        start = SessionLog(status=SessionLog.START)
        events.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))
    return events


def _plain(value):
    """Python's numbers for those of numpy and JAX, in lists too."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _finite(value):
    """null in place of what JSON has no number for."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tagged(values: dict) -> list[tuple[str, float]]:
    """(tag, number) of each number."""
    tagged = []
    for name, value in values.items():
        if isinstance(value, list):
            tagged += _tagged({f"{name}/{index}": item for index, item in enumerate(value)})
        elif isinstance(value, int | float):
            tagged.append((name, value))
    return tagged
