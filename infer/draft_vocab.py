"""Files that name the tokens a drafter may propose, for a smaller head, which is most of what a draft pass reads.

`train.draft_vocab` writes them. The target still chooses among all of its tokens, so texts stay what they are; a token
that is not in the file is never drafted, and ends the accepted path where it comes.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from convert.checkpoint import read_json, write_json
from poss_jax.draft import trim_head
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec, Params
from poss_jax.sharding import parameter_sharding


def write_draft_vocab(path: str | Path, ids: np.ndarray, vocab_size: int, notes: dict[str, Any]) -> None:
    """Writes token ids [n], ascending. `vocab_size`: the target's; `notes`: whatever JSON can hold of their origin."""
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"vocab_size": vocab_size, **notes, "ids": np.sort(ids).tolist()})
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def read_draft_vocab(path: str | Path, vocab_size: int) -> np.ndarray:
    """Token ids [n], int32, ascending. Raises InputError for a file of another vocabulary, and for what is no file of
    distinct token ids.
    """
    contents = read_json(Path(path).expanduser())
    ids, made_for = contents.get("ids"), contents.get("vocab_size")
    if made_for != vocab_size:
        raise InputError(f"{path}: was made for a vocabulary of {made_for} tokens; the target's has {vocab_size}")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise InputError(f"{path}: its ids must be a list of token ids; train.draft_vocab writes such files")
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
        raise InputError(f"{path}: its ids must be distinct, from 0 to {vocab_size - 1}")
    return np.sort(np.asarray(ids, np.int32))


def trimmed_head(target: Params, ids: np.ndarray) -> dict[str, jax.Array]:
    """`trim_head`, split over the mesh that the target is on, as its own head is."""
    vocab = trim_head(target, ids)
    place = target["embed"].sharding
    if isinstance(place, NamedSharding):
        spec = ParameterSpec(vocab["head"].shape, ("hidden", "vocab"))
        vocab["head"] = jax.device_put(vocab["head"], parameter_sharding(place.mesh, spec))
    return vocab
