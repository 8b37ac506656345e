"""`Generator`: a target, perhaps a drafter, and the host side of the decoding loop."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.checkpoint import Source, locate, read_json
from convert.from_hf import Loaded, Place, load_draft, load_target
from convert.gguf import GGUFCheckpoint
from convert.tokenizer import load_tokenizer
from infer import prompts as prompt_forms
from infer.prompts import Prompt
from infer.results import Generation, rounds_needed
from infer.settings import Settings
from infer.text import find_stop, settled, tokens_until_stop
from infer.trace import round_record, to_host
from poss_jax import decode, sharding
from poss_jax.config import TargetConfig
from poss_jax.decode import Params, Plan, State
from poss_jax.errors import InputError

DTYPES = ("float32", "bfloat16")
ROUNDS_PER_VISIT = 8  # how many rounds run on the device before the host looks, when it has to look at all
SMALLEST_BUCKET, LARGEST_STEP = 16, 512


class Generator:
    """Generates with one target and, unless `draft` is None, one drafter.

    Example:

        generator = Generator.from_pretrained("target", "drafter", spans=(3, 3))
        for generation in generator.generate(["What is JAX?"], max_new_tokens=100):
            print(generation.text, generation.tokens_per_round)

    Compiled programs are kept for prompts of the same bucket and equal settings. `notes` says what a user may
    want to know about the checkpoints, a line each.
    """

    def __init__(self, target: Loaded, draft: Loaded | None, tokenizer, eos_ids: Sequence[int], dtype: str):
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.eos_ids = tuple(eos_ids)
        self.notes: list[str] = []
        self._precision = "highest" if dtype == "float32" else "default"
        self._compiled: set[tuple] = set()
        if draft is not None:
            _check_pair(target.config, draft)
            self.notes += _settle_embedding(target, draft)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | None = None,
        *,
        spans: tuple[int, ...] | None = None,
        dtype: str = "float32",
        mesh: str | None = None,
        tokenizer: str | None = None,
    ) -> "Generator":
        """Loads a target (directory, hub id, GGUF file) and a drafter (directory or hub id).

        `spans`: how many draft positions each specialist serves; needed where there are several and the drafter's
        config does not say. `mesh`: "tensor=N" splits the weights over N devices. `tokenizer`: where to take the
        tokenizer from, if not from the target. Raises InputError.
        """
        if dtype not in DTYPES:
            raise InputError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        place, notes = _place_on(mesh, jnp.dtype(dtype))
        source = Source.open(target)
        draft_source = None if draft is None else Source.open(draft)
        text = _tokenizer_for(source, tokenizer)
        loaded = load_target(source, place)
        drafter = load_draft(draft_source, place, spans) if draft_source else None
        generator = cls(loaded, drafter, text, find_eos_ids(source, text), dtype)
        generator.notes = notes + generator.notes
        return generator

    def encode(self, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a text, of messages, or (as they are) of token ids. Raises InputError."""
        return prompt_forms.encode(self.tokenizer, prompt, raw=raw, system=system)

    def generate(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | None = None,
        *,
        raw: bool = False,
        system: str | None = None,
        trace: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """Answers all prompts, in their order. `options` are fields of `Settings`."""
        settings = _settings(settings, options)
        prompts = [prompts] if isinstance(prompts, str) else prompts
        encoded = [self.encode(prompt, raw=raw, system=system) for prompt in prompts]
        return [answer for batch in self.batches(encoded, settings, trace=trace) for answer in batch]

    def stream(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        raw: bool = False,
        system: str | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yields the answer's text in pieces, as soon as they cannot change any more."""
        settings = _settings(settings, options)
        if self.tokenizer is None:
            raise InputError("the target has no tokenizer, so there is no text to stream; use generate")
        shown = ""
        for (answer,) in self.visits([self.encode(prompt, raw=raw, system=system)], settings):
            text = answer.text if answer.stop_reason else settled(answer.text, settings.stop)
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text

    def batches(
        self, prompts: Sequence[list[int]], settings: Settings, *, trace: bool = False
    ) -> Iterator[list[Generation]]:
        """Answers token-id prompts batch by batch. All prompts are checked before the first one runs."""
        self.check(prompts, settings)
        if not prompts:
            return
        settings = dataclasses.replace(settings, batch_size=min(settings.batch_size, len(prompts)))
        looking = trace or bool(settings.stop)
        for first in range(0, len(prompts), settings.batch_size):
            group = prompts[first : first + settings.batch_size]
            seeds = settings.seeds[first : first + len(group)] if settings.seeds else [settings.seed] * len(group)
            *_, answers = self._run(group, seeds, settings, looking=looking, trace=trace)
            yield answers

    def visits(
        self, prompts: Sequence[list[int]], settings: Settings, *, trace: bool = False
    ) -> Iterator[list[Generation]]:
        """Answers one batch of token-id prompts, yielding what is there after every few rounds."""
        self.check(prompts, settings)
        settings = dataclasses.replace(settings, batch_size=len(prompts))
        seeds = settings.seeds or [settings.seed] * len(prompts)
        yield from self._run(prompts, seeds, settings, looking=True, trace=trace)

    def _run(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        settings: Settings,
        *,
        looking: bool,
        trace: bool,
    ) -> Iterator[list[Generation]]:
        """The host loop over one batch. Yields unfinished answers only if `looking`; the last ones are finished."""
        batch = _Batch(self, prompts, seeds, settings)
        compile_seconds = batch.compile()
        visit = 1 if trace else ROUNDS_PER_VISIT if looking else np.iinfo(np.int32).max
        traces: list[list[dict[str, Any]]] = [[] for _ in prompts]
        answers: list[Generation | None] = [None] * len(prompts)
        seconds, started = 0.0, time.perf_counter()
        batch.start()
        while True:
            batch.look()
            seconds += time.perf_counter() - started
            for row in range(len(prompts)):
                if answers[row] is None or answers[row].stop_reason is None:
                    answers[row] = batch.answer(row, seconds, compile_seconds, traces[row] if trace else None)
            yield list(answers)
            running = [answer.stop_reason is None for answer in answers]
            if not any(running):
                return
            started = time.perf_counter()  # what the caller does with an answer does not count
            batch.stop_rows([not still for still in running])
            committed = batch.length - 1
            batch.advance(visit)
            if trace:
                last = to_host(batch.state.last_round)
                for row in np.flatnonzero(running):
                    traces[row].append(round_record(last, row, len(traces[row]), int(committed[row])))

    def check(self, prompts: Sequence[list[int]], settings: Settings) -> None:
        """Raises InputError if any of these token-id prompts cannot be answered with these settings."""
        vocab, context = self.target.config.vocab_size, self._max_length(settings)
        if settings.stop and self.tokenizer is None:
            raise InputError("--stop needs text, and the target has no tokenizer; use --eos-ids")
        if settings.seeds is not None and len(settings.seeds) != len(prompts):
            raise InputError(f"{len(settings.seeds)} seeds were given for {len(prompts)} prompts")
        _check_ids(settings.eos_ids or (), vocab, "--eos-ids")
        for index, ids in enumerate(prompts):
            name = f"prompt {index + 1}" if len(prompts) > 1 else "the prompt"
            if not ids:
                raise InputError(f"{name} is empty")
            _check_ids(ids, vocab, name)
            if len(ids) >= context:
                raise InputError(
                    f"{name} has {len(ids)} tokens, which leaves no room for a new one: the context holds {context}"
                )

    def _max_length(self, settings: Settings) -> int:
        context = self.target.config.context
        if settings.max_length is not None and settings.max_length > context:
            raise InputError(f"--max-length {settings.max_length} is more than the target's context of {context}")
        return settings.max_length or context

    def _precise(self) -> contextlib.AbstractContextManager:
        """Full float32 products where float32 was asked for: GPUs and TPUs default to fewer bits."""
        return jax.default_matmul_precision(self._precision)


class _Batch:
    """One batch on the device: arrays of static shape, the compiled programs, and copies of what the host reads."""

    def __init__(self, generator: Generator, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Settings):
        self.generator, self.prompts, self.settings = generator, prompts, settings
        draft = None if settings.plain else generator.draft
        self.plan = Plan.create(
            generator.target.config, draft.config if draft else None, settings.tree, settings.sampling
        )
        self.params = Params(generator.target.params, draft.params if self.plan.draft else None)
        context = generator._max_length(settings)
        width = bucket(max(map(len, prompts)))
        # Depends on the bucket and not on the prompts, so that prompts of one bucket share a program.
        most = max(min(width + settings.max_new_tokens, context), width)
        self.slots = round_up(most, SMALLEST_BUCKET) + self.plan.slack
        rows = settings.batch_size  # the last batch is filled up with companions that never run
        prompt = np.zeros((rows, width), np.int32)
        length, limit = np.full(rows, 2, np.int32), np.zeros(rows, np.int32)
        for row, ids in enumerate(prompts):
            prompt[row, : len(ids)] = ids
            length[row] = len(ids)
            limit[row] = min(len(ids) + settings.max_new_tokens, context)
        keys = jax.vmap(jax.random.key)(np.resize(np.asarray(seeds, np.uint32), rows))
        self.arguments = (prompt, length, limit, keys)
        ids = () if settings.ignore_eos else generator.eos_ids if settings.eos_ids is None else settings.eos_ids
        self.eos_ids = np.asarray([-1, *ids], np.int32)
        self.state: State | None = None

    def start(self) -> None:
        with self.generator._precise():
            self.state = decode.jit_prefill(self.params, self.plan, self.slots, *self.arguments, self.eos_ids)

    def advance(self, rounds: int) -> None:
        with self.generator._precise():
            self.state = decode.jit_decode(self.params, self.plan, self.state, self.eos_ids, np.int32(rounds))

    def compile(self) -> float:
        """Compiles both programs if this batch is the first of its shapes; seconds that took."""
        shapes = (self.plan, self.slots, self.arguments[0].shape, self.eos_ids.shape)
        if shapes in self.generator._compiled:
            return 0.0
        started = time.perf_counter()
        self.start()
        self.advance(0)
        jax.block_until_ready(self.state.length)
        self.state = None
        self.generator._compiled.add(shapes)
        return time.perf_counter() - started

    def look(self) -> None:
        """Copies to the host what the answers are made of."""
        state = self.state
        self.tokens, self.length, self.stopped, self.rounds, self.accept_lengths = map(
            np.asarray, (state.tokens, state.length, state.stopped, state.rounds, state.accept_lengths)
        )

    def stop_rows(self, finished: list[bool]) -> None:
        """Tells the device which rows the host has stopped (at a stop string)."""
        ended = np.concatenate([finished, np.ones(len(self.stopped) - len(finished), bool)])
        if np.any(ended & (self.stopped == decode.RUNNING)):
            stopped = np.where(ended & (self.stopped == decode.RUNNING), decode.STOPPED_AT_LIMIT, self.stopped)
            self.state = self.state.replace(stopped=jax.device_put(stopped, self.state.stopped.sharding))

    def answer(self, row: int, seconds: float, compile_seconds: float, trace: list | None) -> Generation:
        """What is known of a row so far; `stop_reason` None while it runs."""
        ids = list(self.prompts[row])
        token_ids = self.tokens[row, len(ids) : self.length[row]].tolist()
        accept_lengths = self.accept_lengths[row, : self.rounds[row]].tolist()
        reason = self._device_reason(row)
        text = self._decode(token_ids)
        place = find_stop(text, self.settings.stop) if self.settings.stop else None
        if place is not None:
            reason, text = "stop_string", text[:place]
            token_ids = token_ids[: tokens_until_stop(self._decode, token_ids, self.settings.stop)]
            accept_lengths = accept_lengths[: rounds_needed(accept_lengths, len(token_ids))]
        return Generation(
            ids, token_ids, text, reason, accept_lengths, seconds, compile_seconds,
            None if trace is None else trace[: len(accept_lengths)],
        )  # fmt: skip

    def _device_reason(self, row: int) -> str | None:
        if self.stopped[row] == decode.RUNNING:
            return None
        if self.stopped[row] == decode.STOPPED_AT_EOS:
            return "eos"
        new = self.length[row] - len(self.prompts[row])
        return "max_new_tokens" if new >= self.settings.max_new_tokens else "context"

    def _decode(self, token_ids: list[int]) -> str | None:
        tokenizer = self.generator.tokenizer
        return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)


def bucket(length: int) -> int:
    """The padded length of a prompt: a power of two from 16 to 512, then the next multiple of 512."""
    if length > LARGEST_STEP:
        return round_up(length, LARGEST_STEP)
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def find_eos_ids(source: Source, tokenizer) -> tuple[int, ...]:
    """Every id that ends a text: of generation_config.json, else of config.json; and of the tokenizer."""
    declared = source.config.get("eos_token_id")
    if source.path.is_dir() and (source.path / "generation_config.json").exists():
        generation = read_json(source.path / "generation_config.json").get("eos_token_id")
        declared = declared if generation is None else generation
    ids = list(declared) if isinstance(declared, list) else [declared]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    ids = [token for token in ids if token is not None]
    if not all(isinstance(token, int) and 0 <= token < 2**31 for token in ids):
        raise InputError(f"{source.path}: eos_token_id {declared!r} must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _tokenizer_for(source: Source, name: str | None):
    if name is not None:
        tokenizer = load_tokenizer(locate(name))
        if tokenizer is None:
            raise InputError(f"{name}: holds no tokenizer")
        return tokenizer
    return load_tokenizer(source.path, source.tensors if isinstance(source.tensors, GGUFCheckpoint) else None)


def _settings(settings: Settings | None, options: dict[str, Any]) -> Settings:
    unknown = set(options) - {field.name for field in dataclasses.fields(Settings)}
    if unknown:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; Settings has the known ones")
    return dataclasses.replace(settings or Settings(), **options)


def _place_on(mesh_text: str | None, dtype: jnp.dtype) -> tuple[Place, list[str]]:
    """How to put a parameter on the devices, and what to say about it."""
    if mesh_text is None:
        return lambda array, spec: jnp.asarray(array, dtype), []
    mesh = sharding.make_mesh(sharding.parse_mesh(mesh_text, ("tensor",)))

    def place(array, spec):
        return jax.device_put(np.asarray(array).astype(dtype), sharding.parameter_sharding(mesh, spec))

    return place, [f"weights are split over {mesh.size} devices"]


def _check_ids(ids: Sequence[int], vocab: int, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise InputError(f"{name} holds token id {wrong}; the vocabulary has ids 0 to {vocab - 1}")


def _check_pair(target: TargetConfig, draft: Loaded) -> None:
    for name, theirs, ours in (
        ("hidden_size", draft.config.block.hidden_size, target.block.hidden_size),
        ("vocab_size", draft.config.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise InputError(f"the draft's {name} is {theirs}, the target's is {ours}; it was made for another target")


def _settle_embedding(target: Loaded, draft: Loaded) -> list[str]:
    """Drops a draft embedding that equals the target's; says so where it differs, since that may be a mistake."""
    if "embed" not in draft.params:
        return []
    rows = int(jnp.sum(jnp.any(draft.params["embed"] != target.params["embed"], axis=1)))
    if rows:
        return [f"the draft's own embedding differs from the target's in {rows} rows and is used for drafting"]
    del draft.params["embed"]
    return []
