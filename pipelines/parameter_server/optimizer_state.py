"""Store a torch optimizer's state in a shard's block, so that state and parameters have the same version.

Each tensor of an optimizer's state has a *slot*, which is an array in the block. A further slot for each
parameter stores the rest of its state, such as a step count, as JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.tensor_kinds import as_tensor, copy, is_inexact

Factory = Callable[[Any], Any]
"""Function that creates a ``torch.optim.Optimizer`` for a list of parameters."""


class OptimizerState:
    """Optimizer whose state is stored in slots.

    The constructor runs one step on copies of the parameters, because most optimizers create their state in
    the first step.

    Args:
        factory: Function that creates the optimizer for a list of parameters.
        params: The parameters by name. Integer tensors are skipped.
        prefix: Prefix of the slot names.
        sparse: Whether gradients are sparse (default: False).

    Raises:
        TypeError: The factory does not return an optimizer, or the optimizer cannot run on a server.
    """

    def __init__(
        self, factory: Factory, params: Mapping[str, Any], prefix: str, sparse: bool = False
    ) -> None:
        self._factory, self._prefix = factory, prefix
        self.names = [name for name, value in params.items() if is_inexact(value.dtype)]
        self._optimizer: Any = None
        self._params: dict[str, Any] = {}
        self._keys: dict[str, list[str]] = {}
        self.slots: dict[str, Any] = {}
        if self.names:
            self._try({name: as_tensor(params[name]).detach().clone() for name in self.names}, sparse)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizer": None, "_params": {}, "slots": {}}

    def slots_of(self, name: str) -> list[str]:
        """Return the slot names of one parameter."""
        return [*(self._slot(name, key) for key in self._keys[name]), self._rest_slot(name)]

    def _slot(self, name: str, key: str) -> str:
        return f"{self._prefix}/{name}/{key}"

    def _rest_slot(self, name: str) -> str:
        return f"{self._prefix}/{name}.json"

    def _try(self, copies: Mapping[str, Any], sparse: bool) -> None:
        """Take a trial step with zero gradients, to find out which slots to create."""
        import numpy as np
        import torch

        self._build(copies)
        before = {
            name: {key: _cloned(value) for key, value in self._optimizer.state.get(p, {}).items()}
            for name, p in self._params.items()
        }
        for p in self._params.values():
            p.grad = _no_rows(p) if sparse else torch.zeros_like(p)
        self._take_step()
        for name, p in self._params.items():
            after = dict(self._optimizer.state.get(p, {}))
            self._keys[name] = [key for key, value in after.items() if isinstance(value, torch.Tensor)]
            for key in self._keys[name]:
                first = before[name].get(key)
                first = torch.zeros_like(after[key]).detach() if first is None else first
                self.slots[self._slot(name, key)] = first.contiguous()
            room = 2 * len(self._rest_of(after)) + 64
            self.slots[self._rest_slot(name)] = np.zeros(room, np.uint8)
            self._write_rest(name, before[name], self.slots)
        self._optimizer, self._params = None, {}

    def _build(self, tensors: Mapping[str, Any]) -> None:
        import torch

        self._params = {name: torch.nn.Parameter(value) for name, value in tensors.items()}
        self._optimizer = self._factory(list(self._params.values()))
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise TypeError(
                "ParameterServer: optimizer must return a torch.optim.Optimizer, got "
                f"{shown(self._optimizer)}"
            )

    def _take_step(self) -> None:
        import torch

        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                "ParameterServer: optimizer must work without a closure, got "
                f"{type(self._optimizer).__name__}"
            )
        # Set this option explicitly, because torch warns if its sparse optimizers leave it unset.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def step(self, block: MutableMapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """Take one step, and update the parameters and slots of a block in place.

        Args:
            block: Arrays and tensors of the block by name, including slots.
            gradients: Gradients by name. Parameters without a gradient keep their values and their state.
        """
        views = {name: as_tensor(block[name]) for name in self.names}
        if self._optimizer is None:
            self._build(views)
        state = self._optimizer.state
        state.clear()
        for name, p in self._params.items():
            p.data, p.grad = views[name], gradients.get(name)
            if name in gradients and (stored := self._read(name, block)):
                state[p] = stored
        try:
            self._take_step()
        finally:
            for p in self._params.values():
                p.grad = None
        for name in gradients:
            new = dict(state.get(self._params[name], {}))
            for key in self._keys[name]:
                out = as_tensor(block[self._slot(name, key)])
                # the optimizer replaced the tensor instead of updating it in place
                if key in new and new[key].data_ptr() != out.data_ptr():
                    copy(new[key], out)
            self._write_rest(name, new, block)

    def _read(self, name: str, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state, whose tensors are views of the block."""
        stored = json.loads(bytes(block[self._rest_slot(name)]).rstrip(b"\0"))
        tensors = {key: as_tensor(block[self._slot(name, key)]) for key in stored["tensors"]}
        return {**tensors, **stored["rest"]}

    def _rest_of(self, state: Mapping[str, Any]) -> str:
        import torch

        tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
        try:
            return json.dumps(
                {"tensors": tensors, "rest": {key: state[key] for key in state if key not in tensors}}
            )
        except TypeError as error:
            raise TypeError(
                f"ParameterServer: optimizer must keep its state in tensors and numbers, got "
                f"{type(self._optimizer).__name__} ({error})"
            ) from error

    def _write_rest(self, name: str, state: Mapping[str, Any], block: Mapping[str, Any]) -> None:
        import numpy as np

        data, out = self._rest_of(state).encode(), block[self._rest_slot(name)]
        if len(data) > len(out):
            raise TypeError(
                f"ParameterServer: optimizer must have a state of fixed size, got "
                f"{type(self._optimizer).__name__}, whose state grows"
            )
        out[: len(data)] = np.frombuffer(data, np.uint8)
        out[len(data) :] = 0


def _no_rows(p: Any) -> Any:
    """Return a sparse gradient without rows."""
    import torch

    ids, values = torch.zeros((1, 0), dtype=torch.int64), p.new_zeros((0, *p.shape[1:]))
    return torch.sparse_coo_tensor(ids, values.detach(), tuple(p.shape), check_invariants=False)


def _cloned(value: Any) -> Any:
    return value.detach().clone() if hasattr(value, "detach") else value
