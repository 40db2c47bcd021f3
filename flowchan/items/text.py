"""How messages show a value of the user's, whatever its ``__repr__`` does."""

from __future__ import annotations

from typing import Any


def short(value: Any, most: int = 80) -> str:
    """The value's repr in at most ``most`` characters. Where that fails its type, and how it failed."""
    try:
        text = repr(value)
    except BaseException as error:  # it is the user's code, and the message must not be lost by it
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """The same with its type: ``2.5 (float)``."""
    return f"{short(value, 60)} ({type(value).__name__})"
