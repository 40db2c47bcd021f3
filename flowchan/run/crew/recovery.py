"""Recover the items of a dead worker, so that another worker takes them up (R4)."""

from __future__ import annotations

from flowchan import _core
from flowchan.run.worker.opening import Ports


def take_up(old: Ports, new: Ports, everything: bool = False, blame: bool = True) -> None:
    """Give back the items that a dead worker held, so that each of their outputs appears once.

    Args:
        old: The ports of the dead worker.
        new: The open ports of its replacement, which may have to work on the first item alone.
        everything: The replacement gets all that the dead worker held.
        blame: The first item may have killed the worker. False if the supervisor ended it.
    """
    replacements = [new.inputs[port] for port in old.inputs]
    _core._take_up(list(old.inputs.values()), list(old.writers()), replacements, everything, blame)


def deaths_over_item(ports: Ports) -> int:
    """Count the workers that died in the user's code over the item of a dead worker, including that worker.

    Return 0 if it died outside the user's code.
    """
    return _core._deaths_over(list(ports.inputs.values()))
