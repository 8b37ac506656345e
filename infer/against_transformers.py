"""`python -m infer.against_transformers`: plain decoding here and with transformers' `generate`, in one run.

Same weights in float32, same prompt, same number of threads, greedy, no stop at end-of-text tokens. Needs torch.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.names import HEAD
from convert.stored import COMPUTED
from infer.engine import Generator
from infer.prompts import parse_ids
from infer.settings import Settings
from poss_jax.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m infer.against_transformers", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    parser.add_argument("--prompt-ids", default="0,12,20,31", help="token ids of the prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, taken in turns (%(default)s)")
    return parser


def check_flags(options: argparse.Namespace) -> None:
    """Numbers that make no sense, and a missing torch, are said before anything is loaded."""
    for name in ("new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    try:
        import torch  # noqa: F401 - an optional dependency
    except ImportError:
        raise InputError("infer.against_transformers needs torch: pip install torch") from None


def check_length(generator: Generator, prompt: list[int], new_tokens: int) -> None:
    """Refuses a prompt that cannot be answered, and more new tokens than there is room for: we would stop early."""
    generator.check([prompt], Settings())
    context = generator.target.config.context
    if len(prompt) + new_tokens > context:
        raise InputError(
            f"--new-tokens {new_tokens} and the prompt's {len(prompt)} are more than the target's context of "
            f"{context}; give at most --new-tokens {context - len(prompt)}"
        )


def load_reference(name: str):
    """The same checkpoint as a transformers model of its own type, whatever its file format."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Source.open(name)
    names = [name for name in source.tensors if not COMPUTED.match(name)]
    state = {name: torch.from_numpy(np.array(source.tensors[name], np.float32)) for name in names}
    fields = {"model_type": "llama", **source.config, "tie_word_embeddings": HEAD not in state}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {HEAD}, missing
    model.tie_weights()
    return model.eval()


def run(options: argparse.Namespace) -> None:
    check_flags(options)
    import torch

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads)
    prompt, generator = parse_ids(options.prompt_ids), Generator.from_pretrained(options.target)
    check_length(generator, prompt, options.new_tokens)
    reference = load_reference(options.target)
    ours, theirs = [], []
    for _ in range(options.repeats + 1):
        (answer,) = generator.generate([prompt], max_new_tokens=options.new_tokens, ignore_eos=True)
        ours.append(answer.seconds)
        started = time.perf_counter()
        with torch.no_grad():
            tokens = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=options.new_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        theirs.append(time.perf_counter() - started)
    their_ids = tokens[0, len(prompt) :].tolist()
    our_rate = len(answer.token_ids) / statistics.median(ours[1:])
    their_rate = len(their_ids) / statistics.median(theirs[1:])
    same = their_ids == answer.token_ids
    print(f"{threads} threads, float32, {len(their_ids)} new tokens, median of {options.repeats} runs after one more")
    print(f"poss-jax      {our_rate:8.1f} tokens/s")
    print(f"transformers  {their_rate:8.1f} tokens/s")
    print(f"ratio         {our_rate / their_rate:8.2f}, tokens {'identical' if same else 'DIFFERENT'}")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
