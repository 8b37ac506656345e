"""Tokenizers of targets, from a directory, a hub id or the metadata of a GGUF file."""

from convert.checkpoint import locate
from convert.gguf import GGUFCheckpoint
from convert.gguf_tokenizer import tokenizer_from_gguf
from poss_jax.errors import InputError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(name: str):
    """A `transformers` tokenizer, or None where a directory holds no tokenizer at all."""
    path = locate(name)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GGUFCheckpoint(path))
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # takes a second to import

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InputError(f"{path}: the tokenizer cannot be loaded ({str(error).strip().splitlines()[0]})") from error
