"""`--levels auto`, `--total-nodes auto`: the tree with which these models generate fastest on this device.

Measured once and kept in the user's cache: seconds of a plain token and of rounds with a few trees, to which a cost by
levels and nodes is fitted; and which drafted nodes are accepted in rounds with a tree so large that it holds nearly all
nodes of every smaller one, whose accept lengths follow from the same rounds. Where no tree gains, decoding is plain.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls
from tqdm import tqdm

from convert.checkpoint import write_json
from infer.batch import Batch
from infer.loading import Models
from infer.programs import default_directory, processor
from infer.settings import AUTO, Settings
from poss_jax.decode import RUNNING
from poss_jax.errors import InputError
from poss_jax.tree import TreeShape

TEXTS = (
    "Explain to a child why the sky is blue.",
    "Write a short email that moves a meeting from Monday to Wednesday.",
    "A train travels 180 miles in 3 hours. How far does it travel in 5 hours at the same speed?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarize the plot of Romeo and Juliet in three sentences.",
    "What are the main differences between a virus and a bacterium?",
    "List five tips for growing tomatoes on a balcony.",
    "Translate into French: The library opens at nine in the morning.",
)
NEW_TOKENS = 64  # of each text, for acceptance
LEVELS, NODES = range(1, 9), (4, 6, 8, 12, 16, 24, 32, 48, 60)
LARGE = 160  # nodes of the tree of which it is counted what is accepted, or more where more are asked for
TIMED = ((2, 8), (4, 24), (6, 60), (8, 40))  # levels and nodes of the trees that are timed
TIMED_ROUNDS, REPEATS = 16, 3
WORTH = 1.03  # the least speed-up to draft for
VERSION = 2  # of what is measured; results of another one do not count

Rounds = Sequence[dict[str, Any]]  # as `trace.round_record` makes them
Cost = Callable[[int, int], float]


def accept_length(rounds: Rounds, levels: int, nodes: int) -> float:
    """The mean accept length that trees of `levels` and `nodes` (root included) would have had in these rounds, which
    were drafted with larger ones; 0 without rounds.
    """
    return statistics.fmean(_kept(record, levels, nodes) for record in rounds) if rounds else 0.0


def _kept(record: dict[str, Any], levels: int, nodes: int) -> int:
    """How many accepted nodes the smaller tree holds: those below the first one that it lacks do not count."""
    depths, scores = np.asarray(record["depths"]), np.asarray(record["scores"])
    reached = np.flatnonzero((depths > 0) & (depths <= levels))
    best = reached[np.argsort(-scores[reached], kind="stable")][: nodes - 1]  # the lower number wins ties
    accepted = record["accepted_path"][1:]
    return next((count for count, node in enumerate(accepted) if node not in best), len(accepted))


def fit_cost(seconds: dict[tuple[int, int], float]) -> Cost:
    """Seconds of a round as a constant, so much a level and so much a node, none of them negative."""
    matrix = np.array([(1, levels, nodes) for levels, nodes in seconds], float)
    constant, level, node = nnls(matrix, np.array(list(seconds.values())))[0]
    return lambda levels, nodes: float(constant + level * levels + node * nodes)


def describe_tree(settled: Settings) -> str:
    """What was chosen, for people."""
    if settled.plain:
        return "no tree is faster than plain decoding here, so decoding is plain"
    return f"the tree that is fastest here has {settled.levels} levels and {settled.total_nodes} nodes"


def best_tree(rounds: Rounds, cost: Cost, trees: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of `trees`, (levels, nodes), the one that makes most tokens a second."""
    return max(trees, key=lambda tree: (accept_length(rounds, *tree) + 1) / cost(*tree))


