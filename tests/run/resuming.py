"""Helpers for tests of runs that can be resumed."""

from __future__ import annotations

from pathlib import Path

from flowchan.run.policy.lineage import FinishedItems
from flowchan.run.resume_file import HEADER_BYTES

ITEMS = 24
"""Default number of source items."""


def finished(path: Path, items: int = ITEMS) -> list[int]:
    """Return the numbers of the finished items of a graph with one source."""
    done = FinishedItems(bits=path.read_bytes()[HEADER_BYTES:])
    return [number for number in range(items) if done.is_finished(number)]
