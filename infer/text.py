"""Tokens to text while they still arrive: stop strings, and text that is safe to show already."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def find_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the earliest stop string begins, or None."""
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return min(places, default=None)


def tokens_until_stop(decode: Decode, ids: list[int], stop: tuple[str, ...]) -> int:
    """The fewest leading tokens whose text holds a stop string; all of `ids` must hold one."""
    fewest, most = 1, len(ids)
    while fewest < most:  # a stop string that is there stays there, so halving works
        middle = (fewest + most) // 2
        if find_stop(decode(ids[:middle]), stop) is None:
            fewest = middle + 1
        else:
            most = middle
    return fewest


def settled(text: str, stop: tuple[str, ...]) -> str:
    """The part of an unfinished text that later tokens cannot change.

    Held back are a character whose bytes are not all there yet, and an end that may be the beginning of a stop
    string: with stop "END", "the E" shows "the ".
    """
    text = text.rstrip(REPLACEMENT)
    held = 0
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), held, -1):
            if text.endswith(string[:size]):
                held = size
                break
    return text[: len(text) - held]
