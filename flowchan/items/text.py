"""Format numbers and user values as short text for messages, even if a ``__repr__`` fails."""

from __future__ import annotations

from typing import Any


def short(value: Any, most: int = 80) -> str:
    """Return the repr of a value, cut to at most ``most`` characters.

    If the repr raises, return the types of the value and the error.
    """
    try:
        text = repr(value)
    except BaseException as error:  # user code; its error must not replace the message that is being built
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """Return a value's short repr and its type, such as ``2.5 (float)``."""
    return f"{short(value, 60)} ({type(value).__name__})"


def number_of(count: int, word: str) -> str:
    """Return a number and a noun in the singular or plural."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
