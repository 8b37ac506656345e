"""Time on the device: whole answers, and the two parts of a round. Compilation is in none of the figures.

Every clock stops when the host has the result, so nothing is still running on the device.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.batch import ROUNDS_UNSEEN, Batch
from infer.engine import Generator
from infer.measures import Duration
from infer.results import Generation
from infer.settings import Settings
from poss_jax import decode
from poss_jax.decode import Params, Plan, State

ROUNDS_BEFORE_SPLIT = 4  # so that the state is one from the middle of an answer
SPLIT_REPEATS = 10  # times that each part runs in one program, so that starting the program costs little of it


@dataclasses.dataclass(frozen=True)
class Timed:
    """An answer, and the seconds of its prompt's pass and of its rounds."""

    answer: Generation
    duration: Duration


class Runner:
    """Answers batches with one generator, each program compiled before any clock starts."""

    def __init__(self, generator: Generator):
        self.generator = generator
        self._compiled: set[tuple] = set()

    def answer(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Settings, width: int = 0
    ) -> list[Generation]:
        """Answers of one batch, of `settings.batch_size` rows whether or not there are as many prompts."""
        batch = self._batch(prompts, seeds, settings, width)
        batch.start()
        batch.finish(ROUNDS_UNSEEN)
        return [batch.answer(row, 0.0) for row in range(len(prompts))]

    def time(self, prompt: list[int], seed: int, settings: Settings, repeats: int) -> Timed:
        """One prompt alone, `repeats` times; the median of each time."""
        prefill, rounds = [], []
        for _ in range(repeats):
            batch = self._batch([prompt], [seed], settings)
            prefill.append(_seconds(batch.start))
            rounds.append(_finish(batch))
        answer = batch.answer(0, 0.0)
        medians = statistics.median(prefill), statistics.median(rounds)
        return Timed(answer, Duration(len(answer.token_ids), 1, answer.rounds, *medians))

    def split(self, prompt: list[int], seed: int, settings: Settings) -> dict[str, Any]:
        """`draft_seconds` and `verify_seconds` of one round in the middle of the answer to a prompt, the two as
        programs of their own, and `round_seconds` of the rounds that follow there, as generation runs them.
        `target_cache_bytes` and `draft_cache_bytes` of the caches that they work on.
        """
        batch = self._batch([prompt], [seed], settings)
        batch.start()
        batch.advance(ROUNDS_BEFORE_SPLIT)
        state = jax.tree.map(jnp.copy, batch.state)  # what follows takes the batch's own
        with batch.precise():
            tree = repeat_draft(batch.params, batch.plan, state, np.int32(1))[0]
            draft = _per_repeat(lambda n: repeat_draft(batch.params, batch.plan, state, n))
            verify = _per_repeat(lambda n: repeat_verify(batch.params, batch.plan, state, tree, batch.eos_ids, n))
        before = int(batch.rounds[0])
        seconds = _finish(batch)
        rounds = int(batch.rounds[0]) - before
        return {
            "draft_seconds": draft,
            "verify_seconds": verify,
            "round_seconds": seconds / rounds if rounds else None,
            "target_cache_bytes": bytes_of(state.target_caches),
            "draft_cache_bytes": bytes_of(state.draft_caches),
        }

    def _batch(self, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Settings, width: int = 0) -> Batch:
        generator = self.generator
        batch = Batch(generator.models, prompts, seeds, settings, generator.context(settings), width=width)
        batch.compile(self._compiled)
        return batch


@functools.partial(jax.jit, static_argnames="plan")
def repeat_draft(params: Params, plan: Plan, state: State, repeats: jax.Array):
    """The draft part of the same round, `repeats` times in a row: its tree and caches.

    Each repetition waits for the tree of the one before: no token is negative, but the compiler does not know that,
    so it cannot take what stays the same out of the loop.
    """

    def once(_, carry):
        tree, caches = carry
        nothing = jnp.any(tree.tokens < 0)
        again = state.replace(
            draft_caches=caches,
            tokens=state.tokens + nothing,
            features=state.features + nothing.astype(state.features.dtype),
        )
        return decode.draft_round(params, plan, again)

    start = (state.last_round.tree, state.draft_caches)
    return jax.lax.fori_loop(0, repeats, once, start)


@functools.partial(jax.jit, static_argnames="plan")
def repeat_verify(params: Params, plan: Plan, state: State, tree, eos_ids: jax.Array, repeats: jax.Array) -> State:
    """The verify part of the same round, commit included, `repeats` times in a row: the state after it."""

    def once(_, done: State) -> State:
        nothing = jnp.any(done.last_round.next_token < 0)
        again = state.replace(target_caches=done.target_caches)
        tokens = tree.tokens + nothing
        return decode.verify_round(params, plan, again, tree._replace(tokens=tokens), state.draft_caches, eos_ids)

    return jax.lax.fori_loop(0, repeats, once, state)


def _per_repeat(run: Callable[[np.int32], Any]) -> float:
    """Seconds of one repetition, after a run that compiles."""
    jax.block_until_ready(run(np.int32(1)))
    return _seconds(lambda: jax.block_until_ready(run(np.int32(SPLIT_REPEATS)))) / SPLIT_REPEATS


def _finish(batch: Batch) -> float:
    """Seconds until every row has stopped, programs compiled on the way left out."""
    before = batch.compile_seconds
    return _seconds(batch.finish) - (batch.compile_seconds - before)


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bytes_of(arrays: Any) -> int:
    """Memory of all arrays in a tree of them."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def peak_memory() -> int | None:
    """The most bytes that this process has had on its first device; None where the device keeps no count (CPUs)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
