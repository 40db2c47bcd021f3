"""Apply the rules that combine a server tensor with a pushed value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.encoded import Encoded
from flowchan.pipelines.parameter_server.tensor_kinds import as_kind, copy, dtype_name, is_inexact, is_tensor

Rule = str | Callable[[Any, Any], Any]
"""Name of a rule, or a function ``(current, given) -> new``."""

RULES = ("zero", "copy", "add", "gradient")


def check_rule(call: str, rule: Any, optimized: bool = True) -> None:
    """Check a push's rule in the client.

    Args:
        call: Name of the call, for error messages.
        rule: The rule.
        optimized: Whether the server has an optimizer for the pushed tensors (default: True).

    Raises:
        TypeError: The rule is neither a string nor a function of two arguments.
        ValueError: The rule's name is unknown, or the rule is ``"gradient"`` without an optimizer.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            names = ", ".join(map(repr, RULES))
            raise ValueError(
                f"{call}: rule must be {names} or a function (current, given) -> new, got {rule!r}"
            )
        if rule == "gradient" and not optimized:
            option = "rows={table: RowOptimizer.sgd(lr)}" if call == "push_rows" else "optimizer="
            raise ValueError(
                f"{call}: rule must not be 'gradient' without an optimizer; pass {option} to ParameterServer"
            )
    elif not callable(rule) or not _takes_two(rule):
        raise TypeError(
            f"{call}: rule must be a name or a function (current, given) -> new, got {shown(rule)}"
        )


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a native function such as numpy.maximum has no signature
        pass
    return True


def check_values(
    call: str,
    values: Mapping[str, Any],
    rule: Rule,
    scale: float,
    specs: Mapping[str, Any],
    tables: Collection[str] = (),
) -> None:
    """Check in the client that the server can apply the rule to the pushed tensors.

    Args:
        call: Name of the call, for error messages.
        values: The pushed tensors by name.
        rule: A checked rule.
        scale: Factor that multiplies the pushed values.
        specs: Objects with the attributes ``shape`` and ``dtype`` of the server's tensors, by name.
        tables: Names of the tensors that have a row optimizer.

    Raises:
        KeyError: ``values`` contains a name that the server does not have.
        TypeError: A value is not a tensor, or has the wrong element type.
        ValueError: A value has the wrong shape, or an integer tensor does not support the rule or the scale.
    """
    for name, value in values.items():
        if name not in specs:
            known = ", ".join(map(repr, list(specs)[:5]))
            raise KeyError(
                f"{call}: each key in values must be the name of one of the server's tensors ({known}), "
                f"got {name!r}"
            )
        if rule == "gradient" and name in tables:
            raise ValueError(f"{call}: rule must not be 'gradient' for the rows of {name!r}; use push_rows")
        if rule != "zero":
            check_value(call, f"values[{name!r}]", value, tuple(specs[name].shape), specs[name].dtype)
            check_scale(call, name, rule, scale, specs[name].dtype)


def check_value(call: str, argument: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise an error unless the pushed value is a tensor with this shape and element type."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{call}: {argument} must be an array or a tensor, got {shown(value)}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{call}: {argument} must have the shape {shape}, got {tuple(value.shape)}")
    if dtype_name(value.dtype) != dtype_name(dtype):
        raise TypeError(
            f"{call}: {argument} must be {dtype_name(dtype)} like the server's tensor, got "
            f"{dtype_name(value.dtype)}; convert it first"
        )


def check_scale(call: str, name: str, rule: Rule, scale: float, dtype: Any) -> None:
    """Raise ``ValueError`` if a push would apply a gradient or a scale to an integer tensor."""
    if is_inexact(dtype):
        return
    if rule == "gradient":
        raise ValueError(f"{call}: rule must not be 'gradient' for the {dtype_name(dtype)} tensor {name!r}")
    if scale != 1:
        raise ValueError(f"{call}: scale must be 1 for the {dtype_name(dtype)} tensor {name!r}, got {scale}")


def apply(rule: Rule, current: Any, given: Any, scale: float, out: Any) -> None:
    """Write the new value of one tensor into ``out``.

    The result is the same as in plain torch or NumPy: ``"add"`` is ``current.add(given, alpha=scale)`` for a
    tensor, and ``current + given * scale`` for an array.

    Args:
        rule: ``"zero"``, ``"copy"``, ``"add"`` or a function.
        current: The tensor or array in the current block. The call does not change ``current``, unless
            ``out`` is the same object.
        given: The pushed value, which may be :class:`Encoded`.
        scale: Factor that multiplies the pushed value.
        out: The tensor or array in the shadow block.

    Raises:
        ValueError: A function returned a value of the wrong shape.
    """
    if rule == "zero":
        out[...] = 0
        return
    given = as_kind(given.decoded() if isinstance(given, Encoded) else given, out)
    if rule == "add":
        _add(current, given, scale, out)
        return
    given = given if scale == 1 else given * scale
    if rule == "copy":
        copy(given, out)
        return
    copy(current, out)  # the function may change its first argument
    new = rule(out, given)  # type: ignore[operator]
    if getattr(new, "shape", None) != out.shape:
        raise ValueError(f"push: rule must return a value of shape {tuple(out.shape)}, got {shown(new)}")
    copy(as_kind(new, out), out)


def _add(current: Any, given: Any, scale: float, out: Any) -> None:
    if is_tensor(out):
        import torch

        torch.add(current, given, alpha=1 if scale == 1 else scale, out=out)
        return
    import numpy as np

    np.add(current, given if scale == 1 else given * scale, out=out)


def apply_to_object(rule: Rule, current: Any, given: Any, scale: float) -> Any:
    """Apply a rule to a server's Python object, and return the new object.

    Args:
        rule: ``"zero"``, ``"copy"``, ``"add"`` or a function.
        current: The server's current object.
        given: The pushed object.
        scale: Factor that multiplies the pushed object.

    Returns:
        The new object.
    """
    if rule == "zero":
        return current * 0
    if scale != 1:
        given = given * scale
    if rule == "copy":
        return given
    return current + given if rule == "add" else rule(current, given)  # type: ignore[operator]
