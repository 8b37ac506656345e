"""Figures of a benchmark's results (matplotlib), each a function from results to a drawn figure or None."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from infer.summary import Results, Setting
from infer.tables import where

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948", "#ff9da7", "#79706e")
MARKERS = "osD^vPX<>*"
BASELINE = {"color": "#777777", "linewidth": 1, "linestyle": "--"}
DRAFT, VERIFY, WHOLE = "#f28e2b", "#4e79a7", "#222222"
LEAST_REACHED = 30  # rounds or chains that must have reached a position for its point to be drawn; fewer say nothing


def figures(results: Results) -> dict[str, Figure]:
    """By name, those that there is anything to draw in."""
    drawn = {
        "speed-up": speed_up(results),
        "tokens-per-round": tokens_per_round(results),
        "acceptance": acceptance(results),
        "drift": drift(results),
        "time-split": time_split(results),
        "memory": memory(results),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write(results: Results, directory: Path) -> dict[str, Path]:
    """Writes all figures as PNG; their paths by name."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {}
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for name, figure in figures(results).items():
            paths[name] = directory / f"{name}.png"
            figure.savefig(paths[name], dpi=130, metadata={"Software": None})
    return paths


def colour(results: Results, drafter: str) -> str:
    return COLOURS[results.drafters.index(drafter) % len(COLOURS)]


def _axes(count: int, width: float = 8.0, height: float = 3.2, *, share: bool = True):
    """A figure with `count` axes, one below the other."""
    figure = Figure(figsize=(width, height * count + 0.4), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False, sharey=share)[:, 0]
    return figure, list(axes)


def speed_up(results: Results) -> Figure | None:
    """Bars by set and drafter, with intervals where there are enough questions."""

    def figures_of(drafter: str, setting: Setting, set_name: str | None):
        timings = results.timings(drafter, setting, set_name)
        return timings.speed_up(), timings.interval, timings.complete

    return _bars(results, figures_of, "speed-up, times", 1.0, "plain decoding")


def tokens_per_round(results: Results) -> Figure | None:
    """Bars by set and drafter, with intervals."""

    def figures_of(drafter: str, setting: Setting, set_name: str | None):
        cell = results.cell(drafter, setting, set_name)
        return cell.counts.tokens_per_round, cell.interval, cell.complete

    return _bars(results, figures_of, "tokens per round", 1.0, "plain decoding")


def _bars(results: Results, figures_of, label: str, line: float, line_label: str) -> Figure | None:
    groups = [*results.sets, *([None] if len(results.sets) > 1 else [])]
    found = {
        (drafter, setting, name): figures_of(drafter, setting, name)
        for setting in results.settings
        for drafter in results.drafters
        for name in groups
    }
    settings = [s for s in results.settings if any(found[d, s, n][0] for d in results.drafters for n in groups)]
    if not settings:
        return None
    figure, axes = _axes(len(settings), width=max(8.0, 0.32 * len(groups) * len(results.drafters) + 2.5))
    width = 0.8 / len(results.drafters)
    for axis, setting in zip(axes, settings, strict=True):
        for index, drafter in enumerate(results.drafters):
            for place, name in enumerate(groups):
                value, interval, complete = found[drafter, setting, name]
                if value is None:
                    continue
                at = place + (index - (len(results.drafters) - 1) / 2) * width
                shade = {"color": colour(results, drafter)} if complete else partial_shade(colour(results, drafter))
                axis.bar(at, value, 0.9 * width, **shade)
                if interval:
                    axis.vlines(at, *interval, color="#222222", linewidth=1.3)
        axis.axhline(line, **BASELINE)
        if len(groups) > 1:
            axis.axvline(len(groups) - 1.5, color="#cccccc", linewidth=1)
        axis.set_xlim(-0.55, len(groups) - 0.45)
        axis.set_xticks(range(len(groups)), ["all" if name is None else name for name in groups])
        axis.set_ylabel(label)
        axis.set_title(where(setting), loc="left", fontsize=10, weight="bold")
    keys = [Line2D([], [], **BASELINE, label=line_label)]
    keys += [Patch(color=colour(results, drafter), label=drafter) for drafter in results.drafters]
    if any(value is not None and not complete for value, _, complete in found.values()):
        keys.append(Patch(**partial_shade("#777777"), label="not all measured yet"))
    figure.legend(handles=keys, loc="outside upper center", ncols=min(len(keys), 7), frameon=False)
    return figure


def partial_shade(colour: str) -> dict[str, str]:
    """How a bar looks that is over fewer questions than its neighbours may be."""
    return {"facecolor": "white", "edgecolor": colour, "hatch": "////"}


