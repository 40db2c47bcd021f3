"""What processes must know of the parts' modules, to see when it is no longer so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from flowchan.items.text import short
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.shared_memory import place_of, settings

_EVERY_MODULES = frozenset({*vars(nn.Module()), "training"})
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_VALUES = (bool, int, float, str, bytes, type(None))


class _Same:
    """Equal to what holds the very same object."""

    __slots__ = ("one",)

    def __init__(self, one: Any) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.one is self.one

    __hash__ = None  # type: ignore[assignment]


def state_of(parts: Sequence[Part], copied: bool = False) -> list[Any]:
    """Something that changes when the layers of the parts do, their attributes or their hooks, or parameters
    and buffers that the processes don't see, as those on another device or host where they are ``copied``
    there once: torch counts the changes of each tensor, but for those through ``tensor.data``; of inference
    tensors it keeps no count, so they always count as changed. ``ValueError`` for hooks of layers."""
    found: list[Any] = [settings()]
    for part in parts:
        away = part.away or (copied and part.device is not None and part.device.type != "cpu")
        for module in part.module.modules():
            found.extend(_seen(module, away, numbers=copied or not part.away))
    return found


def _seen(module: nn.Module, away: bool, numbers: bool) -> Iterator[Any]:
    yield type(module)
    for name, value in vars(module).items():
        if name not in _EVERY_MODULES:
            yield name
            yield value if type(value) in _VALUES else _version(value)
    own = vars(module)
    for hooks in [own[name] for name in _HOOKS if own[name]]:
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                raise ValueError(
                    f"Sequential: a {type(module).__name__} has the hook {short(hook)}, which would be "
                    "called in the part's process, where what it keeps is lost to the program: use "
                    "on='thread', put it into the layer's forward(), or register it on the pipe"
                )
            yield _Same(hook)
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            yield name
            if tensor is None:
                continue
            place = None if away else place_of(tensor)
            if place is not None:
                yield place, tensor.dtype, tensor.shape, tensor.stride()
            else:
                yield tensor.data_ptr()
                yield _version(tensor) if numbers else _Same(tensor)


def _version(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _Same(value)
    return object() if value.is_inference() else (_Same(value), value._version)


def modes_of(parts: Sequence[Part]) -> tuple[tuple[list[bool], list[bool]], ...]:
    """For each part whether each of its modules trains and each of its parameters requires a gradient."""
    return tuple(
        (
            [module.training for module in part.module.modules()],
            [parameter.requires_grad for parameter in part.module.parameters()],
        )
        for part in parts
    )
