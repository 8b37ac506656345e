"""Tokenizers of targets, from a directory, a hub id or the metadata of a GGUF file."""

from pathlib import Path

from convert.checkpoint import Source, first_line, locate
from convert.gguf import GGUFCheckpoint
from convert.gguf_tokenizer import tokenizer_from_gguf
from poss_jax.errors import InputError

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(path: Path, checkpoint: GGUFCheckpoint | None = None):
    """A `transformers` tokenizer, or None where a directory holds none at all.

    `checkpoint`: the GGUF file at `path`, if it is open already; opening takes seconds.
    """
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(checkpoint or GGUFCheckpoint(path))
    if not any((path / file).exists() for file in FILES):
        return None
    from transformers import AutoTokenizer  # takes a second to import

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the tokenizers library raises plain ones
        raise InputError(f"{path}: the tokenizer cannot be loaded ({first_line(error)})") from error


def tokenizer_for(source: Source, name: str | Path | None):
    """The tokenizer of a target, or the one called `name`; None if the target has none."""
    if name is None:
        return load_tokenizer(source.path, source.tensors if isinstance(source.tensors, GGUFCheckpoint) else None)
    tokenizer = load_tokenizer(locate(name))
    if tokenizer is None:
        raise InputError(f"{name}: holds no tokenizer")
    return tokenizer
