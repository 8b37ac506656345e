"""What the records of a benchmark say: counts and times put together by drafter, levels, temperature, set.

A `Results` only adds up, what is in no record is in no figure. Turns, sampling seeds and training seeds of a question
are pooled before questions are compared.
"""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from infer import measures, statistics
from infer.benchmark_store import Record, Study, last_runs
from infer.measures import Counts, Duration
from infer.statistics import PairedTest, Spread

QuestionName = tuple[str, str]  # set and question


class Setting(NamedTuple):
    """How drafters are run when they are compared."""

    temperature: float
    levels: int


class Cell:
    """Answers of one drafter in one setting, to one set or to all.

    expected: how many the study is to have; done: of these, answers and prompts that were too long.
    """

    def __init__(self, records: list[Record], expected: int, done: int):
        self.records, self.expected, self.done = records, expected, done
        self.by = functools.cache(self._by)

    @property
    def complete(self) -> bool:
        return self.done >= self.expected

    @functools.cached_property
    def counts(self) -> Counts:
        """Of all answers together."""
        return measures.total(self.by("set").values())

    def _by(self, *fields: str) -> dict[Any, Counts]:
        """`by(field)`: pooled by a field of the records, or by several."""
        groups: dict[Any, list[Counts]] = defaultdict(list)
        name = operator.itemgetter(*fields)
        for record in self.records:
            groups[name(record)].append(record["counts"])
        return {value: measures.total(counts) for value, counts in groups.items()}

    def answered(self) -> set[tuple]:
        """Set, question, turn and seed of what every one of its training seeds has answered."""
        by_training: dict[int, set[tuple]] = defaultdict(set)
        for record in self.records:
            by_training[record["training_seed"]].add(_prompt_of(record))
        return set.intersection(*by_training.values()) if by_training else set()

    def only(self, prompts: set[tuple]) -> "Cell":
        """The same without the answers to other prompts than these."""
        return Cell([record for record in self.records if _prompt_of(record) in prompts], self.expected, self.done)

    def by_question(self) -> dict[QuestionName, Counts]:
        """Pooled over turns and seeds."""
        return self.by("set", "question")

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """Of tokens per round over questions."""
        counts = [count for count in self.by_question().values() if count.rounds]
        if not counts:
            return None
        committed, rounds = [count.committed for count in counts], [count.rounds for count in counts]
        return statistics.interval(statistics.ratio, committed, rounds)

    def over_prompts(self) -> Spread:
        """Of the questions' own tokens per round; its mean is the per-prompt mean."""
        return statistics.spread([count.tokens_per_round for count in self.by_question().values() if count.rounds])

    def over(self, field: str) -> Spread:
        """Of tokens per round, each pooled over one value of `field`: `seed` or `training_seed`."""
        return statistics.spread([count.tokens_per_round for count in self.by(field).values() if count.rounds])

    @property
    def identical(self) -> tuple[int, int]:
        """Answers that are the target's own, token by token, and all answers."""
        return sum(record["identical"] for record in self.records), len(self.records)

    @property
    def largest_gap(self) -> float | None:
        """The largest difference of the target's logits where an answer left the plain one, at temperature 0."""
        return max(
            (record["logit_gap"] for record in self.records if record.get("logit_gap") is not None), default=None
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Timings:
    """Timed answers of one drafter in one setting, and the plain ones to the same prompts, each right before it.

    expected: how many prompts the study is to time.
    """

    records: list[Record]
    expected: int
    done: int

    @property
    def complete(self) -> bool:
        return self.done >= self.expected

    @property
    def drafted(self) -> Duration:
        return _durations(record["drafted"] for record in self.records)

    @property
    def plain(self) -> Duration:
        return _durations(record["plain"] for record in self.records)

    def speed_up(self, *, with_prefill: bool = False) -> float | None:
        return measures.speed_up(self.drafted, self.plain, with_prefill=with_prefill)

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """Of the speed-up of rounds, over questions."""
        pooled: dict[QuestionName, list[Duration]] = defaultdict(lambda: [Duration(), Duration()])
        for record in self.records:
            both = pooled[record["set"], record["question"]]
            both[0] += Duration(**record["drafted"])
            both[1] += Duration(**record["plain"])
        if not pooled:
            return None
        drafted, plain = zip(*pooled.values(), strict=True)
        columns = [[d.tokens - d.answers for d in drafted], [d.decode_seconds for d in drafted]]
        columns += [[p.tokens - p.answers for p in plain], [p.decode_seconds for p in plain]]
        return statistics.interval(statistics.ratio_of_ratios, *columns)

    @property
    def devices(self) -> list[str]:
        return sorted({record["device"] for record in self.records})


@dataclasses.dataclass(frozen=True)
class Split:
    """A round taken apart: mean seconds over a few prompts; bytes of the caches. whole: None where none was left."""

    draft: float
    verify: float
    whole: float | None
    target_cache_bytes: int
    draft_cache_bytes: int
    prompts: int


class Drift(NamedTuple):
    """By draft position: mean cosine similarity of predicted and true features; acceptance of single chains; and how
    many of them got so far.
    """

    cosine: list[float | None]
    accepted: list[float | None]
    reached: list[int]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Tokens per round of two drafters on the questions that both have answered, `second` minus `first`.

    test: over questions. training: over training seeds, in their order. p_adjusted: of `test`, for all of its kind that
    are tested beside it.
    """

    first: str
    second: str
    setting: Setting
    set: str | None  # None: all
    tokens_per_round: tuple[float, float]
    test: PairedTest
    training: PairedTest
    complete: bool
    p_adjusted: float | None = None

    @property
    def gain(self) -> float:
        """By which share the second is better, pooled over rounds."""
        return self.tokens_per_round[1] / self.tokens_per_round[0] - 1

    @property
    def significant(self) -> bool:
        return self.p_adjusted is not None and self.p_adjusted < 1 - statistics.CONFIDENCE


class Results:
    """Figures of a study, from its records."""

    def __init__(self, study: Study):
        self.description = study.description
        self._by_kind: dict[tuple, list[Record]] = defaultdict(list)
        self._done: dict[tuple, int] = defaultdict(int)
        for record in study.records:
            name = (record["kind"], record["drafter"], record["temperature"], record["levels"])
            self._done[*name, record["set"]] += 1
            if "skipped" not in record:
                if record["kind"] == "drafted":
                    record = {**record, "counts": Counts.of(record["accept_lengths"], record["new_tokens"])}
                self._by_kind[name].append(record)
        self.cell = functools.cache(self._cell)
        self.timings = functools.cache(self._timings)
        self.skipped = [record for record in study.records if record["kind"] == "plain" and "skipped" in record]
        self.drafters: list[str] = list(self.description["drafters"])
        self.sets: list[str] = list(self.description["questions"])
        self.temperatures: list[float] = self.description["temperatures"]
        self.timed_temperatures: list[float] = self.description["timed_temperatures"]
        self.levels: list[int] = self.description["levels"]

    @property
    def settings(self) -> list[Setting]:
        return [Setting(temperature, levels) for temperature in self.temperatures for levels in self.levels]

    @property
    def devices(self) -> list[str]:
        """That anything was timed on."""
        found = {
            record["device"] for name, records in self._by_kind.items() if name[0] == "timing" for record in records
        }
        return sorted(found)

    def spans(self, drafter: str) -> list[int]:
        return self.description["drafters"][drafter][0]["spans"]

    def _cell(self, drafter: str, setting: Setting, set_name: str | None = None) -> Cell:
        """`cell(...)`: of one set, or of all."""
        sets = self.sets if set_name is None else [set_name]
        records = self._of("drafted", drafter, setting, set_name)
        turns = sum(sum(self.description["questions"][name].values()) for name in sets)
        runs = len(self.description["drafters"][drafter]) * (self.description["seeds"] if setting.temperature else 1)
        done = sum(self._done["drafted", drafter, *setting, name] for name in sets)
        return Cell(records, turns * runs, done)

    def _timings(self, drafter: str, setting: Setting, set_name: str | None = None) -> Timings:
        """`timings(...)`: of one set, or of all."""
        sets = self.sets if set_name is None else [set_name]
        count = self.description["timing_prompts"] if setting.temperature in self.timed_temperatures else 0
        turns = sum(sum(list(self.description["questions"][name].values())[:count]) for name in sets)
        done = sum(self._done["timing", drafter, *setting, name] for name in sets)
        return Timings(self._of("timing", drafter, setting, set_name), turns, done)

    @property
    def unfinished(self) -> str | None:
        """Which runs should have gone on, and why they ended; None where all was done."""
        runs = self.description["runs"]
        ended = {place + 1: runs[place]["ended"] for place in last_runs(self.description)}
        return ", ".join(f"run {run} ({why})" for run, why in ended.items() if why != "done") or None

    def split(self, drafter: str, levels: int) -> Split | None:
        """At whichever temperature rounds were taken apart."""
        records = [r for t in self.temperatures for r in self._of("split", drafter, Setting(t, levels))]
        if not records:
            return None

        def mean(field: str) -> float | None:
            values = [record[field] for record in records if record[field] is not None]
            return sum(values) / len(values) if values else None

        means = [mean(f"{part}_seconds") for part in ("draft", "verify", "round")]
        caches = [max(record[f"{whose}_cache_bytes"] for record in records) for whose in ("target", "draft")]
        return Split(*means, *caches, len(records))

    def drift(self, drafter: str) -> Drift:
        """At the most levels that it was measured with, and there at the lowest temperature. Empty where none was."""
        measured = [setting for setting in self.settings if self._of("drift", drafter, setting)]
        best = min(measured, key=lambda setting: (-setting.levels, setting.temperature), default=None)
        found = self._of("drift", drafter, best) if best else []
        sums = {
            name: [sum(column) for column in zip(*(record[name] for record in found), strict=True)]
            for name in ("cosine", "rows", "reached", "accepted")
        }
        cosine = [total / rows if rows else None for total, rows in zip(sums["cosine"], sums["rows"], strict=True)]
        pairs = zip(sums["accepted"], sums["reached"], strict=True)
        return Drift(cosine, [accepted / reached if reached else None for accepted, reached in pairs], sums["reached"])

    def compare(self, first: str, second: str, setting: Setting, set_name: str | None = None) -> Comparison | None:
        """On what both have answered, turn by turn and seed by seed: where one has more turns of a question than the
        other, these would make a difference of their own. None where there is nothing of the kind.
        """
        cells = [self.cell(name, setting, set_name) for name in (first, second)]
        cells = [cell.only(cells[0].answered() & cells[1].answered()) for cell in cells]
        by_question = [cell.by_question() for cell in cells]
        common = [question for question in by_question[0] if all(found[question].rounds for found in by_question)]
        if not common:
            return None
        counts = [[found[question] for question in common] for found in by_question]
        test = statistics.paired_test(*([count.tokens_per_round for count in one] for one in counts))
        seeds = [cell.by("training_seed") for cell in cells]
        both = [seed for seed in sorted(seeds[0]) if seed in seeds[1]]
        training = statistics.paired_test(*([found[seed].tokens_per_round for seed in both] for found in seeds))
        pooled = tuple(measures.total(one).tokens_per_round for one in counts)
        return Comparison(
            first, second, setting, set_name, pooled, test, training, all(cell.complete for cell in cells)
        )

    def comparisons(self) -> list[Comparison]:
        """Every pair of drafters in every setting: overall, then each set. Tests over all sets are corrected for their
        number, and those of single sets for theirs: many small sets are not to hide what all of them say together.
        """
        pairs = [(a, b) for index, a in enumerate(self.drafters) for b in self.drafters[index + 1 :]]
        found = [
            self.compare(first, second, setting, set_name)
            for first, second in pairs
            for setting in self.settings
            for set_name in (None, *self.sets)
        ]
        found = [comparison for comparison in found if comparison]
        families = [[c for c in found if (c.set is None) == overall] for overall in (True, False)]
        corrected = [iter(statistics.adjusted([c.test.p for c in family])) for family in families]
        return [dataclasses.replace(c, p_adjusted=next(corrected[c.set is not None])) for c in found]

    def _of(self, kind: str, drafter: str, setting: Setting, set_name: str | None = None) -> list[Record]:
        records = self._by_kind.get((kind, drafter, *setting), [])
        return records if set_name is None else [record for record in records if record["set"] == set_name]


def _prompt_of(record: Record) -> tuple:
    return record["set"], record["question"], record["turn"], record["seed"]


def _durations(durations: Iterable[dict]) -> Duration:
    return sum((Duration(**duration) for duration in durations), Duration())


def categories(cells: Sequence[Cell]) -> list[str]:
    """Names of the categories that the questions of these cells have, in order."""
    return sorted({record["category"] for cell in cells for record in cell.records if record["category"]})
