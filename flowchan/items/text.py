"""Format numbers and user values as short text, even if a ``__repr__`` raises an exception."""

from __future__ import annotations

from typing import Any


def short(value: Any, most: int = 80) -> str:
    """Return the repr of a value, shortened to ``most`` characters.

    If the repr raises an exception, return the value's type and the exception's type.
    """
    try:
        text = repr(value)
    except BaseException as error:  # a failing __repr__ must not replace the message that is being built
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """Return the short repr of a value and its type, such as ``2.5 (float)``."""
    return f"{short(value, 60)} ({type(value).__name__})"


def number_of(count: int, word: str) -> str:
    """Return a number and a noun in the singular or plural."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Replace unprintable characters, some of which control the terminal, with question marks."""
    return "".join(character if character.isprintable() else "?" for character in text)
