"""The tables of a benchmark's results."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from infer import measures
from infer.benchmark_store import Study
from infer.summary import Comparison, Results, Setting, categories
from infer.table import NONE, PARTIAL, UNKNOWN, Table, between, mark, mebibytes, milliseconds, number, probability
from poss_jax.config import format_spans


def where(setting: Setting) -> str:
    return f"T={setting.temperature:g}, {setting.levels} levels"


def overview(study: Study) -> str:
    """What the command shows at its end."""
    results = Results(study)
    notes = [overall(results).as_text()]
    if any(PARTIAL in cell for row in overall(results).rows for cell in row):
        notes.append(f"{PARTIAL} partial: not everything is measured yet")
    return "\n".join(notes)


def overall(results: Results) -> Table:
    rows = []
    for setting in results.settings:
        for drafter in results.drafters:
            cell, timings = results.cell(drafter, setting), results.timings(drafter, setting)
            identical, answers = cell.identical
            rows.append(
                [
                    f"{drafter}, {where(setting)}",
                    mark(number(cell.counts.tokens_per_round), cell.complete),
                    between(cell.interval),
                    mark(number(timings.speed_up(), 2), timings.complete),
                    between(timings.interval, 2),
                    f"{identical} of {answers}",
                    f"{cell.done} of {cell.expected}",
                ]
            )
    columns = ["all sets", "tokens/round", "95% interval", "speed-up", "95% interval", "as plain", "answers"]
    return Table(
        "Overall",
        columns,
        rows,
        "Tokens per round: mean of accept length + 1 over all rounds of all prompts. Speed-up: tokens a second of the "
        "rounds against plain decoding of the same prompts, compilation and prompts' passes left out. As plain: "
        "answers that are the target's own, token by token.",
    )


def by_set(results: Results, setting: Setting) -> Table:
    """The paper's table: tokens per round and speed-up for every set."""
    rows = []
    for drafter in results.drafters:
        row = [drafter]
        for set_name in (*results.sets, None):
            cell = results.cell(drafter, setting, set_name)
            row.append(mark(number(cell.counts.tokens_per_round, 2), cell.complete))
            timings = results.timings(drafter, setting, set_name)
            row.append(mark(number(timings.speed_up(), 2, "x"), timings.complete))
        rows.append(row)
    columns = ["tokens per round, speed-up"]
    for name in (*results.sets, "overall"):
        columns += [name, ""]
    return Table(f"By set, {where(setting)}", columns, rows)


def spreads(results: Results, set_name: str | None = None) -> Table:
    """Of one set, or of all."""
    rows = []
    for setting in results.settings:
        for drafter in results.drafters:
            cell = results.cell(drafter, setting, set_name)
            prompts, seeds, training = cell.over_prompts(), cell.over("seed"), cell.over("training_seed")
            rows.append(
                [
                    f"{drafter}, {where(setting)}",
                    mark(number(cell.counts.tokens_per_round), cell.complete),
                    number(prompts.mean),
                    number(prompts.deviation),
                    between(None if prompts.low is None else (prompts.low, prompts.high)),
                    number(cell.counts.emitted_per_round),
                    _mean_and_deviation(seeds),
                    _mean_and_deviation(training),
                    f"{cell.counts.rounds:,}",
                ]
            )
    columns = ["", "tokens/round", "per-prompt mean", "its SD", "its 95% interval", "emitted/round"]
    columns += ["over sampling seeds", "over training seeds", "rounds"]
    return Table(
        "Tokens per round, and figures that resemble it" + (f", on {set_name}" if set_name else ""),
        columns,
        rows,
        "Per-prompt mean: every question weighs the same, however many rounds it had. Emitted per round: what the "
        "user got, after the cut at an end of text or at the greatest length. Over seeds: mean, standard deviation "
        "and number of pooled values, one for each seed.",
    )


def _mean_and_deviation(spread) -> str:
    if spread.mean is None:
        return NONE
    return f"{spread.mean:.3f} ± {number(spread.deviation)} ({spread.count})"


def acceptance(results: Results, set_name: str | None = None) -> Table:
    most = max(results.levels)
    rows = []
    for setting in results.settings:
        for drafter in results.drafters:
            shares = results.cell(drafter, setting, set_name).counts.acceptance(setting.levels)
            shares = [number(share) for share in shares] + [""] * (most - setting.levels)
            rows.append([f"{drafter}, {where(setting)}", *shares])
    return Table(
        "Position-wise acceptance" + (f" on {set_name}" if set_name else ""),
        ["draft position", *map(str, range(1, most + 1))],
        rows,
        "Of the rounds in which all drafts before a position were accepted, the share in which it was accepted too.",
    )


