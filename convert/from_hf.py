"""The command that brings checkpoints into the one form that we write.

    python -m convert.from_hf SOURCE OUT [--spans 2,2,2]

A drafter in any published layout becomes a folder that says its spans (`save.save_draft`). A target in any form (a GGUF
file, say, or `.bin` files) becomes a Hugging Face directory of safetensors with its tokenizer.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from convert.checkpoint import Source, write_json
from convert.command import OneLineParser, exit_status
from convert.gguf import GGUFCheckpoint
from convert.load import in_numpy, is_draft, load_draft, parameters, target_plan
from convert.output import new_directory, write_tensors
from convert.save import DTYPES, as_stored, save_draft, stored_dtype
from convert.stored import Parameter, common_dtype
from convert.tokenizer import tokenizer_for
from poss_jax.config import FACTORS, TargetConfig, format_spans, parse_spans
from poss_jax.errors import InputError
from poss_jax.rotary import name_scaling

# What a directory holds besides config and weights.
OTHER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m convert.from_hf`."""
    parser = OneLineParser(prog="python -m convert.from_hf", description="Bring a checkpoint into the form we write.")
    parser.add_argument("source", help="target or drafter: directory, hub id, GGUF file or the --out of train.run")
    parser.add_argument("out", help="new directory")
    parser.add_argument("--spans", help="draft positions of each specialist of a drafter, such as 2,2,2")
    parser.add_argument("--tokenizer", help="directory or hub id of a target's tokenizer (default: its own)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="round weights to this type (default: as they are, GGUF float32)"
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    source = Source.open(options.source)
    if is_draft(source) and options.tokenizer:
        raise InputError(f"{options.source}: is a drafter; --tokenizer is for targets")
    if is_draft(source):
        print(convert_draft(source, options))
    elif options.spans:
        raise InputError(f"{options.source}: is a target; --spans is for drafters")
    else:
        print(convert_target(source, options))


def convert_draft(source: Source, options: argparse.Namespace) -> str:
    """Writes a drafter; what was done, for people."""
    config, params = load_draft(source, in_numpy, options.spans and parse_spans(options.spans))
    dtype = options.dtype or stored_dtype(params)
    with new_directory(options.out) as unfinished:
        save_draft(unfinished, config, params, dtype=dtype, notes=source.config.get("notes"))
    return f"{options.out}: drafter with spans {format_spans(config.spans)}, {dtype}"


def convert_target(source: Source, options: argparse.Namespace) -> str:
    """Writes a target, one parameter after another; what was done, for people."""
    config, entries, tensors = target_plan(source)
    found = parameters(entries, tensors)
    dtype = options.dtype or common_dtype(parameter.dtype for parameter in found).name
    said = source.config.get("torch_dtype") or source.config.get("dtype")
    keeps = options.dtype is None and not isinstance(source.tensors, GGUFCheckpoint)
    contents = _config(source, config, said if keeps and said else dtype)
    tokenizer = None if _copies_tokenizer(source, options) else tokenizer_for(source, options.tokenizer)
    with new_directory(options.out) as unfinished:
        write_tensors(unfinished, _tensors(source.path, found, options.dtype))
        write_json(unfinished / "config.json", contents)
        _copy_others(source, unfinished, tokenizer is None)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    return f"{options.out}: {config.family} target of {config.num_layers} layers, {dtype}"


def _tensors(path: Path, found: list[Parameter], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Through our form and back, so that what is written is what loading gives."""
    for number, parameter in enumerate(tqdm(found, desc="converting", unit="tensor", disable=None)):
        array = np.asarray(parameter if dtype is None else parameter.astype(DTYPES[dtype]))
        found[number] = None  # with what it may have read
        if not np.isfinite(array).all():
            names = ", ".join(parameter.entry.names)
            raise InputError(f"{path}: {names} holds values too large for {dtype}; write it as float32 or bfloat16")
        yield from as_stored(parameter.entry, array).items()


def _config(source: Source, config: TargetConfig, dtype: str) -> dict[str, Any]:
    """The source's own, of which we understand only a part, with what has changed.

    Raises InputError for rotary factors, as GGUF files hold them, that no name stands for: other programs would not see
    them in a config, and compute something else.
    """
    rope = name_scaling(config.block.rope, config.block.head_dim)
    if rope.frequency_factors:
        raise InputError(f"{source.path}: its rotary factors are not Llama 3's, and a config cannot hold others")
    contents = {name: value for name, value in source.config.items() if name not in ("dtype", FACTORS)}
    if rope != config.block.rope:
        contents |= {"rope_scaling": rope.to_hf()["rope_scaling"]}
    return contents | {"torch_dtype": dtype, "tie_word_embeddings": config.tie_embeddings}


def _copies_tokenizer(source: Source, options: argparse.Namespace) -> bool:
    return options.tokenizer is None and not isinstance(source.tensors, GGUFCheckpoint)


def _copy_others(source: Source, directory: Path, tokenizer: bool) -> None:
    """What a directory holds besides config and weights; with its tokenizer or without."""
    if isinstance(source.tensors, GGUFCheckpoint):
        return
    for pattern in OTHER_FILES if tokenizer else ("generation_config.json", "LICENSE*"):
        for path in filter(Path.is_file, source.path.glob(pattern)):
            shutil.copy2(path, directory / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
