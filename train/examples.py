"""Training examples and sets of them, be they read from text (`train.data`) or prepared on disk (`train.store`)."""

import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from poss_jax.config import TargetConfig
from poss_jax.errors import InputError
from train.conversations import DUPLICATE, DataSource, Summary

NO_REPLY_LEFT = "no reply within the greatest length"  # why records go


@dataclasses.dataclass(frozen=True)
class Example:
    """tokens [n] int32. supervised [n] bool, by rows of the unroll. source, record: number of its source, and of its
    record there, both from 0. features [n, h] of the target, float32 or bfloat16, or None: perhaps a view of a file
    that is mapped into memory and read when it is used.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    source: int
    record: int
    features: np.ndarray | None = None

    def cut(self, length: int) -> "Example":
        """Its first `length` tokens; the last row has no following token then, so it is not supervised."""
        if len(self.tokens) <= length:
            return self
        supervised = self.supervised[:length].copy()
        supervised[-1] = False
        features = None if self.features is None else self.features[:length]
        return dataclasses.replace(self, tokens=self.tokens[:length], supervised=supervised, features=features)


@dataclasses.dataclass(frozen=True)
class FeatureKind:
    """What the features of a data set are: dtype "float32" or "bfloat16", h, and of which target: its name when they
    were made, which may change, and the fingerprint of its weights, which decides.
    """

    dtype: str
    hidden_size: int
    target: str = dataclasses.field(compare=False)
    target_fingerprint: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples in the order of their sources, and how they were come by.

    features: what the examples' features are, None where they have none. probe: what the tokenizer makes of a fixed
    text, to know it again; () if not known.
    """

    examples: list[Example]
    sources: tuple[DataSource, ...]
    summary: Summary
    max_length: int
    features: FeatureKind | None = None
    probe: tuple[int, ...] = ()

    def split(self, held_out: int, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Two data sets: the larger part, and `held_out` examples that the seed picks."""
        if not 0 < held_out < len(self.examples):
            raise InputError(f"cannot hold out {held_out} of {len(self.examples)} examples")
        chosen = set(np.random.default_rng(seed).permutation(len(self.examples))[:held_out].tolist())
        parts = [[e for i, e in enumerate(self.examples) if (i in chosen) == side] for side in (False, True)]
        return tuple(dataclasses.replace(self, examples=part) for part in parts)

    def fingerprint(self) -> str:
        """The same for the same tokens and supervision in the same order."""
        digest = hashlib.blake2b(digest_size=8)
        for example in self.examples:
            digest.update(len(example.tokens).to_bytes(8, "little") + example.tokens.tobytes())
            digest.update(example.supervised.tobytes())
        return digest.hexdigest()

    def describe(self, index: int) -> str:
        """Where an example comes from, for people: "a.json, record 12" (from 0)."""
        example = self.examples[index]
        return f"{self.sources[example.source].name}, record {example.record}"

    def check_length(self, config: TargetConfig) -> None:
        """Raises InputError naming the longest example if the target was not made for so many tokens or its attention
        does not reach as far: it would get features that no text has when it is generated.
        """
        index, longest = max(enumerate(len(each.tokens) for each in self.examples), key=lambda pair: pair[1])
        if longest > config.context:
            slides = config.context == config.window
            limit = "the target's attention slides after" if slides else "the target's context is"
            raise InputError(
                f"{self.describe(index)}: has {longest} tokens, and {limit} {config.context}; "
                f"give --max-length {config.context}"
            )

    def check_tokens(self, config: TargetConfig) -> None:
        """Raises InputError naming an example with a token that the target does not have, which would get the embedding
        of another.
        """
        vocab_size = config.vocab_size
        for index, example in enumerate(self.examples):
            if (largest := int(example.tokens.max())) >= vocab_size:
                raise InputError(
                    f"{self.describe(index)}: holds token {largest}, the target has {vocab_size}; "
                    "it was made with another tokenizer"
                )

    def cut(self, max_length: int) -> "Dataset":
        """With every example cut at `max_length` tokens. Those left without supervision go, counted in the summary."""
        if max_length >= self.max_length:
            return dataclasses.replace(self, max_length=max_length)
        pairs = [(example, example.cut(max_length)) for example in self.examples]
        pairs = [(whole, short) for whole, short in pairs if short.supervised.any()]
        truncated = sum(len(whole.tokens) > max_length for whole, _ in pairs)
        fewer = self._keeping([short for _, short in pairs], NO_REPLY_LEFT, truncated)
        return dataclasses.replace(fewer, max_length=max_length)

    def without(self, met: set[bytes]) -> "Dataset":
        """Without the examples whose tokens were met in earlier sources, counted in the summary; those of the others
        are added to `met`. Within the data set all stay.
        """
        keys = [hashlib.blake2b(example.tokens.tobytes(), digest_size=16).digest() for example in self.examples]
        kept = [example for example, key in zip(self.examples, keys, strict=True) if key not in met]
        gone = [example for example, key in zip(self.examples, keys, strict=True) if key in met]
        met.update(keys)
        if not gone:
            return self
        # Which examples were cut is not kept: those of the greatest length, but for a few that just fit.
        truncated = self.summary.truncated - sum(len(example.tokens) == self.max_length for example in gone)
        return self._keeping(kept, DUPLICATE, max(truncated, 0))

    def _keeping(self, examples: list[Example], reason: str, truncated: int) -> "Dataset":
        """With these of its examples alone; the summary says why the others went."""
        summary = copy.deepcopy(self.summary)
        if len(examples) < len(self.examples):
            summary.dropped_records[reason] += len(self.examples) - len(examples)
        summary.kept, summary.truncated = len(examples), truncated
        summary.tokens = sum(len(example.tokens) for example in examples)
        summary.supervised = sum(int(example.supervised.sum()) for example in examples)
        return dataclasses.replace(self, examples=examples, summary=summary)

    def weighted(self, weight: float) -> "Dataset":
        """With all sources together having this weight: shared out by their own weights, or else by their examples."""
        counts = Counter(example.source for example in self.examples)
        shares = [counts[n] if source.weight is None else source.weight for n, source in enumerate(self.sources)]
        shares = [share if counts[number] else 0 for number, share in enumerate(shares)]
        left = [number for number, share in enumerate(shares) if share]  # cutting may have emptied some
        sources = [DataSource(self.sources[n].name, weight * (shares[n] / sum(shares))) for n in left]
        moved = {number: place for place, number in enumerate(left)}
        examples = [dataclasses.replace(example, source=moved[example.source]) for example in self.examples]
        return dataclasses.replace(self, examples=examples, sources=tuple(sources))


def join(parts: Sequence[tuple[str, Dataset]], max_length: int) -> Dataset:
    """One data set of several, each with the name that messages give it.

    Raises InputError naming two of them that do not go together: with features and without, of different kinds of
    features, of different tokenizers, or with weights and without.
    """
    (first_name, first), *others = parts
    if not others:
        return dataclasses.replace(first, max_length=max_length)
    for name, part in others:
        _check_together(first_name, first, name, part)
    examples, sources, summary = [], [], Summary()
    for _, part in parts:
        examples += [dataclasses.replace(e, source=e.source + len(sources)) if sources else e for e in part.examples]
        sources += part.sources
        summary = _sum(summary, part.summary)
    probe = next((part.probe for _, part in parts if part.probe), ())
    return Dataset(examples, tuple(sources), summary, max_length, first.features, probe)


def _check_together(first_name: str, first: Dataset, name: str, other: Dataset) -> None:
    if (first.features is None) != (other.features is None):
        having, lacking = (name, first_name) if first.features is None else (first_name, name)
        raise InputError(f"{having} holds features of the target and {lacking} does not; run train.features on both")
    if first.features != other.features:
        raise InputError(
            f"{first_name} holds {_said(first.features)} and {name} {_said(other.features)}; make them of one kind"
        )
    if first.probe and other.probe and first.probe != other.probe:
        raise InputError(f"{first_name} and {name} were made with different tokenizers; prepare both with the same one")
    weights = [source.weight for source in (*first.sources, *other.sources)]
    if None in weights and any(weights):
        inside = name if other.sources[0].weight is not None else first_name
        raise InputError(f"{inside}: was prepared with weights, so give each source here a weight, such as {inside}:1")


def _said(kind: FeatureKind) -> str:
    return f"{kind.dtype} features of {kind.hidden_size} numbers of {kind.target} ({kind.target_fingerprint})"


def _sum(one: Summary, other: Summary) -> Summary:
    """Field by field."""
    fields = [field.name for field in dataclasses.fields(Summary)]
    return Summary(**{name: getattr(one, name) + getattr(other, name) for name in fields})
