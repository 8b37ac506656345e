"""Drift: how a drafter's features move away from the target's, the deeper it drafts from its own predictions.

A chain is drafted from every token of an answer, fed with the answer's own tokens, and each predicted feature is
compared with the one that the target has there.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from infer.loading import Models, precise
from poss_jax import acceptance
from poss_jax.config import DraftConfig
from poss_jax.objective import Objective, Rows
from poss_jax.specialist import BORROWED

measure = jax.jit(acceptance.acceptance, static_argnums=0)


def drift(models: Models, prompt: list[int], answer: list[int], positions: int, width: int) -> dict[str, Any] | None:
    """Sums over the tokens of one answer (token ids), for each of `positions` draft positions: `cosine`, and the number
    of `rows` that it is of; chains `reached` and `accepted` there. None for an answer too short to draft in.

    `width`: the text is padded to this, so that texts share a program.
    """
    ids = [*prompt, *answer]
    # The first chain starts where the first round would: at the last token of the prompt, with the answer's first as
    # the root. The last one drafts the last token.
    supervised = range(len(prompt) - 1, len(ids) - 2)
    if not supervised:
        return None
    draft = deeper(models.draft.config, positions)
    objective = Objective(models.target.config, draft, noise=0.0)
    frozen = {"target": models.target.params}
    if "embed" in models.draft.params:
        frozen["embed"] = models.draft.params["embed"]
    params = {name: value for name, value in models.draft.params.items() if name not in BORROWED}
    with precise(models.dtype):
        sums = measure(objective, params, frozen, _rows(ids, supervised, width))
    sums = jax.tree.map(lambda array: np.asarray(array)[:positions].tolist(), sums)
    counted = {name: list(map(round, getattr(sums, name))) for name in ("rows", "reached", "accepted")}
    return {"cosine": sums.cosine, **counted}


def deeper(config: DraftConfig, positions: int) -> DraftConfig:
    """The same drafter, drafting `positions` deep: beyond the last span the last specialist serves.

    Example: spans (1,) and 6 positions give (6,); (3, 3) and 8 give (3, 5).
    """
    missing = max(positions - sum(config.spans), 0)
    return dataclasses.replace(config, spans=(*config.spans[:-1], config.spans[-1] + missing))


def _rows(ids: list[int], supervised: range, width: int) -> Rows:
    rows = Rows(*(np.zeros((1, width), np.int32) for _ in range(4)))
    rows.tokens[0, : len(ids)] = ids
    rows.segments[0, : len(ids)] = 1
    rows.offsets[0] = np.arange(width)
    rows.supervised[0, supervised.start : supervised.stop] = 1
    return rows
