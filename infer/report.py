"""The report of a benchmark: one HTML page that needs no other file, and its figures as PNG beside it."""

import base64
import html
from pathlib import Path

from infer import figures, tables
from infer.benchmark_store import Study
from infer.summary import Results
from infer.trace import write_whole

NAME, FIGURES = "report.html", "figures"

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1, h2, h3 { line-height: 1.25; } h3 { margin-top: 1.8rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #8c959f; }
.wide { overflow-x: auto; } .note { color: #57606a; font-size: 14px; } img { max-width: 100%; }
.partial { background: #fff8c5; border: 1px solid #d4a72c; padding: .6rem 1rem; }
"""

CAPTIONS = {
    "speed-up": "Tokens a second of the rounds, as multiples of plain decoding of the same prompts in the same run. "
    "Lines are 95% bootstrap intervals over questions.",
    "tokens-per-round": "Mean of accept length + 1 over all rounds. Lines are 95% bootstrap intervals over questions.",
    "acceptance": "Of the rounds in which all drafts before a position were accepted, the share in which it was "
    f"accepted too. Positions that fewer than {figures.LEAST_REACHED} rounds reached are left out where others "
    "have as many.",
    "drift": "How far predicted features are from the target's, the deeper a drafter drafts from its own "
    "predictions; and what of these single chains the target accepts. Measured on every token of the target's "
    "own answers.",
    "time-split": "Draft and verify of the same round as programs of their own, run ten times each; the mark is a "
    "round as generation runs it.",
    "memory": "Exact sizes of the arrays on the device.",
}


def write(study: Study, directory: Path) -> Path:
    """Writes page and figures to a benchmark's directory; the page's path."""
    results = Results(study)
    paths = figures.write(results, directory / FIGURES)
    path = directory / NAME
    write_whole(path, page(results, paths))
    return path


def page(results: Results, paths: dict[str, Path]) -> str:
    """The whole page; figures are inside."""
    found = results.comparisons()
    by_set = [tables.by_set(results, setting) for setting in results.settings]
    sections = [
        ("", [_partial(results), _introduction(results), tables.overall(results).as_html()]),
        ("Who beats whom", [_verdicts(tables.verdicts(found)), _folded(tables.comparisons(results, found))]),
        ("By set and task", [_figure(paths, "speed-up"), _figure(paths, "tokens-per-round"), *_all(by_set)]),
        ("", [_folded(*tables.tasks(results))]),
        ("Acceptance by draft position", [_figure(paths, "acceptance"), tables.acceptance(results).as_html()]),
        ("Spans and levels", _all(tables.ablation(results))),
        ("Time", [tables.times(results).as_html(), _figure(paths, "time-split"), tables.parts(results).as_html()]),
        ("Memory, and what specialists cost", [_figure(paths, "memory"), tables.specialists(results).as_html()]),
        ("Drift", [_figure(paths, "drift"), tables.drift(results).as_html()]),
        ("Losslessness", [tables.losslessness(results).as_html()]),
        ("Spread", [tables.spreads(results).as_html()]),
        ("What was run", _what_ran(results)),
    ]
    body = "\n".join((f"<h2>{title}</h2>\n" if title else "") + "\n".join(parts) for title, parts in sections)
    title = f"Speculative decoding of {html.escape(results.description['target']['name'])}"
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{title}</title>"
        f'<meta name=viewport content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _introduction(results: Results) -> str:
    fixed, questions = results.description["fixed"], results.description["questions"]
    sets = ", ".join(f"{name} ({len(ids)} questions)" for name, ids in questions.items())
    seeds = results.description["seeds"]
    temperatures = ", ".join(f"{temperature:g}" for temperature in results.temperatures)
    text = (
        f"Drafters {', '.join(results.drafters)} for the target {results.description['target']['name']}, weights in "
        f"{fixed['dtype']}, on {sets}. At most {fixed['max_new_tokens']} new tokens an answer; trees of "
        f"{fixed['total_nodes']} nodes, {fixed['draft_top_k']} a level, {', '.join(map(str, results.levels))} "
        f"levels; temperatures {temperatures}, {seeds} sampling seed{'s' if seeds > 1 else ''} above 0. "
        f"Conversations of several turns hold the target's own answers. Acceptance is counted on every answer, "
        f"decoded in batches; times are of prompts alone on the device."
    )
    return f"<p>{html.escape(text)}</p>"


def _partial(results: Results) -> str:
    cells = [results.cell(drafter, setting) for drafter in results.drafters for setting in results.settings]
    done, expected = sum(cell.done for cell in cells), sum(cell.expected for cell in cells)
    if done >= expected and results.unfinished is None:
        return ""
    last = f"; ended before all was done: {results.unfinished}" if results.unfinished else ""
    return (
        f"<p class=partial><b>Partial results:</b> {done:,} of {expected:,} answers are there{html.escape(last)}. "
        f"Figures that lack some carry a {tables.PARTIAL}; the same command goes on.</p>"
    )


def _verdicts(sentences: list[str]) -> str:
    return (
        "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences) + "</ul>" if sentences else ""
    )


def _what_ran(results: Results) -> list[str]:
    parts = [tables.drafters(results).as_html(), tables.runs(results).as_html()]
    for index, run in enumerate(results.description["runs"], 1):
        flags = " ".join(f"--{name} {_shown(value)}" for name, value in run["flags"].items())
        parts.append(f"<p class=note>Run {index}: <code>{html.escape(flags)}</code></p>")
    if results.skipped:
        names = ", ".join(f"{r['set']} {r['question']} turn {r['turn'] + 1}" for r in results.skipped[:20])
        reasons = ", ".join(sorted({record["skipped"] for record in results.skipped}))
        parts.append(
            f"<p>{len(results.skipped)} prompts were left out ({html.escape(reasons)}): {html.escape(names)}</p>"
        )
    return parts


def _shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figure(paths: dict[str, Path], name: str) -> str:
    if name not in paths:
        return ""
    data = base64.b64encode(paths[name].read_bytes()).decode()
    image = f'<img alt="{name}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption class=note>{html.escape(CAPTIONS[name])}</figcaption></figure>"


def _all(shown: list[tables.Table]) -> list[str]:
    return [table.as_html() for table in shown]


def _folded(*shown: tables.Table) -> str:
    inside = "\n".join(table.as_html() for table in shown)
    return f"<details><summary>All figures: {html.escape(shown[0].title)}</summary>{inside}</details>"
