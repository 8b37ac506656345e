"""The command that brings checkpoints into the one form that we write.

    python -m convert.from_hf SOURCE OUT [--spans 2,2,2]

A drafter in any published layout becomes a folder that says its spans (`save.save_draft`). A target in any form (a GGUF
file, say, or `.bin` files) becomes a Hugging Face directory of safetensors with its tokenizer.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.gguf import GGUFCheckpoint
from convert.load import in_numpy, is_draft, load_draft, parameters, target_plan
from convert.output import new_directory, write_tensors
from convert.save import DTYPES, as_stored, save_draft, stored_dtype
from convert.stored import Parameter
from convert.tokenizer import load_tokenizer
from poss_jax.config import TargetConfig, format_spans, parse_spans
from poss_jax.errors import InputError

# What a directory holds besides config and weights.
OTHER_FILES = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json")
OTHER_FILES += ("merges.txt", "chat_template*", "LICENSE*")


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m convert.from_hf`."""
    parser = OneLineParser(prog="python -m convert.from_hf", description="Bring a checkpoint into the form we write.")
    parser.add_argument("source", help="target or drafter: directory, hub id or GGUF file")
    parser.add_argument("out", help="new directory")
    parser.add_argument("--spans", help="draft positions of each specialist of a drafter, such as 2,2,2")
    parser.add_argument("--dtype", choices=DTYPES, help="round weights to this type (default: as they are)")
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags."""
    source = Source.open(options.source)
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
    dtype = options.dtype or np.result_type(*{parameter.dtype for parameter in found}).name
    with new_directory(options.out) as unfinished:
        write_tensors(unfinished, _tensors(found, options.dtype))
        text = json.dumps(_config(source, config, dtype), indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        _write_others(source, unfinished)
    return f"{options.out}: {config.family} target of {config.num_layers} layers, {dtype}"


def _tensors(found: list[Parameter], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Through our form and back, so that what is written is what loading gives."""
    for number, parameter in enumerate(tqdm(found, desc="converting", unit="tensor", disable=None)):
        array = np.asarray(parameter if dtype is None else parameter.astype(DTYPES[dtype]))
        found[number] = None  # with what it may have read
        if not np.isfinite(array).all():
            names = ", ".join(parameter.entry.names)
            raise InputError(f"{names}: holds values too large for {dtype}; write it as float32 or bfloat16")
        yield from as_stored(parameter.entry, array).items()


def _config(source: Source, config: TargetConfig, dtype: str) -> dict[str, Any]:
    """The source's own, of which we understand only a part, with what has changed."""
    changed = {"torch_dtype": dtype, "tie_word_embeddings": config.tie_embeddings}
    return {name: value for name, value in source.config.items() if name != "dtype"} | changed


def _write_others(source: Source, directory: Path) -> None:
    if isinstance(source.tensors, GGUFCheckpoint):
        tokenizer = load_tokenizer(source.path, source.tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return
    for pattern in OTHER_FILES:
        for path in source.path.glob(pattern):
            shutil.copy2(path, directory / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
