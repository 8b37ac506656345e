"""The work of `infer.benchmark`, in steps that are recorded as soon as they are done.

Plain answers come first. They are what drafted answers are compared with, what the later turns of a conversation hold
as the model's own words (so every drafter is asked the very same), and what drift is measured on.
"""

import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from infer.batch import bucket
from infer.benchmark_store import PLAIN, Key, Store
from infer.clock import Clock
from infer.drift import drift
from infer.lossless import first_difference, logit_gap
from infer.prompt_sets import PromptSet, Question
from infer.settings import Settings
from infer.timing import Runner, Timed
from poss_jax.errors import InputError

SPLIT_PROMPTS = 3  # prompts on which draft and verify are timed apart, all of one bucket
TOO_LONG = "longer than the target's context"


@dataclasses.dataclass(frozen=True)
class Outline:
    """What is measured: everything that the keys of the records are made of.

    drafters: names, and how many trained drafters each has. seeds: sampling seeds; at temperature 0 one is used.
    timing_prompts, drift_prompts: the first so many questions of each set. timed_temperatures: those to time at.
    """

    sets: tuple[PromptSet, ...]
    drafters: dict[str, int]
    temperatures: tuple[float, ...]
    levels: tuple[int, ...]
    seeds: int
    timing_prompts: int
    timed_temperatures: tuple[float, ...]
    drift_prompts: int

    def seeds_at(self, temperature: float) -> range:
        return range(self.seeds if temperature else 1)

    def plain(self, temperature: float, seed: int) -> list[Key]:
        """Keys of the plain answers, turn by turn."""
        found = [
            Key("plain", PLAIN, 0, prompts.name, question.id, turn, temperature, seed, 0)
            for prompts in self.sets
            for question in prompts.questions
            for turn in range(question.turns)
        ]
        return sorted(found, key=lambda key: key.turn)

    def drafted(self, temperature: float, seed: int, drafter: str, training_seed: int, levels: int) -> list[Key]:
        """Keys of one drafter's answers to all of them."""
        named = {"kind": "drafted", "drafter": drafter, "training_seed": training_seed, "levels": levels}
        return [key._replace(**named) for key in self.plain(temperature, seed)]

    def timing(self, temperature: float) -> list[list[Key]]:
        """Keys of timings, in groups of one prompt. Drafters of one name cost the same, so the first is timed."""
        if temperature not in self.timed_temperatures:
            return []
        return [
            [
                key._replace(kind="timing", drafter=name, levels=levels)
                for name in self.drafters
                for levels in self.levels
            ]
            for key in self._first(self.timing_prompts, temperature)
        ]

    def drift(self) -> list[Key]:
        """Keys of drift, on the answers at the first temperature."""
        plain = self._first(self.drift_prompts, self.temperatures[0])
        return [
            key._replace(kind="drift", drafter=name, training_seed=training_seed, levels=max(self.levels))
            for name, count in self.drafters.items()
            for training_seed in range(count)
            for key in plain
        ]

    def split(self, prompts: Sequence[Key]) -> list[Key]:
        """Keys of draft and verify apart, on these plain prompts."""
        return [
            key._replace(kind="split", drafter=name, levels=levels)
            for name in self.drafters
            for levels in self.levels
            for key in prompts
        ]

    def all_drafters(self) -> Iterator[tuple[str, int, int]]:
        """Name, training seed and levels of every drafted run."""
        for name, count in self.drafters.items():
            yield from itertools.product([name], range(count), self.levels)

    def _first(self, count: int, temperature: float) -> list[Key]:
        chosen = {(prompts.name, question.id) for prompts in self.sets for question in prompts.questions[:count]}
        return [key for key in self.plain(temperature, 0) if (key.set, key.question) in chosen]

    def keys(self) -> list[Key]:
        """Of all records but those of `split`, whose prompts are chosen by their length."""
        found = self.drift()
        for temperature in self.temperatures:
            found += itertools.chain.from_iterable(self.timing(temperature))
            for seed in self.seeds_at(temperature):
                found += self.plain(temperature, seed)
                for drafter in self.all_drafters():
                    found += self.drafted(temperature, seed, *drafter)
        return found

    def splits(self) -> int:
        """How many records of `split` there will be."""
        timed = sum(len(p.questions[: self.timing_prompts]) for p in self.sets) if self.timed_temperatures else 0
        return min(SPLIT_PROMPTS, timed) * len(self.drafters) * len(self.levels)


class Asked(NamedTuple):
    """A prompt to be answered."""

    key: Key
    ids: list[int]


