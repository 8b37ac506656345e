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
from infer.engine import Generator
from infer.prompts import parse_ids


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m infer.against_transformers", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    parser.add_argument("--prompt-ids", default="0,12,20,31", help="token ids of the prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, taken in turns (%(default)s)")
    return parser


def load_reference(name: str):
    """The same checkpoint as a transformers model, whatever its file format."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = Source.open(name)
    state = {key: torch.from_numpy(np.array(source.tensors[key], np.float32)) for key in source.tensors}
    model = LlamaForCausalLM(LlamaConfig(**{**source.config, "torch_dtype": "float32"}))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def run(options: argparse.Namespace) -> None:
    import torch

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads)
    generator, reference = Generator.from_pretrained(options.target), load_reference(options.target)
    prompt = parse_ids(options.prompt_ids)
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
    our_rate, their_rate = (options.new_tokens / statistics.median(times[1:]) for times in (ours, theirs))
    same = tokens[0, len(prompt) :].tolist() == answer.token_ids
    print(
        f"{threads} threads, float32, {options.new_tokens} new tokens, median of {options.repeats} runs after one more"
    )
    print(f"poss-jax      {our_rate:8.1f} tokens/s")
    print(f"transformers  {their_rate:8.1f} tokens/s")
    print(f"ratio         {our_rate / their_rate:8.2f}, tokens {'identical' if same else 'DIFFERENT'}")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(run, build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