def acceptance(results: Results) -> Figure | None:
    """Position-wise acceptance curves, as far as enough rounds reached a position."""
    cells = {(d, s): results.cell(d, s) for s in results.settings for d in results.drafters}
    settings = [s for s in results.settings if any(cells[d, s].counts.rounds for d in results.drafters)]
    if not settings:
        return None
    figure, axes = _axes(len(settings))
    for axis, setting in zip(axes, settings, strict=True):
        for drafter in results.drafters:
            counts = cells[drafter, setting].counts
            known = _well_known(counts.acceptance(setting.levels), counts.reached(setting.levels))
            _line(axis, results, drafter, known, label=drafter if axis is axes[0] else None)
        axis.set_ylim(0, 1)
        axis.set_xlim(0.7, max(results.levels) + 0.3)
        axis.set_xticks(range(1, max(results.levels) + 1))
        axis.set_ylabel("accepted, given all before")
        axis.set_title(where(setting), loc="left", fontsize=10, weight="bold")
    axes[-1].set_xlabel("draft position")
    figure.legend(loc="outside upper center", ncols=6, frameon=False)
    return figure


def drift(results: Results) -> Figure | None:
    """Cosine similarity by position, and acceptance of a single chain."""
    found = {drafter: results.drift(drafter) for drafter in results.drafters}
    found = {drafter: curves for drafter, curves in found.items() if curves.cosine}
    if not found:
        return None
    figure, axes = _axes(2, share=False)
    for drafter, curves in found.items():
        known = [(position, value) for position, value in enumerate(curves.cosine, 1) if value is not None]
        _line(axes[0], results, drafter, known, label=drafter)
        _line(axes[1], results, drafter, _well_known(curves.accepted, curves.reached), label=None)
    axes[0].set_ylabel("cosine similarity")
    axes[0].set_title("predicted and true features", loc="left", fontsize=10, weight="bold")
    axes[1].set_ylabel("accepted, given all before")
    axes[1].set_title("drafts of a single chain", loc="left", fontsize=10, weight="bold")
    axes[1].set_ylim(0, 1)
    axes[1].set_xlabel("draft position")
    for axis in axes:
        axis.set_xticks(range(1, max(results.levels) + 1))
    figure.legend(loc="outside upper center", ncols=6, frameon=False)
    return figure


def _well_known(shares: list[float | None], reached: list[int]) -> list[tuple[int, float]]:
    """Position and share where enough reached it; where none has as many, all there are."""
    known = [(position, share) for position, share in enumerate(shares, 1) if share is not None]
    return [point for point in known if reached[point[0] - 1] >= LEAST_REACHED] or known


def _line(axis, results: Results, drafter: str, points: list[tuple[int, float]], label: str | None) -> None:
    marker = MARKERS[results.drafters.index(drafter) % len(MARKERS)]
    x, y = zip(*points, strict=True) if points else ((), ())
    axis.plot(x, y, marker=marker, markersize=5, color=colour(results, drafter), label=label)


def time_split(results: Results) -> Figure | None:
    """Stacked bars of draft and verify; a mark where the whole round is."""
    found = [(d, levels, results.split(d, levels)) for levels in results.levels for d in results.drafters]
    found = [(f"{drafter}, {levels} levels", split) for drafter, levels, split in found if split]
    if not found:
        return None
    figure, (axis,) = _axes(1, height=0.42 * len(found) + 1.0)
    names, splits = zip(*found, strict=True)
    places = range(len(found))
    draft = [1000 * split.draft for split in splits]
    verify = [1000 * split.verify for split in splits]
    axis.barh(places, draft, 0.6, color=DRAFT, label="draft")
    axis.barh(places, verify, 0.6, left=draft, color=VERIFY, label="verify")
    whole = [(place, 1000 * split.whole) for place, split in zip(places, splits, strict=True) if split.whole]
    if whole:
        y, x = zip(*whole, strict=True)
        axis.plot(
            x, y, linestyle="none", marker="|", markersize=16, markeredgewidth=2, color=WHOLE, label="whole round"
        )
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of one round, one prompt")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def memory(results: Results) -> Figure | None:
    """Stacked bars of what a drafter adds to the device's memory."""
    levels = max(results.levels)
    order = sorted(results.drafters, key=lambda name: len(results.spans(name)))
    figure, (axis,) = _axes(1, height=0.42 * len(order) + 1.0)
    weights = [results.description["drafters"][name][0]["weight_bytes"] / 2**20 for name in order]
    splits = [results.split(name, levels) for name in order]
    caches = [split.draft_cache_bytes / 2**20 if split else 0.0 for split in splits]
    places = range(len(order))
    axis.barh(places, weights, 0.6, color=VERIFY, label="weights")
    if any(splits):
        axis.barh(places, caches, 0.6, left=weights, color=DRAFT, label="caches of one timed prompt")
    names = [f"{name} ({_count(len(results.spans(name)), 'specialist')})" for name in order]
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    target = results.description["target"]["weight_bytes"] / 2**20
    axis.set_xlabel(f"MiB that a drafter adds to the target's {target:,.0f} MiB of weights")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
