"""What a generation returns, and the counting behind it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    token_ids: new tokens only, a final EOS included. text: decoded without special tokens and cut before a stop
    string; None without a tokenizer. stop_reason: eos, max_new_tokens, stop_string or context; None while running.
    accept_lengths: accepted draft tokens of each round, root and bonus not counted, not cut where the text was.
    seconds: from prompt to last token, compilation excluded. Rows of a batch run together, and the host sees that one
    has stopped after 64 rounds at most (8 with stop strings): not to be summed over a batch. compile_seconds: spent
    compiling for its batch.
    trace: every round's tree, if asked for.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    stop_reason: str | None
    accept_lengths: list[int]
    seconds: float
    compile_seconds: float = 0.0
    trace: list[dict[str, Any]] | None = None

    @property
    def rounds(self) -> int:
        """How often the target verified a tree (or, in plain decoding, was fed a token)."""
        return len(self.accept_lengths)

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of accept length + 1; None where the first token, which needs no round, was all."""
        return sum(length + 1 for length in self.accept_lengths) / self.rounds if self.rounds else None

    def to_json(self) -> dict[str, Any]:
        """The fields that the command prints."""
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "stop_reason": self.stop_reason,
            "accept_lengths": self.accept_lengths,
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "seconds": self.seconds,
        }


def rounds_needed(accept_lengths: list[int], tokens: int) -> int:
    """How many of the rounds it took to know `tokens` new tokens; the first one needs none.

    Example: accept lengths 2, 0 make 3 tokens known after the first round's 2 + 1 on top of the prompt's own,
    so 4 tokens need 1 round and 5 need 2.
    """
    known = 1
    for rounds, length in enumerate(accept_lengths):
        if known >= tokens:
            return rounds
        known += length + 1
    return len(accept_lengths)
