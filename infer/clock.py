"""When a long command is to end: after so many minutes, or because it was asked to."""

import os
import signal
import time


class Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The work is to end here; the text says why."""


class Clock:
    """Asked before each step of the work. Used as a context, SIGTERM and Ctrl-C end the work before the next
    step, and a second Ctrl-C at once.

    A step is begun only if one as long as the longest so far would be over in time; the first is always begun, so that
    every run gets on. `minutes` count from `started` (seconds of `time.monotonic`); None: no end. `reserve`: seconds
    kept for what comes after the work.
    """

    def __init__(self, minutes: float | None, started: float, reserve: float = 0.0):
        self._end = None if minutes is None else started + 60 * minutes - reserve
        self._longest, self._step_started = 0.0, None
        self._asked: str | None = None  # by which signal

    def __enter__(self) -> "Clock":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        if number == signal.SIGINT and self._asked:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name
        os.write(2, b"\nstopping after this step; Ctrl-C ends it here\n")  # sys.stderr may be at work: no reentry

    def step(self) -> None:
        """A step begins. Raises Stopped if it is not to."""
        now = time.monotonic()
        if self._asked:
            raise Stopped(f"stopped by {self._asked}")
        if self._step_started is not None:
            self._longest = max(self._longest, now - self._step_started)
            if self._end is not None and now + self._longest > self._end:
                raise Stopped("the time of --minutes is over")
        self._step_started = now
