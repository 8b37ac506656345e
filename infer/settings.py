"""What can be asked of a generation."""

import dataclasses

from poss_jax.errors import InputError
from poss_jax.sampling import Sampling
from poss_jax.tree import TreeShape


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to generate. The names are those of the command's flags.

    `max_length` caps prompt and new tokens together (default: the target's context). `eos_ids` replaces the ids
    that the checkpoint and the tokenizer name; `ignore_eos` drops them all. `stop`: strings that end the text
    and are cut from it. With one `seed` a prompt gets the same answer whatever runs beside it; `seeds` gives
    each prompt its own. `plain` decodes without the drafter.
    """

    max_new_tokens: int = 256
    max_length: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    seeds: tuple[int, ...] | None = None
    levels: int = 6
    total_nodes: int = 60
    draft_top_k: int = 10
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    batch_size: int = 1
    plain: bool = False

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "levels", "total_nodes", "draft_top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{_flag(name)} {getattr(self, name)} must be at least 1")
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"--max-length {self.max_length} must be at least 2, a prompt token and a new one")
        if any(not text for text in self.stop):
            raise InputError("--stop needs a string that is not empty")
        if not all(0 <= seed < 2**32 for seed in (self.seed, *(self.seeds or ()))):
            raise InputError(f"--seed {self.seed} must be from 0 to {2**32 - 1}")
        self.sampling, self.tree  # noqa: B018 - both check their own numbers

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def tree(self) -> TreeShape:
        return TreeShape(self.levels, self.total_nodes, self.draft_top_k)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
