"""Draws one real round of the demo model, `docs/round.png`: the drafted tree and what the target accepted of it.

python docs/draw_round.py
"""

from pathlib import Path

import matplotlib.pyplot as plt

from infer import Generator, demo

QUESTION = "Tell me about the history of Rome."
TREE = {"levels": 6, "total_nodes": 24, "draft_top_k": 5}
BAND_COLOURS = ("#dbe9f6", "#fde6d0")
ACCEPTED, REJECTED, ROOT = "#1a7f37", "#8c959f", "#0b3d91"


def places(parents: list[int], depths: list[int]) -> list[tuple[float, float]]:
    """x = depth; leaves one below the other, parents in the middle of their children."""
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    heights: dict[int, float] = {}

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        heights[node] = sum(below) / len(below) if below else -float(sum(not children[n] for n in heights))
        return heights[node]

    place(0)
    return [(depths[node], heights[node]) for node in range(len(parents))]


def draw(axes, record: dict, spans: tuple[int, ...], decode) -> None:
    where = places(record["parents"], record["depths"])
    accepted = set(record["accepted_path"])
    low, high = min(y for _, y in where) - 1, max(y for _, y in where) + 1.6
    first = 1
    for index, span in enumerate(spans):
        axes.axvspan(first - 0.5, first + span - 0.5, color=BAND_COLOURS[index % 2], zorder=0)
        axes.text(first + span / 2 - 0.5, high - 0.5, f"specialist {index}", ha="center", fontsize=11, weight="bold")
        first += span
    for node, (x, y) in enumerate(where):
        parent = record["parents"][node]
        colour = ROOT if node == 0 else ACCEPTED if node in accepted else REJECTED
        if parent >= 0:
            start = where[parent]
            axes.plot([start[0], x], [start[1], y], color=colour, lw=2 if node in accepted else 0.8, zorder=1)
        style = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "lw": 1.6}
        axes.text(x, y, decode(record["tokens"][node]), ha="center", va="center", fontsize=9, color=colour, bbox=style)
    axes.set(xlim=(-0.6, sum(spans) + 0.6), ylim=(low, high), xticks=range(sum(spans) + 1), yticks=[])
    axes.set_xlabel("depth: 0 is the token the target has just chosen")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    generator = Generator.from_pretrained(str(demo.find_model()), str(demo.DRAFTER))
    (answer,) = generator.generate([QUESTION], max_new_tokens=200, trace=True, **TREE)
    record = max(answer.trace[:-1], key=lambda candidate: candidate["accept_length"])
    figure, axes = plt.subplots(figsize=(11, 5.2))
    draw(axes, record, generator.draft.config.spans, lambda token: repr(generator.tokenizer.decode([token]))[1:-1])
    count = record["accept_length"]
    axes.set_title(
        f"One round of SmolLM2-135M with PosS-3: {len(record['tokens'])} tokens checked in one pass of the target, "
        f"{count} drafted tokens accepted (green)",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "round.png", dpi=130)


if __name__ == "__main__":
    main()
