"""Store the state of training in a dictionary that ``torch.save`` writes and ``torch.load`` reads safely.

Each part has its own optimizer. The optimizers' state is therefore valid only for one cut of the module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor, nn

from flowchan.items.text import short
from flowchan.pipelines.sequential.engine.worker_messages import Optimizers
from flowchan.pipelines.sequential.parts import Part, divided

KEYS = "module", "parts", "steps", "optimizer", "optimizers"
_NAMED = 3  # maximum number of the module's keys in an error message


def copied(state: Any, cpu: bool = False) -> Any:
    """Copy a state: clone its tensors (on the CPU if ``cpu`` is true), and turn NumPy scalars into numbers.

    ``torch.load`` refuses NumPy scalars by default, and a learning rate may be one.
    """
    if isinstance(state, Tensor):
        return state.detach().to("cpu" if cpu else state.device, copy=True)
    if isinstance(state, dict):
        found = copy.copy(state)  # keep the dict's type, and the metadata of a module's state
        for key, value in state.items():
            found[key] = copied(value, cpu)
        return found
    if type(state) in (list, tuple):
        return type(state)(copied(value, cpu) for value in state)
    return state.item() if isinstance(state, Number) and hasattr(state, "item") else state


def layer_counts(parts: Sequence[Part]) -> list[int]:
    """Return the number of layers in each part."""
    return [len(part.module) for part in parts]


def optimizer_of(part: Part, create: Optimizers | None) -> Any:
    """Create a part's optimizer for inspection, or return ``None`` if the part has none.

    Raises ``TypeError`` if its state cannot be saved.
    """
    parameters: list[Tensor] = list(part.module.parameters())
    if create is None or not parameters:
        return None
    made = create(parameters)
    if not all(callable(getattr(made, name, None)) for name in ("state_dict", "load_state_dict")):
        raise TypeError(
            "training: optimizer must have state_dict() and load_state_dict(), got a "
            f"{type(made).__name__}; use a torch.optim.Optimizer, or define both methods"
        )
    return made


def optimizer_name(parts: Sequence[Part], create: Optimizers | None) -> str | None:
    """Return the class name of the parts' optimizers, or ``None`` if the parts have none."""
    made = (optimizer_of(part, create) for part in parts)
    return next((type(one).__name__ for one in made if one is not None), None)


def parts_for(
    state: Any, module: nn.Sequential, parts: Sequence[Part], is_open: bool, create: Optimizers | None
) -> Sequence[Part] | None:
    """Check a state, and return the parts that it applies to.

    If the cut into ``parts`` is undecided, the state decides it. The result is ``None`` if the state was
    saved before its cut was decided. Raises ``TypeError`` or ``ValueError`` if the state does not fit.
    """
    _check_keys(state)
    _check_module(state["module"], module)
    if is_open and state["parts"] is None:
        return None
    if is_open:
        parts = divided(module, _open_counts(state["parts"], len(parts), len(module)))
    _check_cut(state["parts"], parts)
    _check_optimizers(state, parts, create)
    return parts


def _check_keys(state: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``state`` has the structure of a training state."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"training: state must be the dictionary that state_dict() returns, got {short(state)}; "
            "load it with torch.load(path)"
        )
    if missing := [key for key in KEYS if key not in state]:
        raise ValueError(
            "training: state must be the dictionary that state_dict() returns, got one without "
            f"{', '.join(map(repr, missing))}; save training.state_dict()"
        )


def _open_counts(counts: Any, parts: int, layers: int) -> list[int]:
    """Return the number of layers of each part in a saved state.

    Raises ``ValueError`` unless there are ``parts`` counts that add up to ``layers``.
    """
    fits = isinstance(counts, list) and all(type(count) is int and count > 0 for count in counts)
    if not fits or len(counts) != parts or sum(counts) != layers:
        raise ValueError(
            f"training: state['parts'] must be {parts} layer counts that add up to {layers}, "
            f"got {short(counts)}; create the pipe with the saved parts"
        )
    return list(counts)


def _check_cut(counts: Any, parts: Sequence[Part]) -> None:
    """Raise ``ValueError`` unless the state has the same cut as these parts."""
    if counts != (own := layer_counts(parts)):
        remedy = f"create the pipe with parts={counts}" if counts else "save it after the first step"
        raise ValueError(
            f"training: state['parts'] must be {own}, the layer counts of this pipe, "
            f"got {short(counts)}; {remedy}"
        )


def _check_module(state: Any, module: nn.Module) -> None:
    """Raise ``ValueError`` unless the module's state has the keys and shapes of ``module``."""
    own = module.state_dict()
    if not isinstance(state, Mapping):
        raise ValueError(f"training: state['module'] must be a dictionary, got {short(state)}")
    missing, unknown = [key for key in own if key not in state], [key for key in state if key not in own]
    if missing or unknown:
        got = [f"none of {_names(missing)}"] * bool(missing) + [f"also {_names(unknown)}"] * bool(unknown)
        raise ValueError(
            f"training: state['module'] must have the keys of this module, got {' and '.join(got)}; "
            "load the state of the same model"
        )
    for key, value in own.items():
        shapes = tuple(getattr(value, "shape", ())), tuple(getattr(state[key], "shape", ()))
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"training: state['module'][{key!r}] must have the shape {shapes[0]}, got {shapes[1]}; "
                "load the state of the same model"
            )


def _names(keys: Sequence[Any]) -> str:
    others = len(keys) - _NAMED
    return ", ".join(map(repr, keys[:_NAMED])) + (f" and {others} more" if others > 0 else "")


def _check_optimizers(state: Mapping[str, Any], parts: Sequence[Part], create: Optimizers | None) -> None:
    """Raise ``ValueError`` unless the optimizers' state fits the optimizers of the parts."""
    name = optimizer_name(parts, create)
    if state["optimizer"] != name:
        raise ValueError(
            f"training: state['optimizer'] must be {name} to match optimizer=, "
            f"got {state['optimizer']}; pass the saved optimizer class"
        )
    entries = state["optimizers"]
    if not isinstance(entries, list) or len(entries) != len(parts):
        raise ValueError(
            f"training: state['optimizers'] must be a list with one entry for each of {len(parts)} parts, "
            f"got {short(entries)}; load the dictionary that state_dict() returned"
        )
    for number, (part, entry) in enumerate(zip(parts, entries, strict=True)):
        made = optimizer_of(part, create)
        try:
            if (made is None) != (entry is None):
                raise ValueError(f"expected {'no state' if made is None else 'a state'}")
            if made is not None:
                made.load_state_dict(entry)
        except Exception as error:
            raise ValueError(
                f"training: state['optimizers'][{number}] must fit the optimizer of {part}, "
                f"got {type(error).__name__}: {error}; load the state of a run with the same optimizer"
            ) from None
