"""How messages show what a user gave. No torch here."""

from __future__ import annotations

from typing import Any


def written(value: Any) -> str:
    """The value's repr, short enough for one line, or its type where that fails, as it may with an object of
    the user's."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown(value: Any) -> str:
    """The same with its type: ``2.5 (float)``."""
    text, kind = written(value), type(value).__name__
    return text if text == f"a {kind}" else f"{text} ({kind})"