def times(results: Results) -> Table:
    rows = []
    for setting in results.settings:
        for drafter in results.drafters:
            timings = results.timings(drafter, setting)
            drafted, plain = timings.drafted, timings.plain
            rows.append(
                [
                    f"{drafter}, {where(setting)}",
                    number(plain.tokens_per_second, 1),
                    number(drafted.tokens_per_second, 1),
                    mark(number(timings.speed_up(), 2), timings.complete),
                    between(timings.interval, 2),
                    number(timings.speed_up(with_prefill=True), 2),
                    milliseconds(drafted.prefill_seconds / drafted.answers if drafted.answers else None),
                    milliseconds(plain.seconds_per_round),
                    milliseconds(drafted.seconds_per_round),
                    str(drafted.answers),
                ]
            )
    columns = ["alone on the device", "plain tok/s", "drafted tok/s", "speed-up", "95% interval", "with prefill"]
    columns += ["prefill", "plain step", "round", "answers"]
    devices = ", ".join(results.devices) or NONE
    warning = " Several devices were used; compare only what one of them gave." if len(results.devices) > 1 else ""
    note = (
        f"Timed on: {devices}.{warning} Medians of repeated runs of each prompt; compilation in none. Tokens a second "
        "leave out the prompt's pass and the token that it gives; `with prefill` counts both."
    )
    return Table("Time", columns, rows, note)


def parts(results: Results) -> Table:
    rows = []
    for levels in results.levels:
        for drafter in results.drafters:
            split = results.split(drafter, levels)
            if split is None:
                continue
            both = split.draft + split.verify
            row = [f"{drafter}, {levels} levels", *map(milliseconds, (split.draft, split.verify, both, split.whole))]
            rows.append([*row, f"{split.draft / both:.0%}", str(split.prompts)])
    columns = ["one round, taken apart", "draft", "verify", "sum", "whole round", "draft's share", "prompts"]
    note = (
        "Draft and verify are programs of their own here, each run ten times on the state of a real answer; the whole "
        "round is measured where generation runs it. What the sum is off is the price of taking the round apart."
    )
    return Table("Time split of a round", columns, rows, note)


def losslessness(results: Results) -> Table:
    rows = []
    for setting in results.settings:
        for drafter in results.drafters:
            cell = results.cell(drafter, setting)
            identical, answers = cell.identical
            gap = cell.largest_gap
            rows.append([f"{drafter}, {where(setting)}", str(identical), str(answers), number(gap, 5)])
    return Table(
        "Losslessness",
        ["", "as plain", "answers", "largest logit gap"],
        rows,
        f"Weights in {results.description['fixed']['dtype']}. As plain: answers with the very tokens that the "
        f"target alone gives (with the same seed). Largest logit gap: between the two tokens with which an answer "
        f"and the plain one part, at temperature 0; rounding flips only near-ties.",
    )


def comparisons(results: Results, found: Sequence[Comparison] | None = None) -> Table:
    """Every pair of drafters in every setting, overall and by set."""
    found = results.comparisons() if found is None else found
    rows = []
    for one in found:
        low_high = None if one.test.low is None else (one.test.low, one.test.high)
        rows.append(
            [
                f"{one.second} against {one.first}, {where(one.setting)}, {one.set or 'overall'}",
                number(one.tokens_per_round[0]),
                mark(number(one.tokens_per_round[1]), one.complete),
                f"{one.gain:+.1%}",
                f"{one.test.difference:+.3f}",
                between(low_high),
                probability(one.test.p),
                probability(one.p_adjusted),
                "yes" if one.significant else "no",
                str(one.test.count),
                probability(one.training.p),
            ]
        )
    columns = ["tokens per round", "first", "second", "gain", "mean difference", "95% interval"]
    columns += ["p", "p corrected", "significant", "questions", "p over training seeds"]
    note = (
        "Gain: of tokens per round over all rounds. Mean difference, interval and p: paired t-test over the "
        "questions' own tokens per round, turns and seeds pooled. Corrected for the number of tests "
        "(Benjamini-Hochberg), overall ones and those of sets apart; significant below 0.05. Over training "
        "seeds: the same test over pooled figures of trained drafters, pairwise in the order given."
    )
    return Table("Who beats whom", columns, rows, note)


