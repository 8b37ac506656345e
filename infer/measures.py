"""The measures of a drafter, each from whole numbers: how many rounds had which accept length, how many tokens came.

docs/benchmark.md defines every one of them in a sentence.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one answer, or many together, took; counts of answers are added before anything is divided.

    by_length: at place l the number of rounds with accept length l. emitted: tokens that the rounds gave the user, so
    behind a cut (EOS, lengths) none, and not the first token, which comes from the prompt's own pass.
    """

    by_length: tuple[int, ...] = ()
    emitted: int = 0

    @classmethod
    def of(cls, accept_lengths: Sequence[int], new_tokens: int) -> "Counts":
        """Of one answer: the accept length of each round, and all its new tokens."""
        by_length = [0] * (max(accept_lengths, default=-1) + 1)
        for length in accept_lengths:
            by_length[length] += 1
        return cls(tuple(by_length), max(new_tokens - 1, 0))

    @property
    def rounds(self) -> int:
        return sum(self.by_length)

    @property
    def committed(self) -> int:
        """Accepted tokens and the target's own one of every round, cuts not regarded."""
        return sum((length + 1) * rounds for length, rounds in enumerate(self.by_length))

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of accept length + 1 over all rounds; None without rounds."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def emitted_per_round(self) -> float | None:
        """Tokens that the user got from rounds, for each round."""
        return self.emitted / self.rounds if self.rounds else None

    def reached(self, positions: int) -> list[int]:
        """For each draft position the rounds in which all before it were accepted."""
        return [sum(self.by_length[position:]) for position in range(positions)]

    def acceptance(self, positions: int) -> list[float | None]:
        """For each draft position the share of the rounds that reached it in which it was accepted; None: none did."""
        reached = self.reached(positions + 1)
        return [after / before if before else None for before, after in zip(reached, reached[1:], strict=False)]


def total(counts: Iterable[Counts]) -> Counts:
    """All of them together."""
    counts = list(counts)
    columns = itertools.zip_longest(*(one.by_length for one in counts), fillvalue=0)
    return Counts(tuple(map(sum, columns)), sum(one.emitted for one in counts))


def per_prompt_mean(counts: Iterable[Counts]) -> float | None:
    """The mean of the prompts' own tokens per round: a prompt of one round weighs as much as one of a hundred."""
    values = [count.tokens_per_round for count in counts if count.rounds]
    return sum(values) / len(values) if values else None


@dataclasses.dataclass(frozen=True)
class Duration:
    """Time of one answer, or of many together. Compilation is in none of it.

    tokens: all new ones; answers: how many of them came from the prompts' own passes. Seconds until the device was done
    and the host had the tokens.
    """

    tokens: int = 0
    answers: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: "Duration") -> "Duration":
        return Duration(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def tokens_per_second(self) -> float | None:
        """Of the rounds alone: the prompts' passes, and the token that each gives, left out."""
        emitted = self.tokens - self.answers
        return emitted / self.decode_seconds if emitted and self.decode_seconds else None

    @property
    def tokens_per_second_with_prefill(self) -> float | None:
        """All new tokens over all of the time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.tokens / seconds if seconds else None

    @property
    def seconds_per_round(self) -> float | None:
        return self.decode_seconds / self.rounds if self.rounds else None


def speed_up(drafted: Duration, plain: Duration, *, with_prefill: bool = False) -> float | None:
    """How many times as many tokens a second; both measured on the same prompts. None where either has no rate."""
    name = "tokens_per_second_with_prefill" if with_prefill else "tokens_per_second"
    ours, theirs = getattr(drafted, name), getattr(plain, name)
    return ours / theirs if ours and theirs else None


def affordable_seconds(seconds_per_round: float, tokens_per_round: float, better_tokens_per_round: float) -> float:
    """How much longer a round may take for its tokens to cost the same time: where a better drafter breaks even.

    Example: rounds of 10 ms and 2.0 tokens are as fast as rounds of 11 ms and 2.2 tokens, so 1 ms.
    """
    return seconds_per_round * (better_tokens_per_round / tokens_per_round - 1)
