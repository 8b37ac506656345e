"""The command that says what a checkpoint is: kind, config, spans, parameters, tensors, and what is missing.

    python -m convert.inspect PATH

Values are not looked at. It says everything that is wrong, and exits with 1 where the checkpoint could not be loaded,
with 2 where it could not even be opened.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.gguf import GGUFCheckpoint
from convert.load import count_specialists, draft_plan, is_draft, target_plan
from convert.stored import stored
from poss_jax.config import BlockConfig, DraftConfig, TargetConfig, format_spans, parse_spans
from poss_jax.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    """The flags of `python -m convert.inspect`."""
    parser = OneLineParser(prog="python -m convert.inspect", description="Say what a checkpoint is and what it lacks.")
    parser.add_argument("path", help="target or drafter: directory, hub id, GGUF file or the --out of train.run")
    parser.add_argument("--spans", help="draft positions of each specialist of a drafter, where its config lacks them")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def run(options: argparse.Namespace) -> None:
    """Everything after the flags. Exits with 1 where something is wrong with the checkpoint."""
    found = inspect(Source.open(options.path), options.spans and parse_spans(options.spans))
    print(json.dumps(found, indent=2) if options.json else "\n".join(_lines(found)))
    if found["problems"]:
        sys.exit(1)


def inspect(source: Source, spans: tuple[int, ...] | None = None) -> dict[str, Any]:
    """What is known of a checkpoint: `path`, `kind` ("target" or "drafter"), `config` (fields by name), `parameters`,
    `bytes`, `tensors` ({name: {"shape", "dtype"}}) and `problems` (a sentence each; none if it can be loaded).
    """
    tensors = {name: stored(source.tensors, name) for name in source.tensors}
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if isinstance(source.tensors, GGUFCheckpoint):  # which hands out float32, whatever it holds
        kinds, size = {name: source.tensors.stored_type(name) for name in tensors}, source.path.stat().st_size
    kind, config, problems = _plan(source, spans)
    return {
        "path": str(source.path),
        "kind": kind,
        "config": config,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "bytes": size,
        "tensors": {name: {"shape": list(tensor.shape), "dtype": kinds[name]} for name, tensor in tensors.items()},
        "problems": problems,
    }


def _plan(source: Source, spans: tuple[int, ...] | None) -> tuple[str, dict[str, Any], list[str]]:
    """Kind, config, and what is wrong with the config or, where that says what should be there, with the tensors."""
    kind = "drafter" if is_draft(source) else "target"
    try:
        config, entries, tensors = target_plan(source) if kind == "target" else draft_plan(source, spans)
    except InputError as error:
        return kind, _specialists(source) if kind == "drafter" else {}, [str(error).removeprefix(f"{source.path}: ")]
    return kind, (_target_fields if kind == "target" else _draft_fields)(config), tensors.problems(entries)


def _specialists(source: Source) -> dict[str, Any]:
    """What is said of a drafter where its config says too little; nothing where it has none, or is of another kind."""
    try:
        return {"specialists": count_specialists(source)}
    except InputError:
        return {}


def _target_fields(config: TargetConfig) -> dict[str, Any]:
    return {
        "family": config.family,
        "layers": config.num_layers,
        **_block_fields(config.block),
        "vocabulary": config.vocab_size,
        "context": config.context,
        "head": "tied to the embedding" if config.tie_embeddings else "its own",
        "biases of queries, keys, values": config.query_key_value_bias,
        "norms of queries and keys": config.query_key_norm,
    }


def _draft_fields(config: DraftConfig) -> dict[str, Any]:
    return {
        "spans": format_spans(config.spans),
        "specialists": len(config.spans),
        **_block_fields(config.block),
        "vocabulary": config.vocab_size,
        "bias of fc": config.fc_bias,
        "biases of queries, keys, values": config.query_key_value_bias,
    }


def _block_fields(block: BlockConfig) -> dict[str, Any]:
    return {
        "hidden size": block.hidden_size,
        "intermediate size": block.intermediate_size,
        "heads": f"{block.num_heads} of {block.head_dim}, {block.num_kv_heads} for keys and values",
        "rotary": f"{block.rope.kind}, theta {block.rope.theta:g}",
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    dtypes = Counter(tensor["dtype"] for tensor in found["tensors"].values())
    kinds = ", ".join(f"{count} {name}" for name, count in dtypes.most_common())
    yield f"{found['path']}: {found['kind']}"
    facts = {
        **found["config"],
        "parameters": f"{found['parameters']:,}, {found['bytes'] / 1e6:,.1f} MB",
        "tensors": f"{len(found['tensors'])} ({kinds})",
    }
    for name, value in facts.items():
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        yield f"  {name:<32} {shown}"
    width = max((len(name) for name in found["tensors"]), default=0)
    for name, tensor in found["tensors"].items():
        yield f"    {name:<{width}}  {tensor['dtype']:<9} {tensor['shape']}"
    for problem in found["problems"]:
        yield f"  problem: {problem}"
    if not found["problems"]:
        yield "  complete: all that the config asks for is there, and nothing else"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
