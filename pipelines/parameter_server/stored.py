"""Save and load a server's tensors, optimizer state and version, in the safetensors format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowchan.pipelines.parameter_server.tensor_kinds import as_tensor, dtype_name, is_tensor
from flowchan.pipelines.parameter_server.tensor_layout import ONLY

_HEADER = "flowchan.ParameterServer"


@dataclass(frozen=True)
class StoredState:
    """State of a server, as it is written to a file or read from a file.

    Args:
        version: Version of the state.
        tensors: The tensors and arrays by name.
        slots: Optimizer slots by name.
        single: Whether the server holds one tensor without a name.
    """

    version: int
    tensors: dict[str, Any]
    slots: dict[str, Any]
    single: bool = False

    @property
    def given(self) -> Any:
        """Return the tensors in the form that the user passed to the server."""
        return self.tensors[ONLY] if self.single else self.tensors


def save_state(path: str | os.PathLike[str], state: StoredState) -> None:
    """Write a state to a file. If the program is killed during the call, an existing file stays intact."""
    arrays = state.tensors | state.slots
    header = {
        "version": state.version,
        "arrays": [name for name, value in arrays.items() if not is_tensor(value)],
        "slots": list(state.slots),
        "single": state.single,
    }
    library = _library("torch" if len(header["arrays"]) < len(arrays) else "numpy", "save")  # type: ignore[arg-type]
    if library.__name__.endswith("torch"):
        arrays = {name: as_tensor(value).contiguous() for name, value in arrays.items()}
    partial = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.part")
    try:
        library.save_file(arrays, partial, {_HEADER: json.dumps(header)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_state(path: str | os.PathLike[str]) -> StoredState:
    """Read a state from a file. A file from another program yields version 0 and torch tensors."""
    from_file = _library("", "load").safe_open(path, "numpy")
    with from_file as file:
        header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
        names = list(file.keys())
    arrays = set(header.get("arrays", ()))
    framework = "numpy" if arrays.issuperset(names) else "torch"
    found = _library(framework, "load").load_file(path)
    found = {name: x.numpy() if is_tensor(x) and name in arrays else x for name, x in found.items()}
    slots = {name: found.pop(name) for name in header.get("slots", ())}
    return StoredState(header.get("version", 0), found, slots, header.get("single", False))


def check_slots(stored: Mapping[str, Any], slots: Mapping[str, Any]) -> None:
    """Raise an error unless the stored slots match the slots of the given optimizers."""
    if _described(stored) != _described(slots):
        raise ValueError(
            "ParameterServer.load: optimizer and rows must be those of the saved server, got "
            f"{sorted(slots) or 'none'} instead of {sorted(stored) or 'none'}"
        )


def _described(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in slots.items()}


def _library(framework: str, call: str) -> Any:
    """Import safetensors or one of its submodules."""
    import importlib

    try:
        return importlib.import_module("safetensors" + (f".{framework}" if framework else ""))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "safetensors":
            raise
        raise ImportError(
            f"ParameterServer.{call} needs safetensors: pip install 'flowchan[safetensors]'",
            name="safetensors",
        ) from error
