"""Decoding the same prompts with and without the drafter, and an honest comparison of the two."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from infer.engine import Generator
from infer.results import Generation
from infer.settings import Settings


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answers to one prompt, as the settings say and plain, from the same program in the same run.

    drafted: whether the settings draft; auto trees may not.
    """

    chosen: Generation
    plain: Generation
    drafted: bool = True

    @property
    def identical(self) -> bool:
        return self.chosen.token_ids == self.plain.token_ids and self.chosen.text == self.plain.text

    def to_json(self) -> dict[str, Any]:
        """The chosen answer's fields, with `drafted` and `identical`, and `plain` for the other one's."""
        judged = {"drafted": self.drafted, "identical": self.identical}
        return {**self.chosen.to_json(), **judged, "plain": self.plain.to_json()}

    @staticmethod
    def summary(pairs: list["Comparison"]) -> str:
        """A table over all prompts. Rates count new tokens over seconds without compilation, prompts included.
        Two plain rows have no speed-up: what they differ by is noise.
        """
        drafted = all(pair.drafted for pair in pairs)
        chosen, plain = _Total.of([p.chosen for p in pairs]), _Total.of([p.plain for p in pairs])
        speed_up = f"speed-up: {plain.seconds / chosen.seconds * chosen.tokens / max(plain.tokens, 1):.2f} times"
        identical = sum(pair.identical for pair in pairs)
        every = "yes" if identical == len(pairs) else f"only {identical} of {len(pairs)}"
        return "\n".join(
            [
                f"{'':17}{'tokens':>8}{'rounds':>8}{'tokens/round':>14}{'seconds':>9}{'tokens/s':>10}",
                chosen.line("drafted" if drafted else "as chosen (plain)"),
                plain.line("plain"),
                *([speed_up] if drafted else []),
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
        return f"{name:17}{self.tokens:>8}{self.rounds:>8}{per_round:>14}{self.seconds:>9.2f}{rate:>10.1f}"


def compare(
    generator: Generator, prompts: list[list[int]], settings: Settings, *, trace: bool = False
) -> Iterator[Comparison]:
    """Answers every prompt alone (batch of one, so that seconds belong to it): as the settings say, and then plain.
    Where they are plain, as auto trees may make them, the two differ by chance only.
    """
    settings = generator.settle(dataclasses.replace(settings, batch_size=1))
    drafted = generator.draft is not None and not settings.plain
    for ids in prompts:
        ((chosen,),) = generator.batches([ids], settings, trace=trace)
        ((plain,),) = generator.batches([ids], dataclasses.replace(settings, plain=True))
        yield Comparison(chosen, plain, drafted)
