"""`python -m infer.generate`: answer prompts, losslessly, with a drafter or without."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from convert.command import OneLineParser, exit_status
from infer import prompts as prompt_forms
from infer.calibration import describe_tree
from infer.chat import chat
from infer.compare import Comparison, compare
from infer.engine import Generator
from infer.loading import DRAFT_DTYPES, DTYPES
from infer.programs import kept_programs
from infer.results import Generation
from infer.settings import AUTO, Settings, add_attention_flag, add_width_flags, number_or_auto
from infer.trace import write_trace
from poss_jax.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = OneLineParser(
        prog="python -m infer.generate",
        description="Generate with a Llama-type target, faster with a drafter and with the very same tokens.",
    )
    models = parser.add_argument_group("models")
    models.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    models.add_argument(
        "--draft", help="directory or hub id of a drafter, or the --out of train.run; without one decoding is plain"
    )
    models.add_argument(
        "--spans",
        help="draft positions of each specialist, such as 3,3; needed where the "
        "drafter has several and its config does not say",
    )
    models.add_argument(
        "--draft-vocab",
        metavar="FILE",
        help="draft only the tokens of this file, which train.draft_vocab writes: a smaller head, and the same text",
    )
    models.add_argument(
        "--draft-dtype",
        choices=DRAFT_DTYPES,
        help="round the drafter's weights, and its copy of the head, to this: a little less acceptance, half the bytes "
        "to read, and the same text (default: as --dtype)",
    )
    models.add_argument("--tokenizer", help="directory or hub id of the tokenizer (default: the target's)")
    models.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and caches (%(default)s)")
    models.add_argument("--mesh", help="tensor=N splits the weights over N devices")
    add_attention_flag(models)

    prompts = parser.add_argument_group("prompts (one of these)")
    prompts.add_argument("prompt", nargs="*", metavar="PROMPT", help="texts, each one a user turn")
    prompts.add_argument("--prompt-ids", nargs="+", metavar="IDS", help="token ids, such as 0,12,20; one list a prompt")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with prompt, messages, turns (the first turn is the prompt) or prompt_ids",
    )
    prompts.add_argument("--chat", action="store_true", help="hold a conversation at a prompt")
    prompts.add_argument("--raw", action="store_true", help="give the text as it is, without the chat template")
    prompts.add_argument("--system", help="system prompt in front of conversations that have none")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy (%(default)s)")
    sampling.add_argument(
        "--top-k",
        type=int,
        default=defaults.top_k,
        help="keep the k likeliest tokens; 0 is off (%(default)s)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=defaults.top_p,
        help="keep the likeliest tokens that make up this much; 1 is off (%(default)s)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        help="the same seed gives a prompt the same answer (%(default)s)",
    )

    tree = parser.add_argument_group("draft tree")
    tree.add_argument(
        "--levels",
        type=number_or_auto,
        default=defaults.levels,
        help="levels below the root; auto: measure once on this device which tree is fastest, or that plain decoding "
        "is, and keep the result (%(default)s)",
    )
    add_width_flags(tree, auto=True)
    tree.add_argument("--plain", action="store_true", help="decode without the drafter")
    tree.add_argument("--compare", action="store_true", help="decode both ways and compare text and speed")

    limits = parser.add_argument_group("lengths and stopping")
    limits.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens, help="(%(default)s)")
    limits.add_argument("--max-length", type=int, help="prompt and new tokens together (default: the target's context)")
    limits.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="STRING",
        help="end before this string; may be given several times; special tokens are no part of the text",
    )
    limits.add_argument("--eos-ids", metavar="IDS", help="token ids that end a text, instead of the checkpoint's")
    limits.add_argument("--ignore-eos", action="store_true", help="do not stop at any end-of-text token")

    output = parser.add_argument_group("running and output")
    output.add_argument(
        "--batch-size", type=int, default=defaults.batch_size, help="prompts decoded together (%(default)s)"
    )
    output.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    output.add_argument(
        "--trace",
        metavar="FILE",
        help="write every round's tree to this file, as JSON; after an interruption, of the prompts that were finished",
    )
    return parser


def settings_from(options: argparse.Namespace) -> Settings:
    """Flags of the same name are fields of `Settings`."""
    names = {field.name for field in dataclasses.fields(Settings)} & set(vars(options))
    values = {name: getattr(options, name) for name in names}
    values["stop"] = tuple(options.stop)
    if options.eos_ids is not None:
        values["eos_ids"] = tuple(prompt_forms.parse_ids(options.eos_ids))
    return Settings(**values)


def read_prompts(options: argparse.Namespace) -> list[prompt_forms.Prompt]:
    """The prompts of whichever source was given; none with --chat."""
    given = [bool(options.prompt), options.prompt_ids is not None, options.prompts is not None, options.chat]
    if sum(given) != 1:
        raise InputError("give prompts in one way: PROMPT, --prompt-ids, --prompts or --chat")
    if options.prompt_ids is not None:
        return [prompt_forms.parse_ids(text) for text in options.prompt_ids]
    if options.prompts is not None:
        return prompt_forms.read_prompts(options.prompts)
    return list(options.prompt)


def check_flags(options: argparse.Namespace) -> None:
    """Combinations that would silently ignore a flag are refused."""
    clashes = [
        (options.plain and options.compare, "--compare decodes both ways; leave out --plain"),
        (options.plain and options.trace, "--trace writes draft trees; leave out --plain"),
        (options.batch_size > 1 and options.compare, "--compare times prompts alone; leave out --batch-size"),
        (options.batch_size > 1 and options.chat, "--chat is one conversation; leave out --batch-size"),
    ]
    for flag in ("spans", "draft_vocab", "draft_dtype", "compare", "trace"):
        needs = f"--{flag.replace('_', '-')} needs --draft"
        clashes.append((getattr(options, flag) and options.draft is None, needs))
    for flag in ("raw", "json", "trace", "compare"):
        clashes.append((options.chat and getattr(options, flag), f"--chat and --{flag} do not go together"))
    for flag in ("raw", "system"):
        given = options.prompt_ids is not None and getattr(options, flag) not in (None, False)
        clashes.append((given, f"--{flag} is for text; --prompt-ids are taken as they are"))
    for flag in ("levels", "total_nodes"):
        measured = getattr(options, flag) == AUTO and options.draft is None
        clashes.append((measured, f"--{flag.replace('_', '-')} auto needs --draft"))
    for clash, message in clashes:
        if clash:
            raise InputError(message)
    if options.trace is not None:
        path = Path(options.trace).absolute()
        if not options.trace or path.is_dir() or not path.parent.is_dir():
            raise InputError(f"--trace {options.trace!r}: not a file in a directory that exists")


def generator_from(options: argparse.Namespace) -> Generator:
    """The models that flags ask for."""
    return Generator.from_pretrained(
        options.target,
        options.draft,
        spans=options.spans,
        dtype=options.dtype,
        mesh=options.mesh,
        tokenizer=options.tokenizer,
        draft_vocab=options.draft_vocab,
        draft_dtype=options.draft_dtype,
        attention=options.attention,
    )


def run(options: argparse.Namespace) -> None:
    """Everything after the flags; raises InputError before any prompt is answered."""
    check_flags(options)
    settings, prompts = settings_from(options), read_prompts(options)
    generator = generator_from(options)
    encoded = [generator.encode(prompt, raw=options.raw, system=options.system) for prompt in prompts]
    generator.check(encoded, settings)
    for note in generator.notes:
        print(f"note: {note}", file=sys.stderr)
    if settings.auto and options.draft is not None and not settings.plain:
        settings = generator.settle(settings, max(len(encoded), 1))
        if settings.plain and options.trace:
            raise InputError(
                f"--trace writes draft trees, and {describe_tree(settings)}; give numbers for --levels and "
                "--total-nodes, or leave out --trace"
            )
        print(f"note: {describe_tree(settings)}", file=sys.stderr)
    if options.chat:
        chat(generator, settings, options.system)
    elif options.compare:
        _run_comparison(generator, encoded, settings, options)
    elif options.json or settings.batch_size > 1 or options.trace or generator.tokenizer is None:
        _run_batches(generator, encoded, settings, options)
    else:
        for ids in encoded:
            _stream(generator, ids, settings)


@contextlib.contextmanager
def _traced(generator: Generator, settings: Settings, options) -> Iterator[list[Generation]]:
    """A list for what is finished, whose rounds are in --trace at the end, even if that is an interruption."""
    finished: list[Generation] = []
    try:
        yield finished
    finally:
        if options.trace and finished:
            write_trace(options.trace, finished, settings, generator.draft.config)


def _progress(encoded: list[list[int]]) -> tqdm:
    return tqdm(total=len(encoded), unit="prompt", disable=len(encoded) == 1, file=sys.stderr)


def _run_batches(generator: Generator, encoded: list[list[int]], settings: Settings, options) -> None:
    with _traced(generator, settings, options) as finished, _progress(encoded) as progress:
        for batch in generator.batches(encoded, settings, trace=bool(options.trace)):
            finished += batch
            for generation in batch:
                _print_generation(generation, as_json=options.json)
            progress.update(len(batch))


def _run_comparison(generator: Generator, encoded: list[list[int]], settings: Settings, options) -> None:
    pairs: list[Comparison] = []
    with _traced(generator, settings, options) as finished, _progress(encoded) as progress:
        for pair in compare(generator, encoded, settings, trace=bool(options.trace)):
            pairs.append(pair)
            finished.append(pair.chosen)
            if options.json:
                print(json.dumps(pair.to_json()), flush=True)
            else:
                _print_generation(pair.chosen, as_json=False)
            progress.update()
    if not options.json:
        print(Comparison.summary(pairs))


def _stream(generator: Generator, ids: list[int], settings: Settings) -> None:
    """Prints text as it is accepted."""
    answer = None
    for piece, answer in generator.pieces(ids, settings):  # noqa: B007 - the last answer is the finished one
        print(piece, end="", flush=True)
    print()
    print(describe(answer), file=sys.stderr)


def _print_generation(generation: Generation, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(generation.to_json()), flush=True)
        return
    text = generation.text
    print(",".join(map(str, generation.token_ids)) if text is None else text, flush=True)
    print(describe(generation), file=sys.stderr)


def describe(generation: Generation) -> str:
    """One line of figures."""
    tokens = len(generation.token_ids)
    per_round = generation.tokens_per_round
    rounds = "" if per_round is None else f", {per_round:.2f} tokens per round"
    return (
        f"[{tokens} tokens in {generation.seconds:.2f} s{rounds}; stopped by {generation.stop_reason}; "
        f"{generation.compile_seconds:.1f} s of compilation not counted]"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    options = build_parser().parse_args(arguments)
    with kept_programs():
        return exit_status(run, options)


if __name__ == "__main__":
    sys.exit(main())
