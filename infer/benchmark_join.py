"""Directories of `infer.benchmark` put together: first their descriptions, then their records."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infer.benchmark_store import Key, Record, Study, last_runs
from poss_jax.errors import InputError


class Conflict(NamedTuple):
    """Why records of two descriptions are not comparable.

    field: of the description, `fixed`, `sets` or `drafters`. name: of what differs in it. before, now: the two values.
    """

    field: str
    name: str
    before: Any
    now: Any


def conflict(before: dict[str, Any], now: dict[str, Any]) -> Conflict | None:
    """The first one, None where all records are comparable. What only one of them has is in conflict with nothing."""
    fixed = _fixed(before), _fixed(now)
    for name in fixed[0] | fixed[1]:
        values = [each.get(name) for each in fixed]
        if values[0] != values[1]:
            return Conflict("fixed", name, *values)
    for name, about in before["sets"].items():
        if now["sets"].get(name, about) != about:
            return Conflict("sets", name, about, now["sets"][name])
    for name, seeds in before["drafters"].items():
        for then, about in zip(seeds, now["drafters"].get(name, []), strict=False):
            if then["fingerprint"] != about["fingerprint"] or then["spans"] != about["spans"]:
                return Conflict("drafters", name, then, about)
    return None


def _fixed(description: dict[str, Any]) -> dict[str, Any]:
    return {"attention": "plain"} | description["fixed"]  # which older directories do not name


def join(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The description of a directory with the records of both, which must have no `conflict`."""
    joined = {**now, "fixed": _fixed(now), "runs": before["runs"] + now["runs"]}
    joined.pop("last_runs", None)  # places in the runs of `now` alone
    joined["drafters"] = now["drafters"] | {
        name: max(seeds, now["drafters"].get(name, []), key=len) for name, seeds in before["drafters"].items()
    }
    for field in ("sets", "questions"):
        joined[field] = before[field] | {
            name: before[field].get(name, {}) | value for name, value in now[field].items()
        }
    for field in ("temperatures", "timed_temperatures", "levels"):
        joined[field] = sorted({*before[field], *now[field]})
    for field in ("seeds", "timing_prompts", "drift_prompts"):
        joined[field] = max(before[field], now[field])
    return joined


def join_studies(directories: Sequence[str], studies: Sequence[Study]) -> Study:
    """Of read directories, whose names are for errors. Raises InputError for what is not comparable, is measured twice
    and not alike, or is given twice.
    """
    resolved = [Path(directory).expanduser().resolve() for directory in directories]
    for index, directory in enumerate(directories):
        if resolved[index] in resolved[:index]:  # its runs would be counted twice
            raise InputError(f"{directory} is given twice; give every directory once")
    descriptions = [study.description for study in studies]
    for (one, before), (other, now) in itertools.combinations(zip(directories, descriptions, strict=True), 2):
        found = conflict(before, now)
        if found:
            raise InputError(_refusal(found, one, other))
    kept = list(dict.fromkeys(_holder(studies, index) for index in range(len(studies))))
    return Study(
        _join_descriptions([descriptions[index] for index in kept]),
        _join_records([directories[index] for index in kept], [studies[index] for index in kept]),
    )


def _holder(studies: Sequence[Study], index: int) -> int:
    """Which one has all of it: itself, or another, where it was copied and the copy went on, or where it was joined
    already. Its runs would be there twice otherwise.
    """
    holders = [other for other in range(len(studies)) if other == index or _within(studies[index], studies[other])]
    return max(holders, key=lambda other: (len(studies[other].records), len(studies[other].description["runs"])))


def _within(one: Study, other: Study) -> bool:
    """Runs tell their minute alone, so those of two parts may look alike: what they asked must be there as well."""
    runs, more = one.description["runs"], other.description["runs"]
    if not any(more[start : start + len(runs)] == runs for start in range(len(more) - len(runs) + 1)):
        return False
    if not one.records or _asked(one, other) != _asked(other, other):
        return False
    found = {Key.of(record): record for record in other.records}
    return all(found.get(Key.of(record)) == record for record in one.records)


def _asked(one: Study, other: Study) -> dict[str, Any]:
    """By both together: everything but the runs."""
    return join(one.description, other.description) | {"runs": []}


def _refusal(found: Conflict, one: str, other: str) -> str:
    if found.field == "fixed":
        name = found.name.replace("_", " ")
        return (
            f"{other} was measured with another {name} ({found.now}) than {one} ({found.before}); "
            "join directories that have it in common"
        )
    if found.field == "sets":
        return f"{other}: the prompt set {found.name} is not that of {one}; join directories that asked the same"
    return f"{other}: the drafter {found.name} is not that of {one}; measure one of them under another name"


def _join_descriptions(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Drafters in the order of the parts. The study is done where the last run of every part was: `last_runs` has the
    places of these among the runs of all parts.
    """
    joined, places = descriptions[0], last_runs(descriptions[0])
    for now in descriptions[1:]:
        places = places + [len(joined["runs"]) + place for place in last_runs(now)]
        joined = join(joined, now)
    names = dict.fromkeys(name for description in descriptions for name in description["drafters"])
    return {**joined, "drafters": {name: joined["drafters"][name] for name in names}, "last_runs": places}


def _join_records(directories: Sequence[str], studies: Sequence[Study]) -> list[Record]:
    """Of all parts in order. What several have measured alike, such as plain answers, is there once."""
    found: dict[Key, tuple[str, Record]] = {}
    for directory, study in zip(directories, studies, strict=True):
        for record in study.records:
            key = Key.of(record)
            first, kept = found.setdefault(key, (directory, record))
            if kept != record:
                raise InputError(_measured_twice(key, first, directory))
    return [record for _, record in found.values()]


def _measured_twice(key: Key, first: str, directory: str) -> str:
    """What to do depends on the kind: every drafted answer was compared with the plain one of its own directory."""
    named = ", ".join(f"{field} {value}" for field, value in key._asdict().items())
    if key.kind == "plain":
        mend = f"the target answers otherwise there; measure what the second has with infer.benchmark --out {first}"
    else:
        mend = "keep one of the two, and remove the other's line of records.jsonl"
    return f"{first} and {directory} have measured the same thing and not alike ({named}); {mend}"
