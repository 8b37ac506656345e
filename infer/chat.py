"""A conversation of many turns at a prompt."""

import sys

from infer.engine import Generator
from infer.settings import Settings
from poss_jax.errors import InputError

INTRODUCTION = "Type a message and press Enter. /reset starts over, /quit or end-of-file ends."


def chat(generator: Generator, settings: Settings, system: str | None) -> None:
    """Reads user turns from standard input until its end, and streams each answer.

    The whole conversation is the prompt of every turn. A turn that no longer fits the context is refused with a
    line, and the conversation goes on without it.
    """
    generator.encode([{"role": "user", "content": "?"}], system=system)  # a missing template is said at once
    generator.check([], settings)
    print(INTRODUCTION, file=sys.stderr)
    messages: list[dict[str, str]] = []
    while (line := _ask()) is not None:
        if line == "/reset":
            messages = []
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = ""
            for piece in generator.stream(messages, settings, system=system):
                print(piece, end="", flush=True)
                answer += piece
        except InputError as error:
            messages.pop()
            print(f"{error}; /reset starts over", file=sys.stderr)
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    print("> ", end="", flush=True, file=sys.stderr)
    line = sys.stdin.readline()
    return None if not line or line.strip() == "/quit" else line.strip()
