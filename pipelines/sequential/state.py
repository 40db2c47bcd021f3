"""Detect changes to a pipe's module, and synchronise the module with its copies in other processes.

On the same host, the program and the parts share the memory of the tensors. Another host has copies. The
program and the other host list the tensors of a part in the same order. Torch counts the changes to each
tensor, and each side records the count up to which the other side's copy is current. Later changes are sent
with the next command or answer. Torch does not count changes through ``tensor.data``. Such changes are not
detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.items.text import short
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.shared_memory import place_of, settings, state_tensors

_EVERY_MODULES = frozenset({*vars(nn.Module()), "training"})
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_VALUES = (bool, int, float, str, bytes, type(None))


class _Same:
    """Wrapper that compares an object by identity."""

    __slots__ = ("one",)

    def __init__(self, one: Any) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.one is self.one

    __hash__ = None  # type: ignore[assignment]


def state_of(parts: Sequence[Part], copied: bool = False) -> list[Any]:
    """Return a value that changes whenever the layers of the parts change.

    The value covers attributes, hooks, and the tensors whose memory the processes do not share, such as
    copies on another host. If ``copied`` is true, tensors on a device are not shared either. Torch counts the
    changes to each tensor, except those through ``tensor.data``. Torch does not count changes to inference
    tensors, which are therefore always treated as changed.

    Raises ``ValueError`` if layers have hooks.
    """
    found: list[Any] = [settings()]
    for part in parts:
        remote = part.remote or (copied and part.device is not None and part.device.type != "cpu")
        for module in part.module.modules():
            found.extend(_seen(module, remote, numbers=copied or not part.remote))
    return found


def _seen(module: nn.Module, remote: bool, numbers: bool) -> Iterator[Any]:
    yield type(module)
    for name, value in vars(module).items():
        if name not in _EVERY_MODULES:
            yield name
            yield value if type(value) in _VALUES else _identity(value)
    own = vars(module)
    for hooks in [own[name] for name in _HOOKS if own[name]]:
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                raise ValueError(
                    f"Sequential: layer {type(module).__name__} must not have hooks, got "
                    f"{short(hook)}: they would run in another process; use on='thread', or register the "
                    "hooks on the pipe"
                )
            yield _Same(hook)
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            yield name
            if tensor is None:
                continue
            place = None if remote else place_of(tensor)
            if place is not None:
                yield place, tensor.dtype, tensor.shape, tensor.stride()
            else:
                yield tensor.data_ptr()
                yield _identity(tensor) if numbers else _Same(tensor)


def _identity(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _Same(value)
    return object() if value.is_inference() else (_Same(value), value._version)


def modes_of(parts: Sequence[Part]) -> tuple[tuple[list[bool], list[bool]], ...]:
    """For each part, return the mode of each module and whether each parameter requires grad."""
    return tuple(
        (
            [module.training for module in part.module.modules()],
            [parameter.requires_grad for parameter in part.module.parameters()],
        )
        for part in parts
    )


Numbers = list[tuple[int, Tensor]]
"""Changed tensors: their positions in the list of tensors, and their values."""


class SyncedTensors:
    """One of two sides that keep tensors synchronised between two processes.

    Initially, the tensors are equal on both sides.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._known = [_version(tensor) for tensor in self._tensors]

    def changed(self) -> Numbers:
        """Return the changes that the other side does not have yet, and mark them as sent."""
        found: Numbers = []
        for place, tensor in enumerate(self._tensors):
            if (now := _version(tensor)) is None or now != self._known[place]:
                self._known[place] = now
                found.append((place, tensor.detach().cpu()))
        return found

    def take(self, numbers: Numbers) -> None:
        """Apply changes from the other side."""
        with torch.no_grad():
            for place, values in numbers:
                self._tensors[place].copy_(values)
                self._known[place] = _version(self._tensors[place])


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class PartState:
    """A part's parameters and buffers in its process: the layers' tensors, and those that the program sees.

    Both views share the same memory, unless the part is on another device or a layer has replaced a buffer
    instead of writing into it. A program on another host receives changes in messages.
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        self._module = module
        self._seen = [tensor.detach() for tensor in state_tensors(module)]
        if device is not None:
            module.to(device)
        self._buffers = [
            (layer, name, tensor) for layer in module.modules() for name, tensor in layer._buffers.items()
        ]
        self._on_device = any(
            one.device != seen.device for one, seen in zip(state_tensors(module), self._seen, strict=True)
        )
        self._synced = SyncedTensors(self._seen)

    def changed(self) -> Numbers:
        """Return the changes that a program on another host does not have yet."""
        return self._synced.changed()

    def take(self, numbers: Numbers | None = None) -> None:
        """Update the layers' tensors, and apply any changes from a program on another host."""
        self._synced.take(numbers or [])
        if self._on_device:
            with torch.no_grad():
                for own, seen in zip(state_tensors(self._module), self._seen, strict=True):
                    own.copy_(seen)

    def give(self) -> None:
        """Make the layers' current values visible to the program.

        Raises ``ValueError`` if the values cannot be made visible.
        """
        for layer, name, tensor in self._buffers:
            now = layer._buffers.get(name)
            if now is tensor:
                continue
            if now is None or tensor is None or now.shape != tensor.shape:
                raise ValueError(
                    f"Sequential: buffer {name!r} of {type(layer).__name__} must keep its shape in a "
                    "part's process, got another shape; write into the buffer, or use on='thread'"
                )
            with torch.no_grad():
                tensor.copy_(now)
            layer._buffers[name] = tensor
        if self._on_device:
            with torch.no_grad():
                for own, seen in zip(state_tensors(self._module), self._seen, strict=True):
                    seen.copy_(own)
