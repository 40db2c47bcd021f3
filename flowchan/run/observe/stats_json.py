"""Convert a run's statistics to dictionaries for JSON, and back.

The keys and units are those of the attributes of :class:`RunStats` and its parts. Each stage also has a
``state``. Readers ignore unknown keys, so that later versions can add keys. If the meaning of a key changes,
``SCHEMA`` changes too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from flowchan.channel.channel import Holder
from flowchan.run.policy.scaling import ScalingDecision
from flowchan.run.policy.stats import (
    Cause,
    EdgeStats,
    HostStats,
    RunStats,
    StageStats,
    WorkerStats,
    WorkSeconds,
)

SCHEMA = 1
"""Version of the format."""

_PARTS: dict[str, type] = {
    "stages": StageStats,
    "edges": EdgeStats,
    "hosts": HostStats,
    "holders": Holder,
    "per_worker": WorkerStats,
    "seconds": WorkSeconds,
    "worked": WorkSeconds,
    "decisions": ScalingDecision,
    "cause": Cause,
}
"""For each key whose value is or contains dictionaries: the class that they represent."""


def to_json(stats: RunStats) -> dict[str, Any]:
    """Convert statistics to a dictionary of numbers, strings, lists and dictionaries.

    Args:
        stats: Statistics of a run.

    Returns:
        The dictionary, without the schema version.
    """
    found: dict[str, Any] = _plain(stats)
    for document, stage in zip(found["stages"], stats.stages, strict=True):
        document["state"] = stage.state
    return found


def from_json(document: Mapping[str, Any]) -> RunStats:
    """Restore statistics from a dictionary made by :func:`to_json`.

    Args:
        document: The dictionary. Unknown keys are ignored.

    Returns:
        The statistics.

    Raises:
        TypeError: A key is missing, or a value has the wrong type.
    """
    stats: RunStats = _object(RunStats, document)
    return stats


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    return value


def _object(kind: type, document: Mapping[str, Any]) -> Any:
    known = {name: _value(name, document[name]) for name in _names(kind) if name in document}
    return kind(**known)


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(name, one) for one in value)
    return _object(_PARTS[name], value) if isinstance(value, dict) else value
