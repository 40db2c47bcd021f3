"""After each operation, compare the metadata that the client predicts with the node's metadata."""

from __future__ import annotations

from typing import Any

from support.optional_packages import optional

torch = optional("torch")


REPLACES = "aten::_has_compatible_shallow_copy_type"
"""Operation that torch calls while the client replaces a tensor's metadata. The tensor has no bits then."""


def relevant(shape: Any, stride: Any, *rest: Any) -> Any:
    """Return metadata without the strides of empty tensors and of dimensions with one element, which have no
    effect."""
    used = [step for size, step in zip(shape, stride, strict=True) if size > 1 and 0 not in shape]
    return tuple(shape), used, rest


class MetadataCheck:
    """Context that asks the node after each operation for the metadata of its arguments and results."""

    def __init__(self) -> None:
        self._differences: list[str] = []

    def __enter__(self) -> MetadataCheck:
        from flowchan.pipelines.remote_tensors import remote_tensor

        self._kind = kind = remote_tensor.RemoteTensor
        self._before = vars(kind)["__torch_dispatch__"]
        dispatch = kind.__torch_dispatch__

        def checked(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = dispatch(func, types, args, kwargs)
            if func.name() != REPLACES:
                self._compare(func.name(), [result, args, kwargs])
            return result

        kind.__torch_dispatch__ = classmethod(checked)
        return self

    def __exit__(self, *error: object) -> None:
        self._kind.__torch_dispatch__ = self._before

    def take(self) -> list[str]:
        """Return the differences found so far, and clear the list."""
        found, self._differences = self._differences, []
        return found

    def _compare(self, operation: str, value: Any) -> None:
        from flowchan.pipelines.remote_tensors.command_format import form_of

        tensors = {one._h.id: one for one in self._remote(value)}
        by_client: dict[Any, list[Any]] = {}
        for one in tensors.values():
            by_client.setdefault(one._m.client, []).append(one)
        for client, ours in by_client.items():
            for one, there in zip(ours, client.ask("metadata", [one._h.id for one in ours]), strict=True):
                here = tuple(form_of(one))
                if there is not None and relevant(*here) != relevant(*there):
                    self._differences.append(f"{operation}: {here} here, {tuple(there)} on the node")

    def _remote(self, value: Any) -> list[Any]:
        if type(value) is self._kind:
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return [one for part in value for one in self._remote(part)]
        return []
