"""Build a transformers tokenizer from the metadata of a GGUF file."""

import functools
import typing

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from convert.checkpoint import first_line
from poss_jax.errors import InputError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_FIX = "pass --tokenizer DIR with the Hugging Face tokenizer of the model"
_SPACE = "▁"  # what SentencePiece writes for a space

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Llama 3, but each digit is a word of its own.
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class _WordSplit(typing.NamedTuple):
    """How one family of byte-level BPE tokenizers cuts text into words before merging."""

    words: str | None = None  # a regular expression; None stands for the one of GPT-2
    single_digits: bool = False  # digits are split one by one first
    whole_words_first: bool = False  # a word that is a token is taken as it is, whatever the merges say
    compose_unicode: bool = False  # NFC normalisation
    begin_by_default: bool = False  # the beginning token is added where the file does not say


_GPT2 = _WordSplit()
_LLAMA3 = _WordSplit(words=_LLAMA3_WORDS, whole_words_first=True, begin_by_default=True)

# tokenizer.ggml.pre -> how text is cut into words
_WORD_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _WordSplit(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _WordSplit(words=_QWEN2_WORDS, compose_unicode=True),
}

# transformers' name of a special token -> metadata key of its id
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(checkpoint):
    """Build the tokenizer that a GGUF file describes.

    Args:
        checkpoint: GGUFCheckpoint (its `path` and `metadata` are used).

    Returns:
        transformers.PreTrainedTokenizerFast, with its special tokens and its chat template.

    Raises:
        InputError: the file has no tokenizer, or one of a kind that is not supported.
    """
    model = checkpoint.metadata("tokenizer.ggml.model", None)
    if model not in _BUILDERS:
        raise _error(
            checkpoint,
            f"tokenizer model {model!r} is not supported, only {' and '.join(map(repr, _BUILDERS))} are",
        )
    tokens = _tokens(checkpoint)
    types = _token_types(checkpoint, len(tokens))
    try:
        tokenizer, begin_by_default = _BUILDERS[model](checkpoint, tokens, types)
    except InputError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise _error(checkpoint, f"the tokenizer cannot be built ({first_line(error)})") from error
    _add_special_tokens(tokenizer, tokens, types)
    return _wrap(checkpoint, tokenizer, tokens, begin_by_default)


def _byte_level(checkpoint, tokens, types):
    kind = checkpoint.metadata("tokenizer.ggml.pre", None)
    if kind not in _WORD_SPLITS:
        raise _error(
            checkpoint,
            f"pre-tokenizer {kind!r} (tokenizer.ggml.pre) is not supported, only {', '.join(_WORD_SPLITS)} are",
        )
    split = _WORD_SPLITS[kind]
    merges = [_pair(checkpoint, merge) for merge in checkpoint.metadata("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=split.whole_words_first)
    )
    if split.compose_unicode:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_split_steps(split))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begin_by_default


def _split_steps(split):
    steps = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.words is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.words), behavior="isolated"))
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None)]


def _sentencepiece(checkpoint, tokens, types):
    scores = checkpoint.metadata("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise _error(checkpoint, f"has {len(scores)} scores for {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    unknown = checkpoint.metadata("tokenizer.ggml.unknown_token_id", None)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=None if unknown is None else _token(checkpoint, tokens, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A normalizer, not the Metaspace step: Metaspace drops the prefix before text that starts with a
    # space, where SentencePiece and llama.cpp keep both.
    prefix = checkpoint.metadata("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_from_scores(tokens, types, scores):
    """Recover the merges of a SentencePiece BPE vocabulary, which stores scores only.

    Every way to cut a token into two tokens is a merge; a merge ranks as the score of what it makes. Among
    the cuts of one token the longer left part goes first, which is the order transformers uses.

    Args:
        tokens: list of str.
        types: list of int, as long; only normal tokens take part in merges.
        scores: list of float, as long, higher is earlier.

    Returns:
        list of (left, right) pairs of str, the first to be applied first.
    """
    score_of = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == _NORMAL}
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


# tokenizer.ggml.model -> builder of the tokenizer
_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _tokens(checkpoint):
    tokens = checkpoint.metadata("tokenizer.ggml.tokens", [])
    if not tokens:
        raise _error(checkpoint, "has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise _error(checkpoint, f"repeats {len(tokens) - len(set(tokens))} tokens in its vocabulary")
    return tokens


def _token_types(checkpoint, count):
    types = checkpoint.metadata("tokenizer.ggml.token_type", [_NORMAL] * count)
    if len(types) != count:
        raise _error(checkpoint, f"has {len(types)} token types for {count} tokens")
    return types


def _vocabulary(tokens):
    return {token: index for index, token in enumerate(tokens)}


def _pair(checkpoint, merge):
    parts = tuple(merge.split(" "))
    if len(parts) != 2:
        raise _error(checkpoint, f"merge {merge!r} is not a pair of tokens")
    return parts


def _add_special_tokens(tokenizer, tokens, types):
    """Have control and user-defined tokens matched whole in text, as llama.cpp does."""
    added = functools.partial(tokenizers.AddedToken, normalized=False)
    kinds = list(zip(tokens, types, strict=True))
    special = [token for token, kind in kinds if kind in (_CONTROL, _UNKNOWN)]
    user_defined = [token for token, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([added(token, special=True) for token in special])
    tokenizer.add_tokens([added(token, special=False) for token in user_defined])


def _wrap(checkpoint, tokenizer, tokens, begin_by_default):
    from transformers import PreTrainedTokenizerFast  # takes a second to import

    names = {
        name: _token(checkpoint, tokens, index)
        for name, key in _SPECIAL_TOKENS.items()
        if (index := checkpoint.metadata(key, None)) is not None
    }
    begin = names.get("bos_token")
    if checkpoint.metadata("tokenizer.ggml.add_bos_token", begin_by_default) and begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"],
            pair=[begin, "$A", begin, "$B:1"],
            special_tokens=[(begin, tokens.index(begin))],
        )
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=checkpoint.metadata("llama.context_length"),
        **names,
    )
    result.chat_template = checkpoint.metadata("tokenizer.chat_template", None)
    return result


def _token(checkpoint, tokens, index):
    if not 0 <= index < len(tokens):
        raise _error(checkpoint, f"special token id {index} is beyond the vocabulary of {len(tokens)} tokens")
    return tokens[index]


def _error(checkpoint, text):
    return InputError(f"{checkpoint.path}: {' '.join(text.splitlines())}; {_FIX}")
