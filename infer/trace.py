"""Rounds as the golden traces hold them."""

import json
import os
from pathlib import Path
from typing import Any

from infer.results import Generation
from infer.settings import Settings
from poss_jax.config import DraftConfig
from poss_jax.decode import Round
from poss_jax.errors import InputError


def round_record(last: Round, row: int, index: int, committed: int) -> dict[str, Any]:
    """One round of one batch row; `committed` tokens came before its root. Scores in nats."""
    tree, accepted = last.tree, int(last.accept_length[row])
    parents = tree.parents[row].tolist()
    return {
        "round": index,
        "n_committed": committed,
        "root_token": int(tree.tokens[row, 0]),
        "tokens": tree.tokens[row].tolist(),
        "parents": parents,
        "depths": tree.depths[row].tolist(),
        "scores": [round(float(score), 6) for score in tree.scores[row]],
        "leaf_paths": leaf_paths(parents),
        "accepted_path": last.path[row, : accepted + 1].tolist(),
        "accept_length": accepted,
        "next_root": int(last.next_token[row]),
    }


def leaf_paths(parents: list[int]) -> list[list[int]]:
    """Node indices from the root to each leaf; parents come before their children."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner]


def write_trace(path: str, generations: list[Generation], settings: Settings, draft: DraftConfig | None) -> None:
    """Writes all runs to `path` as JSON, whole or not at all."""
    content = {
        "spans": list(draft.spans) if draft else None,
        "runs": [
            {
                "levels": settings.levels,
                "total_nodes": settings.total_nodes,
                "top_k": settings.draft_top_k,
                "prompt_ids": generation.prompt_ids,
                "new_token_ids": generation.token_ids,
                "accept_lengths": generation.accept_lengths,
                "rounds": generation.trace,
            }
            for generation in generations
        ],
    }
    write_whole(Path(path), json.dumps(content, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside `path` and moves it there, so that nobody ever sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
