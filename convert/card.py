"""The model card of a drafter: what a stranger who finds its folder must know."""

import re
from pathlib import Path
from typing import Any

from poss_jax.config import DraftConfig, format_spans

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)")
NOT_RECORDED = "not recorded"

_TEXT = """---
library_name: poss-jax
{base_model}tags:
- speculative-decoding
- eagle
- poss
---

# Drafter for {target}

{kind}, for lossless speculative decoding of {target}.
It proposes trees of tokens; the target checks each tree in one pass and says just what it would have said without it.

| | |
| --- | --- |
| target | {target} |
| spans | {spans}: draft positions that each specialist serves |
| specialists | {specialists} |
| parameters | {parameters:,} |
| hidden size, vocabulary | {hidden:,}, {vocabulary:,} |
| training data | {data} |
| started from | {init_from} |
| updates | {step} |
| tokens per round on held-out conversations, one drafted chain | {tokens_per_round} |
| acceptance by draft position, given that all before it were accepted | {acceptance} |

With poss-jax:

    python -m infer.generate --target {placed_target} --draft THIS_FOLDER "Why is the sky blue?"
"""


def model_card(config: DraftConfig, parameters: int, notes: dict[str, Any] | None = None) -> str:
    """The text of README.md. `notes` may hold `target`, `data`, `init_from`, `step` and `evaluation`, as `train.run`
    writes them; what they lack the card calls not recorded. Where the evaluation is of another update than `step`, the
    card says of which.
    """
    notes = notes if isinstance(notes, dict) else {}  # of a config that others may have written
    target, evaluation = notes.get("target"), notes.get("evaluation")
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    evaluated, step = evaluation.get("step"), notes.get("step")
    # A run that was stopped has figures of an earlier update than its weights.
    earlier = "" if None in (evaluated, step) or evaluated == step else f" at update {evaluated}"
    is_hub_id = HUB_ID.fullmatch(str(target)) and not Path(str(target)).exists()
    data, one_of = notes.get("data"), notes.get("specialist")
    return _TEXT.format(
        base_model=f"base_model: {target}\n" if is_hub_id else "",
        target=target or "a target that is not recorded",
        placed_target=target or "TARGET",
        kind=f"Specialist {one_of}" if one_of else _kind(config.spans),
        spans=format_spans(config.spans),
        specialists=len(config.spans),
        parameters=parameters,
        hidden=config.block.hidden_size,
        vocabulary=config.vocab_size,
        data=", ".join(map(str, data)) if isinstance(data, list) else data or NOT_RECORDED,
        init_from=notes.get("init_from") or NOT_RECORDED,
        step=notes.get("step", NOT_RECORDED),
        tokens_per_round=_figures(evaluation.get("tokens_per_round"), earlier),
        acceptance=_figures(evaluation.get("acceptance"), earlier),
    )


def _figures(values: Any, earlier: str) -> str:
    values = values if isinstance(values, list) else [values]
    shown = " ".join(f"{value:.3f}" for value in values if isinstance(value, int | float))
    return shown + earlier if shown else NOT_RECORDED


def _kind(spans: tuple[int, ...]) -> str:
    if spans == (1,):
        return "An EAGLE head"
    if len(spans) == 1:
        return f"A HASS head, trained with {spans[0]} aligned steps"
    return f"{len(spans)} position specialists (PosS)"
