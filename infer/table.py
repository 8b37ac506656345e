"""A table as text for the terminal and as HTML for the report, and how figures are written in it."""

import dataclasses
import html
import textwrap
from collections.abc import Sequence

UNKNOWN = "unknown"
NONE = "–"
PARTIAL = "*"
NOTE_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells are texts already. note: what the columns mean, in whole sentences."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        """With a line of title, columns aligned: texts at the left, figures at the right."""
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        shown = []
        for line in lines:
            first, *rest = (
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            shown.append("  ".join([first, *rest]).rstrip())
        return "\n".join([self.title, *shown, *textwrap.wrap(self.note, NOTE_WIDTH)])

    def as_html(self) -> str:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in self.rows
        )
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<div class=wide><table><thead><tr>{head}</tr></thead>\n"
            f"<tbody>{body}</tbody></table></div>\n{note}\n"
        )


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def between(interval: tuple[float, float] | None, digits: int = 3) -> str:
    return NONE if interval is None else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def mebibytes(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count / 2**20:,.1f} MiB"


def probability(p: float | None) -> str:
    return NONE if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def mark(value: str, complete: bool) -> str:
    """Figures of unfinished measurements carry a star."""
    return value if complete or value == NONE else value + PARTIAL


def milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:.2f} ms"