class Calibration:
    """Settles settings for one set of models, with `encode` for the prompts that they are measured on."""

    def __init__(self, models: Models, encode: Callable[[str], list[int]]):
        self._models, self._encode = models, encode
        self._known: dict[str, dict[str, Any]] = {}
        self._compiled: set[tuple] = set()

    def settle(self, settings: Settings) -> Settings:
        """The settings with numbers for "auto", or with `plain`. Raises InputError without a tokenizer."""
        if not settings.auto or settings.plain or self._models.draft is None:
            return settings.with_tree(Settings.levels, Settings.total_nodes)
        if self._models.tokenizer is None:
            raise InputError("auto trees are measured on texts, and the target has no tokenizer; give numbers")
        found = self._find(settings)
        settled = settings.with_tree(found["levels"], found["total_nodes"])
        # Where nothing was accepted a round is no faster than a plain token, whatever the clock of a busy machine says.
        worth = found["speed_up"] >= WORTH and found["tokens_per_round"] > 1
        return dataclasses.replace(settled, plain=not worth)

    def _find(self, settings: Settings) -> dict[str, Any]:
        facts = self._facts(settings)
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        path = default_directory().parent / "trees" / f"{name}.json"
        if name not in self._known:
            self._known |= _read(name, path)
        if name not in self._known:
            self._known[name] = found = self._measure(settings)
            self._write(path, {"facts": facts, "found": found})
        return self._known[name]

    def _write(self, path: Path, contents: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, contents)
        except OSError as error:
            print(f"note: the measured tree is not kept: {error}", file=sys.stderr)

    def _facts(self, settings: Settings) -> dict[str, Any]:
        """Everything that the choice depends on."""
        models = self._models
        names = ("levels", "total_nodes", "draft_top_k", "batch_size", "temperature", "top_k", "top_p")
        names += ("eos_ids", "ignore_eos")
        return {
            "version": VERSION,
            "prompts": self._prompts,
            "host": [processor(), os.cpu_count()],
            "device": jax.local_devices()[0].device_kind,
            "devices": len(models.target.params["embed"].sharding.device_set),
            "jax": jax.__version__,
            "models": [repr(part.config) for part in (models.target, models.draft)],
            "weights": self._weights,
            "dtype": models.dtype,
            "attention": models.kernel,
            **{name: getattr(settings, name) for name in names},
        }

    @functools.cached_property
    def _prompts(self) -> list[list[int]]:
        return [self._encode(text) for text in TEXTS]

    @functools.cached_property
    def _weights(self) -> list[str]:
        return [_sample(part.params) for part in (self._models.target, self._models.draft)]

    def _measure(self, settings: Settings) -> dict[str, Any]:
        trees = self._trees(settings)
        timed = list(dict.fromkeys(self._nearest(trees, tree) for tree in TIMED))
        print("note: measuring which tree is fastest here; the result is kept", file=sys.stderr)
        with tqdm(total=len(timed) + 3, unit="step", desc="calibrating", disable=None, file=sys.stderr) as progress:

            def step(result):
                progress.update()
                return result

            deepest, most = max(levels for levels, _ in trees), max(nodes for _, nodes in trees)
            length = (REPEATS + 1) * TIMED_ROUNDS * (deepest + 1)  # the same for all: caches cost by the slot
            plain = step(self._seconds(dataclasses.replace(_with(settings, 1, 2), plain=True), length))
            seconds = {tree: step(self._seconds(_with(settings, *tree), length)) for tree in timed}
            rounds = step(self._rounds(_with(settings, deepest, max(most, LARGE))))
            levels, nodes = best_tree(rounds, fit_cost(seconds), trees)
            seconds[levels, nodes] = step(self._seconds(_with(settings, levels, nodes), length))
        tokens = accept_length(rounds, levels, nodes) + 1
        return {
            "levels": levels,
            "total_nodes": nodes,
            "tokens_per_round": tokens,
            "plain_seconds": plain,
            "round_seconds": seconds[levels, nodes],
            "speed_up": tokens * plain / seconds[levels, nodes],
            "timed": [[*tree, spent] for tree, spent in seconds.items()],
        }

    def _trees(self, settings: Settings) -> list[tuple[int, int]]:
        """Levels and nodes of the trees to choose from, as they are once they are clamped to what can be filled."""
        asked = itertools.product(
            LEVELS if settings.levels == AUTO else [settings.levels],
            NODES if settings.total_nodes == AUTO else [settings.total_nodes],
        )
        shapes = [
            TreeShape(levels, nodes, settings.draft_top_k).clamp(self._models.draft_choices) for levels, nodes in asked
        ]
        return list(dict.fromkeys((shape.levels, shape.total_nodes) for shape in shapes if shape.levels))

    @staticmethod
    def _nearest(trees: list[tuple[int, int]], wanted: tuple[int, int]) -> tuple[int, int]:
        """Of `trees`, the one whose levels, and then nodes, are nearest to those wanted."""
        return min(trees, key=lambda tree: (abs(tree[0] - wanted[0]), abs(tree[1] - wanted[1])))

    def _batch(self, settings: Settings, prompts: list[list[int]], *, trace: bool, **options: Any) -> Batch:
        rows = len(prompts)
        settings = dataclasses.replace(settings, batch_size=rows, stop=(), max_length=None, **options)
        context = self._models.target.config.context
        if max(map(len, prompts)) >= context:
            raise InputError("auto trees are measured on texts that are longer than the target's context; give numbers")
        batch = Batch(self._models, prompts, range(rows), settings, context, trace=trace)
        batch.compile(self._compiled)
        batch.start()
        return batch

    def _seconds(self, settings: Settings, length: int) -> float:
        """Of a round with as many rows as are asked for, whatever is accepted, with room for `length` new tokens."""
        prompts = list(itertools.islice(itertools.cycle(self._prompts), settings.batch_size))
        options = {"max_new_tokens": length, "eos_ids": None, "ignore_eos": True}
        batch = self._batch(settings, prompts, trace=False, **options)
        spent = []
        while len(spent) < REPEATS and np.any(batch.stopped == RUNNING):  # a small context may end all texts before
            rounds, compiling, started = batch.rounds, batch.compile_seconds, time.perf_counter()
            batch.advance(TIMED_ROUNDS)
            elapsed = time.perf_counter() - started - (batch.compile_seconds - compiling)
            spent.append(elapsed / (batch.rounds - rounds).max())
        return statistics.median(spent)

    def _rounds(self, settings: Settings) -> list[dict[str, Any]]:
        """What is accepted of trees under the texts."""
        batch = self._batch(settings, self._prompts, trace=True, max_new_tokens=NEW_TOKENS)
        batch.finish()
        return [record for trace in batch.traces for record in trace]


def _read(name: str, path: Path) -> dict[str, dict[str, Any]]:
    """What is kept under a name, if anything is; a file that is no such thing is measured anew."""
    try:
        found = json.loads(path.read_text())["found"]
        counted = found["levels"], found["total_nodes"], found["tokens_per_round"]
        return {name: found} if min(counted) >= 1 and found["speed_up"] >= 0 else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _with(settings: Settings, levels: int, nodes: int) -> Settings:
    return dataclasses.replace(settings, levels=levels, total_nodes=nodes)


def _sample(params: Any) -> str:
    """A short name for weights, from a few of each array."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:16] if leaf.ndim else leaf).tobytes())
    return digest.hexdigest()[:16]
