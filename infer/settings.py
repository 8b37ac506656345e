"""What can be asked of a generation."""

import argparse
import dataclasses
import numbers

from infer.text import REPLACEMENT
from poss_jax.attention import DECODING_KERNELS
from poss_jax.errors import InputError
from poss_jax.sampling import Sampling
from poss_jax.tree import TreeShape

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to generate. The names are those of the command's flags.

    `max_length` caps prompt and new tokens together (default: the target's context). `eos_ids` replaces the ids
    that the checkpoint and the tokenizer name; `ignore_eos` drops them all. `stop`: strings that end the text and are
    cut from it; special tokens are no part of the text. With one `seed` a prompt gets the same answer whatever runs
    beside it; `seeds` gives each prompt its own. `plain` decodes without the drafter. `levels` and `total_nodes` may be
    "auto": see `calibration`.
    """

    max_new_tokens: int = 256
    max_length: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    seeds: tuple[int, ...] | None = None
    levels: int | str = 6
    total_nodes: int | str = 60
    draft_top_k: int = 10
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    batch_size: int = 1
    plain: bool = False

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "levels", "total_nodes", "draft_top_k"):
            value, autos = getattr(self, name), name in ("levels", "total_nodes")
            if (not _whole(value) or value < 1) and not (autos and value == AUTO):
                raise InputError(f"{_flag(name)} {value} must be a whole number of at least 1{', or auto' * autos}")
        if self.max_length is not None and (not _whole(self.max_length) or self.max_length < 2):
            raise InputError(f"--max-length {self.max_length} must be at least 2, a prompt token and a new one")
        if isinstance(self.stop, str):
            raise InputError(f"stop must be a sequence of strings, such as ({self.stop!r},)")
        if any(not text or REPLACEMENT in text for text in self.stop):
            raise InputError(f"--stop needs a string that is not empty and has no {REPLACEMENT!r}")
        if not all(isinstance(value, numbers.Real) for value in (self.temperature, self.top_p, self.top_k)):
            raise InputError("temperature, top_p and top_k must be numbers")
        for seed in (self.seed, *(self.seeds or ())):
            if not _whole(seed) or not 0 <= seed < 2**32:
                raise InputError(f"--seed {seed} must be a whole number from 0 to {2**32 - 1}")
        if self.eos_ids is not None and self.ignore_eos:
            raise InputError("--eos-ids and --ignore-eos contradict each other; give one of them")
        self.sampling  # noqa: B018 - it checks its own numbers

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def auto(self) -> bool:
        """Whether the tree is still to be chosen."""
        return AUTO in (self.levels, self.total_nodes)

    @property
    def tree(self) -> TreeShape:
        return TreeShape(self.levels, self.total_nodes, self.draft_top_k)

    def with_tree(self, levels: int, total_nodes: int) -> "Settings":
        """The same, with these numbers where it says "auto"."""
        chosen = {"levels": levels, "total_nodes": total_nodes}
        return dataclasses.replace(self, **{name: n for name, n in chosen.items() if getattr(self, name) == AUTO})


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_attention_flag(flags) -> None:
    """--attention, which every command that generates has."""
    flags.add_argument(
        "--attention",
        choices=("auto", *DECODING_KERNELS),
        default="auto",
        help="kernel of rounds; auto: mosaic on a Hopper GPU in bfloat16, else plain",
    )


def number_or_auto(text: str) -> int | str:
    """The type of flags that may say "auto"."""
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, or auto") from None


def add_width_flags(flags, *, auto: bool = False) -> None:
    """--total-nodes and --draft-top-k, which every command that drafts has, to a parser or a group of one. `auto`: the
    number of nodes may be left to measurement.
    """
    flags.add_argument(
        "--total-nodes",
        type=number_or_auto if auto else int,
        default=Settings.total_nodes,
        help=f"nodes verified a round, the root counted{', or auto, as for --levels' * auto} (%(default)s)",
    )
    flags.add_argument(
        "--draft-top-k",
        type=int,
        default=Settings.draft_top_k,
        help="nodes expanded a level, and candidates under each (%(default)s)",
    )