def verdicts(found: Sequence[Comparison]) -> list[str]:
    """A sentence for each pair and setting."""
    sentences = []
    for one in found:
        if one.set is not None:
            continue
        sets = [c for c in found if c.set and (c.first, c.second, c.setting) == (one.first, one.second, one.setting)]
        better = [c.set for c in sets if c.significant and c.test.difference > 0]
        worse = [c.set for c in sets if c.significant and c.test.difference < 0]
        wins = one.test.difference is not None and one.test.difference > 0
        relation = ("beats" if wins else "loses to") if one.significant else "is not told apart from"
        sentence = (
            f"{one.second} {relation} {one.first} at {where(one.setting)}: {one.tokens_per_round[1]:.3f} against "
            f"{one.tokens_per_round[0]:.3f} tokens per round ({one.gain:+.1%}; paired over {one.test.count} questions, "
            f"p corrected {probability(one.p_adjusted)})"
        )
        if one.training.p is not None:
            sentence += f", p over {one.training.count} training seeds {probability(one.training.p)}"
        sentence += f"; significantly better on {', '.join(better)}" if better else "; significantly better on no set"
        sentence += f", significantly worse on {', '.join(worse)}" if worse else ""
        sentences.append(sentence + ("." if one.complete else "; partial results."))
    return sentences


def ablation(results: Results) -> list[Table]:
    """Tokens per round and speed-up by spans and levels."""
    tables = []
    for temperature in results.temperatures:
        rows = []
        for drafter in sorted(results.drafters, key=lambda name: (len(results.spans(name)), name)):
            row = [drafter, format_spans(tuple(results.spans(drafter)))]
            for levels in results.levels:
                cell = results.cell(drafter, Setting(temperature, levels))
                row.append(mark(number(cell.counts.tokens_per_round), cell.complete))
                timings = results.timings(drafter, Setting(temperature, levels))
                row.append(mark(number(timings.speed_up(), 2, "x"), timings.complete))
            rows.append(row)
        columns = ["drafter", "spans"]
        for levels in results.levels:
            columns += [f"{levels} levels", "speed-up"]
        tables.append(Table(f"Spans and levels, T={temperature:g}", columns, rows, "Tokens per round, and speed-up."))
    return tables


def specialists(results: Results) -> Table:
    """Memory and latency by number of specialists, and where one more stops paying."""
    rows = []
    for levels in results.levels:
        setting = Setting(min(results.timed_temperatures, default=results.temperatures[0]), levels)
        costs = [_cost(results, drafter, setting) for drafter in results.drafters]
        for cost in sorted(costs, key=lambda cost: cost.specialists):
            split = results.split(cost.drafter, levels)
            about = results.description["drafters"][cost.drafter][0]
            row = [f"{cost.drafter}, {where(setting)}", str(cost.specialists), f"{about['parameters'] / 1e6:.1f} M"]
            row += [mebibytes(about["weight_bytes"]), mebibytes(split.draft_cache_bytes) if split else NONE]
            row += [milliseconds(split.draft if split else None), milliseconds(cost.seconds), number(cost.tokens)]
            rows.append([*row, milliseconds(cost.per_token), *_break_even(cost, costs)])
    columns = ["", "specialists", "parameters", "weights", "draft cache", "draft", "round", "tokens/round", "per token"]
    columns += ["against", "longer round", "break-even", "pays"]
    note = (
        "Against: the fastest drafter with fewer specialists. Longer round: what a round takes more than its. "
        "Break-even: what it may take more before a token costs more time, given both tokens per round. Draft "
        "cache: of the prompts that rounds were taken apart on. " + peak_note(results)
    )
    return Table("Memory and latency by number of specialists", columns, rows, note)


class _Cost(NamedTuple):
    """Seconds and tokens of a round, None where nothing was measured."""

    drafter: str
    specialists: int
    seconds: float | None
    tokens: float | None

    @property
    def per_token(self) -> float | None:
        return self.seconds / self.tokens if self.seconds and self.tokens else None


def _cost(results: Results, drafter: str, setting: Setting) -> _Cost:
    seconds = results.timings(drafter, setting).drafted.seconds_per_round
    return _Cost(drafter, len(results.spans(drafter)), seconds, results.cell(drafter, setting).counts.tokens_per_round)


