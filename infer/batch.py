"""One batch of prompts on the device: arrays of static shape, the programs, and what the host reads of them."""

import contextlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from infer.loading import Models, precise
from infer.results import Generation, rounds_needed
from infer.settings import Settings
from infer.text import find_stop, tokens_until_stop
from infer.trace import round_record
from poss_jax import decode
from poss_jax.decode import Params, Plan, State

SMALLEST_BUCKET, LARGEST_STEP = 16, 512
ROUNDS_UNSEEN = 64  # between visits of the host where no one waits: Ctrl-C is heard at the next one
FIRST_SLOTS = 1024  # of the caches of a long text, which double whenever it has filled them


class Batch:
    """`settings.batch_size` rows, the first of them `prompts` (checked token ids) with a seed each.

    `context` is the most tokens, prompt included, that a row may have. `width`: prompts are padded to this much at
    least, for batches of different buckets that are to share a program.
    """

    def __init__(
        self,
        models: Models,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        settings: Settings,
        context: int,
        *,
        trace: bool = False,
        width: int = 0,
    ):
        self.models, self.prompts, self.settings, self.trace = models, prompts, settings, trace
        draft = None if settings.plain else models.draft
        shape = settings.tree.clamp(models.draft_choices)  # no wider than what may be drafted
        self.plan = Plan.create(
            models.target.config, draft.config if draft else None, shape, settings.sampling, models.kernel
        )
        self.params = Params(models.target.params, draft.params if self.plan.draft else None)
        width = max(bucket(max(map(len, prompts))), width)
        # Depends on the bucket and not on the prompts, so that prompts of one bucket share a program.
        most = max(min(width + settings.max_new_tokens, context), width)
        self.slots = cache_size(most + self.plan.slack, self.plan.kernel)  # in the end
        rows = settings.batch_size  # the last batch is filled up with companions that never run
        prompt = np.zeros((rows, width), np.int32)
        length, limit = np.full(rows, 2, np.int32), np.zeros(rows, np.int32)
        for row, ids in enumerate(prompts):
            prompt[row, : len(ids)] = ids
            length[row] = len(ids)
            limit[row] = min(len(ids) + settings.max_new_tokens, context)
        keys = jax.vmap(jax.random.key)(np.resize(np.asarray(seeds, np.uint32), rows))
        self.arguments = (prompt, length, limit, keys)
        ids = () if settings.ignore_eos else models.eos_ids if settings.eos_ids is None else settings.eos_ids
        self.eos_ids = np.asarray([-1, *ids], np.int32)
        self.state: State | None = None
        self.compile_seconds = 0.0
        self._compiled: set[tuple] = set()
        self.ended = np.zeros(rows, bool)  # by the host, at a stop string
        self.traces: list[list[dict]] = [[] for _ in prompts]

    def compile(self, compiled: set[tuple]) -> None:
        """Compiles the programs of prompts and rounds unless `compiled` has their shapes already. What that takes, and
        what programs of more slots will take when the texts have come to them, adds to `compile_seconds`.
        """
        self._compiled = compiled
        if self._shapes(self._first_slots) in compiled:
            return
        started = time.perf_counter()
        self.start()
        self._decode(1)  # a round, since devices load some kernels when they first run
        jax.block_until_ready(self.state.length)
        self.state = None
        compiled.add(self._shapes(self._first_slots))
        self.compile_seconds += time.perf_counter() - started

    def _shapes(self, slots: int) -> tuple:
        """What a compiled program depends on."""
        return self.plan, slots, self.arguments[0].shape, self.eos_ids.shape

    @property
    def _first_slots(self) -> int:
        """Enough for the prompts and a round; all where the kernel of attention reads what is filled alone."""
        if self.plan.kernel == "mosaic":
            return self.slots
        least = self.arguments[0].shape[1] + 2 * self.plan.slack
        return min(self.slots, round_up(least, FIRST_SLOTS))

    def start(self) -> None:
        """Runs the prompts."""
        with self.precise():
            self.state = decode.jit_prefill(self.params, self.plan, self._first_slots, *self.arguments, self.eos_ids)
        self._look()

    def advance(self, rounds: int) -> None:
        """Runs `rounds` rounds at most, fewer where the caches are full before; one at a time if they are traced."""
        before = self.length - 1, self.stopped
        slots = self.state.tokens.shape[1]
        if self.length.max() + self.plan.slack > slots:
            self._grow(min(2 * slots, self.slots))
        self._decode(1 if self.trace else rounds)
        self._look()
        if self.trace:
            last = jax.tree.map(np.asarray, self.state.last_round)
            for row, trace in enumerate(self.traces):
                if before[1][row] == decode.RUNNING and not self.ended[row]:
                    trace.append(round_record(last, row, len(trace), int(before[0][row])))

    def finish(self, rounds: int = np.iinfo(np.int32).max) -> None:
        """Runs rounds until every row has stopped, at most so many between visits of the host."""
        while np.any((self.stopped == decode.RUNNING) & ~self.ended):
            self.advance(rounds)

    def _grow(self, slots: int) -> None:
        started = time.perf_counter()
        self.state = decode.jit_grow(self.state, slots)
        if self._shapes(slots) not in self._compiled:
            self._decode(0)
            jax.block_until_ready(self.state.length)
            self._compiled.add(self._shapes(slots))
            self.compile_seconds += time.perf_counter() - started

    def _decode(self, rounds: int) -> None:
        with self.precise():
            self.state = decode.jit_decode(
                self.params, self.plan, self.state, self.eos_ids, np.int32(rounds), self.ended
            )

    def precise(self) -> contextlib.AbstractContextManager:
        """See `loading.precise`."""
        return precise(self.models.dtype)

    def _look(self) -> None:
        state = self.state
        self.tokens, self.length, self.stopped, self.rounds, self.accept_lengths = map(
            np.asarray, (state.tokens, state.length, state.stopped, state.rounds, state.accept_lengths)
        )

    def answer(self, row: int, seconds: float) -> Generation:
        """What is known of a row so far; `stop_reason` None while it runs. A row with a stop string runs no more."""
        ids = list(self.prompts[row])
        token_ids = self.tokens[row, len(ids) : self.length[row]].tolist()
        accept_lengths = self.accept_lengths[row, : self.rounds[row]].tolist()
        reason, text, stop = self._device_reason(row), self._text(token_ids), self.settings.stop
        if stop and find_stop(text, stop) is not None:
            # The string that is completed first decides, however many tokens are there already.
            token_ids = token_ids[: tokens_until_stop(self._text, token_ids, stop)]
            text = self._text(token_ids)
            reason, text = "stop_string", text[: find_stop(text, stop)]
            accept_lengths = accept_lengths[: rounds_needed(accept_lengths, len(token_ids))]
            self.ended[row] = True
        trace = self.traces[row][: len(accept_lengths)] if self.trace else None
        return Generation(ids, token_ids, text, reason, accept_lengths, seconds, self.compile_seconds, trace)

    def _device_reason(self, row: int) -> str | None:
        if self.stopped[row] == decode.RUNNING:
            return None
        if self.stopped[row] == decode.STOPPED_AT_EOS:
            return "eos"
        new = self.length[row] - len(self.prompts[row])
        return "max_new_tokens" if new >= self.settings.max_new_tokens else "context"

    def _text(self, token_ids: list[int]) -> str | None:
        tokenizer = self.models.tokenizer
        return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)


def bucket(length: int) -> int:
    """The padded length of a prompt: a power of two from 16 to 512, then the next multiple of 512."""
    if length > LARGEST_STEP:
        return round_up(length, LARGEST_STEP)
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def cache_size(slots: int, kernel: str) -> int:
    """So many slots or more, of few sizes, as each is a program of its own that takes long to compile.

    Attention that reads what is filled alone has multiples of FIRST_SLOTS, so short texts share one size. Plain
    attention costs by the slot: 64, 256, then multiples of 512.
    """
    if kernel == "mosaic":
        return round_up(slots, FIRST_SLOTS)
    small = (FIRST_SLOTS // 16, FIRST_SLOTS // 4)
    return next((size for size in small if slots <= size), round_up(slots, FIRST_SLOTS // 2))


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
