"""Convert a remote tensor to local forms: text, numbers, copies, pickles and NumPy arrays."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch


def register_loading() -> None:
    """Make ``torch.load`` keep local tensors on the CPU if ``map_location`` is a node.

    Tensors that were saved from a node go to ``map_location``. torch would move a local tensor through its
    storage. However, the storage of a remote tensor has no memory in this process.
    """

    def kept(storage: Any, location: str) -> Any:
        return storage if location.partition(":")[0] == "remote" else None

    before_torchs = 9
    torch.serialization.register_package(before_torchs, lambda storage: None, kept)


class LocalForms:
    """Methods of a remote tensor that torch does not dispatch. :class:`RemoteTensor` inherits them."""

    __slots__ = ()

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        text: str = LocalForms._text(self)
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def _text(self: Any) -> str:
        """Wait for the values, and format them as torch formats tensors on other devices."""
        self._m.client.before_wait("repr()")
        text = repr(self.detach().cpu())[:-1] + f", device='{self.device}'"
        if self.grad_fn is not None:
            return text + f", grad_fn=<{type(self.grad_fn).__name__}>)"
        return text + (", requires_grad=True)" if self.requires_grad else ")")

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self: Any) -> Any:
        """Wait for the values, and return them as a list.

        Returns:
            The values as nested lists of Python numbers.
        """
        self._m.client.before_wait("tolist()")
        return self.detach().cpu().tolist()

    def numpy(self: Any, *, force: bool = False) -> Any:
        """Return an array with the values if ``force`` is true.

        Args:
            force: True to wait for the values (default: False).

        Raises:
            TypeError: ``force`` is false. torch raises the same error for CUDA tensors.
        """
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(f"numpy(): the tensor must be on the CPU, got {self.device}; copy it with .cpu()")

    def __array__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy: Only Tensors created explicitly by the user (graph leaves) can be copied, got the "
                "result of an operation; copy it with .detach().clone()"
            )
        if id(self) in memo:
            return memo[id(self)]
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle the values and the device with functions that ``torch.load`` allows."""
        values = self.detach()
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (values, self.requires_grad, OrderedDict())
        parts = values.cpu(), self.dtype, str(self.device), self.requires_grad
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, parts
