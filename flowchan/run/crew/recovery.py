"""Return the items of a dead worker to the channels for other workers (R4)."""

from __future__ import annotations

from flowchan import _core
from flowchan.run.worker.opening import Ports


def take_up(old: Ports, new: Ports, everything: bool = False, blame: bool = True) -> None:
    """Return a dead worker's items to the channels. Each output of these items still appears only once.

    Args:
        old: Ports of the dead worker.
        new: Open ports of the dead worker's replacement, which may be the only worker that can get the first
            item.
        everything: True if all items that the dead worker held must go to the replacement.
        blame: True if the first item may have killed the worker, False if the supervisor terminated it.
    """
    replacements = [new.inputs[port] for port in old.inputs]
    _core._take_up(list(old.inputs.values()), list(old.writers()), replacements, everything, blame)


def deaths_over_item(ports: Ports) -> int:
    """Count the workers, this dead worker included, that died in user code on this worker's item.

    Return 0 if this worker died outside user code.
    """
    return _core._deaths_over(list(ports.inputs.values()))
