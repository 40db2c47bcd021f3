"""The numbers of a part on a host: there they are copies, and neither side sees the other's change.

Both sides have the tensors of the part in the same order. Each notes up to which version of a tensor the
other has its numbers, for torch counts the changes of every tensor; what has changed since goes along with
the next command or answer. Changes through ``tensor.data`` torch does not count, so these are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Numbers = list[tuple[int, Tensor]]
"""What has changed: the places of tensors in their order, and what is in them now."""


class Copies:
    """One side of it. The numbers are the same on both when this is made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._known = [_version(tensor) for tensor in self._tensors]

    def changed(self) -> Numbers:
        """What the other side does not have yet. It counts as sent."""
        found: Numbers = []
        for place, tensor in enumerate(self._tensors):
            if (now := _version(tensor)) is None or now != self._known[place]:
                self._known[place] = now
                found.append((place, tensor.detach().cpu()))
        return found

    def take(self, numbers: Numbers) -> None:
        """What the other side has sent."""
        with torch.no_grad():
            for place, values in numbers:
                self._tensors[place].copy_(values)
                self._known[place] = _version(self._tensors[place])


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