def _break_even(cost: _Cost, costs: Sequence[_Cost]) -> list[str]:
    """Against the fastest of those with fewer specialists: its name, the longer round, the affordable one, pays."""
    fewer = [other for other in costs if other.specialists < cost.specialists and other.per_token]
    if not fewer or not cost.per_token:
        return [NONE] * 4
    best = min(fewer, key=lambda other: other.per_token)
    affordable = measures.affordable_seconds(best.seconds, best.tokens, cost.tokens)
    extra = cost.seconds - best.seconds
    pays = "yes" if extra < affordable else "no"
    return [best.drafter, f"{1000 * extra:+.2f} ms", f"{1000 * affordable:+.2f} ms", pays]


def peak_note(results: Results) -> str:
    """Peak device memory of runs. It is counted for a process, with all drafters that it held; the peak of a run that
    was interrupted is not known.
    """
    peaks: dict[tuple, list[int | None]] = defaultdict(list)
    for run in results.description["runs"]:
        peaks[run["device"], frozenset(run["drafters"])].append(run["peak_bytes"])
    notes = []
    for (device, held), of_runs in peaks.items():
        known = [peak for peak in of_runs if peak is not None]
        span = " to ".join(dict.fromkeys(map(mebibytes, (min(known), max(known))))) if known else UNKNOWN
        of = f"{len(known)} of " if len(known) < len(of_runs) else ""
        runs = f" ({of}{len(of_runs)} runs)" if len(of_runs) > 1 else ""
        names = [name for name in results.drafters if name in held]
        notes.append(f"on {device} with the target and {', '.join(names)}: {span}{runs}")
    return f"Peak device memory of a whole process {'; '.join(notes)}."


def drift(results: Results) -> Table:
    rows = []
    for drafter in results.drafters:
        found = results.drift(drafter)
        if found.cosine:
            rows.append([f"{drafter}: cosine", *map(number, found.cosine)])
            rows.append([f"{drafter}: accepted, one chain", *map(number, found.accepted)])
    most = max((len(row) for row in rows), default=2)
    rows = [[*row, *[""] * (most - len(row))] for row in rows]
    note = (
        "Cosine similarity of the drafter's predicted features and the target's, over chains drafted from every "
        "token of the target's own answers and fed with them; and the share of these drafts that the target "
        "accepts, given all before."
    )
    return Table("Drift", ["draft position", *map(str, range(1, most))], rows, note)


def tasks(results: Results) -> list[Table]:
    """Tokens per round by set and category, and acceptance by position for each set."""
    tables = []
    for setting in results.settings:
        cells = [results.cell(drafter, setting) for drafter in results.drafters]
        rows = [
            [
                name,
                *(number(cell.by("set")[name].tokens_per_round if name in cell.by("set") else None) for cell in cells),
            ]
            for name in results.sets
        ]
        found = categories(cells)
        for name in found if set(found) - set(results.sets) else []:
            pooled = [cell.by("category").get(name) for cell in cells]
            rows.append([f"category {name}", *(number(count.tokens_per_round if count else None) for count in pooled)])
        tables.append(Table(f"Tokens per round by task, {where(setting)}", ["", *results.drafters], rows))
    of_sets = [table(results, name) for name in results.sets for table in (acceptance, spreads)]
    return [*tables, *of_sets]


def runs(results: Results) -> Table:
    rows = [
        [str(index), run["date"], run["commit"], run["device"], run["jax"], ", ".join(run["drafters"]), run["ended"]]
        for index, run in enumerate(results.description["runs"], 1)
    ]
    return Table("Runs", ["run", "date", "commit", "device", "JAX", "drafters", "ended"], rows)


def drafters(results: Results) -> Table:
    rows = []
    for name, seeds in results.description["drafters"].items():
        for index, about in enumerate(seeds):
            steps = about["training_steps"]
            row = [name, str(index), about["directory"], format_spans(tuple(about["spans"]))]
            row += [
                f"{about['parameters'] / 1e6:.1f} M",
                UNKNOWN if steps is None else f"{steps:,}",
                about["fingerprint"],
            ]
            rows.append(row)
    columns = ["drafter", "training seed", "directory", "spans", "parameters", "training steps", "fingerprint"]
    return Table("Drafters", columns, rows)