class Jobs:
    """Does what of an outline is not in the store yet. `runners`: of `PLAIN` and of every (drafter, training seed).

    `settings`: lengths and tree, levels and temperature aside. `run` raises Stopped where the clock ends it.
    """

    def __init__(
        self,
        outline: Outline,
        store: Store,
        runners: dict[tuple[str, int], Runner],
        settings: Settings,
        batch_size: int,
        timing_repeats: int,
        device: str,
    ):
        self.outline, self.store, self.runners, self.settings = outline, store, runners, settings
        self.batch_size, self.timing_repeats, self.device = batch_size, timing_repeats, device
        self.questions = {
            (prompts.name, question.id): question for prompts in outline.sets for question in prompts.questions
        }

    def run(self, clock: Clock, progress: tqdm) -> None:
        """All of the work, in an order in which what is there after a while is of use."""
        self.clock, self.progress = clock, progress
        for temperature in self.outline.temperatures:
            for seed in self.outline.seeds_at(temperature):
                self._answer_all(temperature, seed)
                if seed == 0:
                    self._time_all(temperature)
            if temperature in self.outline.timed_temperatures[:1]:
                self._split_all()
            if temperature == self.outline.temperatures[0]:
                self._drift_all()

    def _answer_all(self, temperature: float, seed: int) -> None:
        plain = self.outline.plain(temperature, seed)
        for _, keys in itertools.groupby(plain, key=lambda key: key.turn):
            self._answer(list(keys), f"plain, T={temperature:g}, seed {seed}")
        for name, training_seed, levels in self.outline.all_drafters():
            keys = self.outline.drafted(temperature, seed, name, training_seed, levels)
            self._answer(keys, f"{name}, {levels} levels, T={temperature:g}, seed {seed}")

    def _answer(self, keys: list[Key], label: str) -> None:
        """Answers in batches, for counts and not for times: so prompts are padded to few widths, and share programs."""
        asked = self._asked(keys)
        asked.sort(key=lambda one: (coarse_width(len(one.ids)), self._work(one.key), len(one.ids)))
        for width, group in itertools.groupby(asked, key=lambda one: coarse_width(len(one.ids))):
            of_width = list(group)
            for first in range(0, len(of_width), self.batch_size):
                self._answer_batch(of_width[first : first + self.batch_size], width, label)

    def _work(self, key: Key) -> int:
        """About how long an answer takes: the rounds that another drafter needed, or the tokens of the plain answer, of
        which nothing is known before. A batch runs until its last row has stopped, so rows that take about as long are
        batched together; for 128 tokens in batches of 20 that saves a fifth of all rounds.
        """
        if key.kind == "plain":
            return 0
        for name, training_seed, levels in self.outline.all_drafters():
            other = key._replace(drafter=name, training_seed=training_seed, levels=levels)
            if other in self.store:
                return len(self.store.records[other].get("accept_lengths", ()))
        return self._plain(key)["new_tokens"]

    def _answer_batch(self, batch: Sequence[Asked], width: int, label: str) -> None:
        self._step(label)
        key = batch[0].key
        runner, settings = self.runners[key.drafter, key.training_seed], self._settings(key, self.batch_size)
        seeds = [sampling_seed(asked.key) for asked in batch]
        answers = runner.answer([asked.ids for asked in batch], seeds, settings, width)
        for asked, answer in zip(batch, answers, strict=True):
            values = {"prompt_tokens": len(asked.ids), "new_tokens": len(answer.token_ids)}
            values |= {"stop_reason": answer.stop_reason, "category": self._question(asked.key).category}
            if key.kind == "plain":
                values |= {"token_ids": answer.token_ids, "text": answer.text}
            else:
                values |= {"accept_lengths": answer.accept_lengths, **self._against_plain(asked, answer.token_ids)}
            self._record(asked.key, **values)

    def _against_plain(self, asked: Asked, token_ids: list[int]) -> dict:
        """Whether the target alone says the same; if not, where they part and how close the target's call was there."""
        plain = self._plain(asked.key)["token_ids"]
        values = {"identical": plain == token_ids}
        if not values["identical"]:
            values["first_difference"] = first_difference(plain, token_ids)
            if asked.key.temperature == 0:
                models = self.runners[PLAIN, 0].generator.models
                values["logit_gap"] = logit_gap(models, asked.ids, plain, token_ids)
        return values

    def _time_all(self, temperature: float) -> None:
        """One prompt after the other; for each, plain decoding and every drafter right after it."""
        for keys in self.outline.timing(temperature):
            plain: Timed | None = None
            for key, ids in self._asked(keys):
                self._step(f"timing {key.drafter}, {key.levels} levels, T={temperature:g}")
                plain = plain or self._time(key._replace(drafter=PLAIN, levels=0), ids)
                drafted = self._time(key, ids)
                self._record(
                    key,
                    device=self.device,
                    repeats=self.timing_repeats,
                    prompt_tokens=len(ids),
                    identical=drafted.answer.token_ids == plain.answer.token_ids,
                    drafted=dataclasses.asdict(drafted.duration),
                    plain=dataclasses.asdict(plain.duration),
                )

    def _time(self, key: Key, ids: list[int]) -> Timed:
        runner = self.runners[key.drafter, key.training_seed]
        return runner.time(ids, sampling_seed(key), self._settings(key, 1), self.timing_repeats)

    def _split_all(self) -> None:
        for key, ids in self._asked(self.outline.split(self._split_prompts())):
            self._step(f"draft and verify apart, {key.drafter}, {key.levels} levels")
            runner = self.runners[key.drafter, key.training_seed]
            values = runner.split(ids, sampling_seed(key), self._settings(key, 1))
            self._record(key, device=self.device, prompt_tokens=len(ids), **values)

    def _split_prompts(self) -> list[Key]:
        """First turns of the bucket that most timed prompts have, so that few programs are compiled."""
        timed = [
            group[0]
            for temperature in self.outline.timed_temperatures[:1]
            for group in self.outline.timing(temperature)
        ]
        encoded = {key: self._encode(key) for key in timed if key.turn == 0}
        buckets = {key: bucket(len(ids)) for key, ids in encoded.items() if ids}
        if not buckets:
            return []
        commonest = Counter(buckets.values()).most_common(1)[0][0]
        return sorted(buckets, key=lambda key: buckets[key] != commonest)[:SPLIT_PROMPTS]

    def _drift_all(self) -> None:
        for key, ids in self._asked(self.outline.drift()):
            self._step(f"drift of {key.drafter}")
            answer = self._plain(key)["token_ids"]
            models = self.runners[key.drafter, key.training_seed].generator.models
            sums = drift(models, ids, answer, key.levels, coarse_width(len(ids) + len(answer)))
            self._record(key, **(sums or {"skipped": "the answer is too short to draft in"}))

    def _asked(self, keys: Sequence[Key]) -> list[Asked]:
        """Prompts of those that have no record. One that is too long gets its record here."""
        found = []
        for key in keys:
            if key in self.store:
                continue
            ids = self._encode(key)
            if ids is None:
                self._record(key, skipped=TOO_LONG)
            else:
                found.append(Asked(key, ids))
        return found

    def _encode(self, key: Key) -> list[int] | None:
        """Token ids of a turn, with the target's own answers to the turns before it; None if they are too many."""
        generator, question = self.runners[PLAIN, 0].generator, self._question(key)
        before = [self._plain(key._replace(turn=turn)) for turn in range(key.turn)]
        if any("skipped" in record for record in before):
            return None
        ids = generator.encode(question.conversation([record["text"] for record in before]))
        if len(ids) >= generator.context(self.settings):
            return None
        try:
            generator.check([ids], self.settings)
        except InputError as error:
            raise InputError(f"{key.set}, question {key.question}: {error}") from error
        return ids

    def _question(self, key: Key) -> Question:
        return self.questions[key.set, key.question]

    def _plain(self, key: Key) -> dict:
        """The record of the plain answer to the same prompt."""
        return self.store.records[key._replace(kind="plain", drafter=PLAIN, training_seed=0, levels=0)]

    def _settings(self, key: Key, batch_size: int) -> Settings:
        changes = {"temperature": key.temperature, "batch_size": batch_size, "plain": key.drafter == PLAIN}
        return dataclasses.replace(self.settings, **changes, levels=key.levels or self.settings.levels)

    def _step(self, label: str) -> None:
        self.progress.set_description(label)
        self.clock.step()

    def _record(self, key: Key, **values) -> None:
        self.store.add(key, **values)
        self.progress.update()


def coarse_width(length: int) -> int:
    """Padded length of prompts that are not timed: 128, 512, 2048 or the next multiple of 2048, for few programs.

    A timed prompt is padded to its `bucket`, as it would be in use.
    """
    return next((width for width in (128, 512) if length <= width), -(-length // 2048) * 2048)


def sampling_seed(key: Key) -> int:
    """Of one prompt: the same for every drafter and for none, another one for every prompt and sampling seed."""
    return zlib.crc32(f"{key.seed}/{key.set}/{key.question}/{key.turn}".encode())
