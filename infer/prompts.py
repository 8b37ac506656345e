"""Prompts: from a JSON-lines file, and to token ids with the chat template or without."""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poss_jax.errors import InputError

# A prompt is a text, a list of messages ({"role", "content"}), or a list of token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]

FIELDS = ("prompt", "messages", "turns", "prompt_ids")


def read_prompts(path: str) -> list[Prompt]:
    """One prompt a line: an object with `prompt`, `messages`, `turns` (its first one is taken) or `prompt_ids`."""
    prompts = [prompt_in(record, f"{path}, line {number}") for number, record in read_lines(path)]
    if not prompts:
        raise InputError(f"{path}: holds no prompts")
    return prompts


def read_lines(path: str) -> list[tuple[int, Any]]:
    """The JSON values of a file of lines, with their line numbers. Blank lines are passed over."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that cannot be one
        raise InputError(f"{path}: not readable ({error})") from error
    return [(number, _json(line, f"{path}, line {number}")) for number, line in enumerate(lines, 1) if line.strip()]


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error


def prompt_in(record: Any, where: str) -> Prompt:
    """The prompt that a JSON value holds in one of `FIELDS`. Raises InputError naming `where`."""
    field = next((name for name in FIELDS if isinstance(record, dict) and name in record), None)
    if field is None:
        raise InputError(f"{where}: expected an object with one of {', '.join(FIELDS)}")
    value = record[field]
    if field == "turns":
        if not isinstance(value, list) or not value:
            raise InputError(f"{where}: turns must be a list of user turns that is not empty")
        value = value[0]
    if not _well_formed(value, "prompt" if field == "turns" else field):
        raise InputError(f"{where}: {field} has the wrong form")
    return value


def _well_formed(value: Any, field: str) -> bool:
    if field == "prompt":
        return isinstance(value, str)
    if not isinstance(value, list):
        return False
    if field == "prompt_ids":
        return all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in value
    )


def parse_ids(text: str) -> list[int]:
    """ "0,12,20" gives [0, 12, 20]."""
    parts = text.split(",") if text.strip() else []
    if not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", part) for part in parts):
        raise InputError(f"token ids {text[:80]!r} must be whole numbers with commas between, such as 0,12,20")
    return [int(part) for part in parts]


def encode(tokenizer, prompt: Prompt, *, raw: bool, system: str | None) -> list[int]:
    """Token ids of a prompt. A text is one user turn in the chat template unless `raw`.

    The template writes its own special tokens, the raw text gets those that the tokenizer adds unless it begins
    with them: either way there is one beginning-of-text token at most. `system` goes in front of conversations
    that have no system turn. Token ids are taken as they are, and neither is for them.
    """
    if not isinstance(prompt, str):
        ids = _as_ids(prompt)
        if ids and (raw or system is not None):
            raise InputError(f"{'--raw' if raw else '--system'} is for text; token ids are taken as they are")
        if ids is not None:
            return ids
    if tokenizer is None:
        raise InputError("the target has no tokenizer, so it cannot read text; give token ids (--prompt-ids)")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError("the prompt is empty")
        _check_unicode(prompt)
        if raw:
            if system is not None:
                raise InputError("--system needs the chat template; leave out --raw")
            ids = tokenizer(prompt).input_ids
            return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids
        prompt = [{"role": "user", "content": prompt}]
    for message in prompt:
        _check_unicode(message["content"])
    if raw:
        raise InputError("messages need the chat template; leave out --raw")
    if not tokenizer.chat_template:
        raise InputError("the target's tokenizer has no chat template; pass --raw to give it the text as it is")
    if system is not None and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    return tokenizer(_render(tokenizer, prompt), add_special_tokens=False).input_ids


def _as_ids(prompt: Any) -> list[int] | None:
    """Token ids from any sequence of whole numbers, None if the prompt is one of messages."""
    try:
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return None
        return [operator.index(item) for item in items]
    except TypeError:
        raise InputError(
            f"a prompt is a text, a list of messages or a list of token ids, and not {prompt!r:.80}"
        ) from None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"the prompt is not valid Unicode: {ascii(text):.80}") from None


def _render(tokenizer, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InputError(f"the chat template refuses these messages ({error})") from error
