"""`Generator`: answers prompts with a target and, where there is one, a drafter."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infer import prompts as prompt_forms
from infer.batch import ROUNDS_UNSEEN, Batch
from infer.calibration import Calibration
from infer.loading import Models, load_models
from infer.prompts import Prompt
from infer.results import Generation
from infer.settings import Settings
from infer.text import settled
from poss_jax.errors import InputError

ROUNDS_PER_VISIT = 8  # how many rounds run on the device before the host looks, where someone waits for what is there


class Generator:
    """Generates with one target and, unless `models.draft` is None, one drafter.

    Example:

        generator = Generator.from_pretrained("target", "drafter", spans=(3, 3))
        for generation in generator.generate(["What is JAX?"], max_new_tokens=100):
            print(generation.text, generation.tokens_per_round)

    Compiled programs are kept for prompts of the same bucket and equal settings.
    """

    def __init__(self, models: Models):
        self.models = models
        self.target, self.draft, self.tokenizer = models.target, models.draft, models.tokenizer
        self._compiled: set[tuple] = set()
        self._calibration = Calibration(models, self.encode)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        spans: Sequence[int] | str | None = None,
        dtype: str = "float32",
        mesh: str | None = None,
        tokenizer: str | Path | None = None,
        draft_vocab: str | Path | None = None,
        draft_dtype: str | None = None,
        attention: str = "auto",
    ) -> "Generator":
        """Loads a target (directory, hub id, GGUF file) and a drafter (directory, hub id, `--out` of `train.run`).

        `spans`: how many draft positions each specialist serves, (3, 3) or "3,3"; needed where there are several and
        the drafter's config does not say. `mesh`: "tensor=N" splits the weights over N devices. `tokenizer`: where to
        take the tokenizer from, if not from the target. `draft_vocab`: a file of the only tokens to draft.
        `draft_dtype`: "int8" rounds the drafter's weights and its copy of the head to that. `attention`: the kernel of
        rounds, "plain", "mosaic" (Hopper GPUs, bfloat16) or "auto". Raises InputError.
        """
        return cls(
            load_models(
                target,
                draft,
                spans=spans,
                dtype=dtype,
                mesh=mesh,
                tokenizer=tokenizer,
                draft_vocab=draft_vocab,
                draft_dtype=draft_dtype,
                attention=attention,
            )
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may want to know about the checkpoints, a line each."""
        return self.models.notes

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
        for piece, _ in self.pieces(self.encode(prompt, raw=raw, system=system), settings):
            yield piece

    def pieces(self, ids: list[int], settings: Settings) -> Iterator[tuple[str, Generation]]:
        """`stream` for token ids, with what is known of the answer so far."""
        if self.tokenizer is None:
            raise InputError("the target has no tokenizer, so there is no text to stream; use generate")
        shown = ""
        for (answer,) in self.visits([ids], settings):
            text = answer.text if answer.stop_reason else settled(answer.text, settings.stop)
            yield text[len(shown) :], answer
            shown = max(shown, text, key=len)

    def batches(
        self, prompts: Sequence[list[int]], settings: Settings, *, trace: bool = False
    ) -> Iterator[list[Generation]]:
        """Answers token-id prompts batch by batch. All prompts are checked before the first one runs."""
        self.check(prompts, settings)
        if not prompts:
            return
        settings = self.settle(settings, len(prompts))
        looking = trace or bool(settings.stop)
        for first in range(0, len(prompts), settings.batch_size):
            group = prompts[first : first + settings.batch_size]
            seeds = settings.seeds[first : first + len(group)] if settings.seeds else [settings.seed] * len(group)
            *_, answers = self._run(group, seeds, settings, looking=looking, trace=trace)
            yield answers

    def visits(self, prompts: Sequence[list[int]], settings: Settings) -> Iterator[list[Generation]]:
        """Answers one batch of token-id prompts, yielding what is there after every few rounds."""
        self.check(prompts, settings)
        settings = self.settle(dataclasses.replace(settings, batch_size=len(prompts)), len(prompts))
        seeds = settings.seeds or [settings.seed] * len(prompts)
        yield from self._run(prompts, seeds, settings, looking=True, trace=False)

    def _run(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Settings, *, looking: bool, trace: bool
    ) -> Iterator[list[Generation]]:
        """The host loop over one batch. Yields what is there at each visit, after a few rounds if `looking`, else after
        many; the last answers are finished.
        """
        batch = Batch(self.models, prompts, seeds, settings, self.context(settings), trace=trace)
        batch.compile(self._compiled)
        rounds = ROUNDS_PER_VISIT if looking else ROUNDS_UNSEEN
        answers: list[Generation | None] = [None] * len(prompts)
        seconds, compiling, started = 0.0, batch.compile_seconds, time.perf_counter()
        batch.start()
        while True:
            seconds += time.perf_counter() - started - (batch.compile_seconds - compiling)
            for row, answer in enumerate(answers):
                if answer is None or answer.stop_reason is None:
                    answers[row] = batch.answer(row, seconds)
            yield list(answers)
            if all(answer.stop_reason is not None for answer in answers):
                return
            # What the caller does with an answer does not count.
            compiling, started = batch.compile_seconds, time.perf_counter()
            batch.advance(rounds)

    def context(self, settings: Settings) -> int:
        """The most tokens, prompt included, of a text. Raises InputError if more are asked for than the target has."""
        context = self.target.config.context
        if settings.max_length is not None and settings.max_length > context:
            raise InputError(f"--max-length {settings.max_length} is more than the target's context of {context}")
        return settings.max_length or context

    def settle(self, settings: Settings, prompts: int = 1) -> Settings:
        """The settings with which so many prompts will be answered: what was left to measurement ("auto") is chosen."""
        rows = max(1, min(settings.batch_size, prompts))
        return self._calibration.settle(dataclasses.replace(settings, batch_size=rows))

    def check(self, prompts: Sequence[list[int]], settings: Settings) -> None:
        """Raises InputError if any of these token-id prompts cannot be answered with these settings."""
        vocab, context = self.target.config.vocab_size, self.context(settings)
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


def _settings(settings: Settings | None, options: dict[str, Any]) -> Settings:
    unknown = set(options) - {field.name for field in dataclasses.fields(Settings)}
    if unknown:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; Settings has the known ones")
    return dataclasses.replace(settings or Settings(), **options)


def _check_ids(ids: Sequence[int], vocab: int, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise InputError(f"{name} holds token id {wrong}; the vocabulary has ids 0 to {vocab - 1}")
