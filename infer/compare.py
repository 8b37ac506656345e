"""Decoding the same prompts with and without the drafter, and an honest comparison of the two."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from infer.engine import Generator
from infer.results import Generation
from infer.settings import Settings


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answers to one prompt, drafted and plain, from the same program in the same run."""

    drafted: Generation
    plain: Generation

    @property
    def identical(self) -> bool:
        return self.drafted.token_ids == self.plain.token_ids and self.drafted.text == self.plain.text

    def to_json(self) -> dict[str, Any]:
        """The drafted answer's fields, with `identical`, and `plain` for the other one's."""
        return {**self.drafted.to_json(), "identical": self.identical, "plain": self.plain.to_json()}

    @staticmethod
    def summary(pairs: list["Comparison"]) -> str:
        """A table over all prompts. Rates count new tokens over seconds without compilation, prompts included."""
        drafted, plain = _Total.of([p.drafted for p in pairs]), _Total.of([p.plain for p in pairs])
        identical = sum(pair.identical for pair in pairs)
        every = "yes" if identical == len(pairs) else f"only {identical} of {len(pairs)}"
        return "\n".join(
            [
                f"{'':12}{'tokens':>8}{'rounds':>8}{'tokens/round':>14}{'seconds':>9}{'tokens/s':>10}",
                drafted.line("drafted"),
                plain.line("plain"),
                f"speed-up: {plain.seconds / drafted.seconds * drafted.tokens / max(plain.tokens, 1):.2f} times",
                f"identical texts: {every}",
            ]
        )


@dataclasses.dataclass(frozen=True)
class _Total:
    tokens: int
    rounds: int
    accepted: int
    seconds: float

    @classmethod
    def of(cls, generations: list[Generation]) -> "_Total":
        return cls(
            tokens=sum(len(generation.token_ids) for generation in generations),
            rounds=sum(generation.rounds for generation in generations),
            accepted=sum(sum(generation.accept_lengths) for generation in generations),
            seconds=sum(generation.seconds for generation in generations),
        )

    def line(self, name: str) -> str:
        per_round = f"{self.accepted / self.rounds + 1:.3f}" if self.rounds else "-"
        rate = self.tokens / self.seconds
        return f"{name:12}{self.tokens:>8}{self.rounds:>8}{per_round:>14}{self.seconds:>9.2f}{rate:>10.1f}"


def compare(
    generator: Generator, prompts: list[list[int]], settings: Settings, *, trace: bool = False
) -> Iterator[Comparison]:
    """Answers every prompt alone (batch of one, so that seconds belong to it): as the settings say, and then plain.
    Where they are plain, as auto trees may make them, the two differ by chance only.
    """
    settings = dataclasses.replace(settings, batch_size=1)
    for ids in prompts:
        ((drafted,),) = generator.batches([ids], settings, trace=trace)
        ((plain,),) = generator.batches([ids], dataclasses.replace(settings, plain=True))
        yield Comparison(drafted, plain)
