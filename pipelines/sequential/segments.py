"""Define the segments of a traced module: consecutive operations from its ``forward``.

A segment uses the module's own layers, parameters and buffers. Each segment passes on the values that later
segments need: a single value, or a tuple of several values. A residual connection may therefore cross any
number of segment borders. A segment is data rather than generated code. A segment can therefore be copied and
pickled like any layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

RANDOM = (
    "dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "poisson", "rrelu", "gumbel",
    "exponential", "cauchy", "geometric", "fractional_max_pool", "scaled_dot_product_attention",
    "multi_head_attention",
)  # fmt: skip
"""Substrings in the names of torch functions that may draw random numbers."""


class Name(str):
    """Placeholder, in arguments, for a value that an earlier operation computed."""

    __slots__ = ()


@dataclass(frozen=True)
class Operation:
    """One operation of a segment.

    ``name`` is the name of its result. ``over`` lists the values that no later operation needs. ``target`` is
    a function, or the name of a method or a layer. For ``get_attr``, it is a pair: the owner's name and the
    name of the attribute.
    """

    kind: Literal["call_function", "call_method", "call_module", "get_attr"]
    name: str
    target: Any
    args: Any
    named: Any
    over: tuple[str, ...] = ()


class Owned(nn.Module):
    """Parameters and buffers of ``owner`` that a segment's operations use directly."""

    draws = False

    def __init__(self, owner: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            if name in owner._parameters:
                self._parameters[name] = owner._parameters[name]
            else:  # share the dict, so that a buffer replaced by owner.double() is also replaced here
                self._buffers = owner._buffers


class Segment(nn.Module):
    """Layer that runs consecutive operations.

    ``takes`` lists the names of its inputs. ``gives`` is the structure of its output, with names in place of
    values. The inputs of the first segment are the arguments of the module.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        takes: Sequence[str],
        gives: Any,
        first: bool,
        layers: dict[str, Any],
    ) -> None:
        super().__init__()
        self.operations, self.takes, self.gives, self.first = tuple(operations), tuple(takes), gives, first
        self._modules.update(layers)
        self.draws = any(map(_draws, operations))

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the operations in order."""
        values = self._given(args, named)
        for one in self.operations:
            values[one.name] = self._done(one, values)
            for name in one.over:
                del values[name]
        return filled(self.gives, values)

    def _given(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        if not self.first:
            (value,) = args
            return dict(zip(self.takes, (value,) if len(self.takes) == 1 else value, strict=True))
        unknown = [name for name in named if name not in self.takes[len(args) :]]
        if unknown or len(args) + len(named) != len(self.takes):
            raise TypeError(
                "Sequential: a traced module must be called with exactly the arguments "
                f"{', '.join(self.takes)}; pass these, or use a module whose forward takes the ones "
                "you pass"
            )
        return {**dict(zip(self.takes, args, strict=False)), **named}

    def _done(self, one: Operation, values: dict[str, Any]) -> Any:
        if one.kind == "get_attr":
            owner, name = one.target
            return getattr(self._modules[owner], name)
        args, named = filled(one.args, values), filled(one.named, values)
        if one.kind == "call_module":
            layer = self._modules[one.target]
            assert layer is not None
            return layer(*args, **named)
        if one.kind == "call_method":
            return getattr(args[0], one.target)(*args[1:], **named)
        return one.target(*args, **named)

    def extra_repr(self) -> str:
        """Return the number of operations, for the module's ``repr``."""
        return f"{len(self.operations)} operations"


def filled(value: Any, values: dict[str, Any]) -> Any:
    """Replace each name in a structure with its value."""
    kind = type(value)
    if kind is Name:
        return values[value]
    if kind is tuple or kind is list:
        return kind(filled(one, values) for one in value)
    if kind is dict:
        return {key: filled(one, values) for key, one in value.items()}
    if kind is slice:
        return slice(*(filled(one, values) for one in (value.start, value.stop, value.step)))
    return value


def _draws(one: Operation) -> bool:
    """Return True if an operation may draw random numbers, as any function from outside torch may."""
    if one.kind in ("get_attr", "call_module"):  # the caller checks layers separately
        return False
    name = one.target if isinstance(one.target, str) else getattr(one.target, "__name__", "")
    module = "torch" if isinstance(one.target, str) else getattr(one.target, "__module__", None) or "torch"
    return module.partition(".")[0] not in ("torch", "_operator", "builtins", "math") or any(
        word in name for word in RANDOM
    )
