"""Encode tensors: clients compress them before a push, and the server decodes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.tensor_kinds import as_tensor
from flowchan.public import public

Codes = Any
"""``"fp16"``, ``"bf16"``, ``"topk"``, ``"qsgd"``, a function that creates a ``Code``, or a ``Code``."""


class Encoded:
    """Encoded tensor of one worker, or the encodings of one tensor from several workers.

    Args:
        codes: The code of the tensor.
        values: The encoded values, one entry per worker.
        shape: Shape of the tensor.
        dtype: Element type of the tensor.
    """

    def __init__(self, codes: Codes, values: list[Any], shape: tuple[int, ...], dtype: Any) -> None:
        self._codes, self.values, self.shape, self.dtype = codes, values, shape, dtype

    @property
    def nbytes(self) -> int:
        """Return the size of the encoded values in bytes."""
        return sum(map(_size, self.values))

    def decoded(self) -> Any:
        """Decode all values at once.

        Returns:
            A new tensor with the decoded values. flowchan's own codes return the mean.
        """
        import torch

        out = torch.empty(self.shape, dtype=self.dtype)
        _made(self._codes).decode(self.values, out.view(-1))
        return out

    def joined(self, others: Iterable[Encoded]) -> Encoded:
        """Combine these encodings with the encodings of other workers."""
        values = [value for one in (self, *others) for value in one.values]
        return Encoded(self._codes, values, self.shape, self.dtype)


class Encoder:
    """Code objects of one client, one per tensor.

    The objects may store elements that have not been sent yet.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Codes, Any]] = {}

    def encode(self, values: Mapping[str, Any], codes: Codes) -> dict[str, Encoded]:
        """Encode each tensor with its code object.

        The encoder keeps its code objects while ``codes`` is the same object.

        Args:
            values: The tensors by name.
            codes: The code.

        Returns:
            The encoded tensors by name.

        Raises:
            TypeError: ``codes`` is a function that does not return a code.
            ValueError: ``codes`` is an unknown name.
        """
        return {name: self._encoded(name, as_tensor(value).detach(), codes) for name, value in values.items()}

    @contextmanager
    def restored_on_error(self, codes: Codes) -> Iterator[None]:
        """Restore the attributes of the code objects if the block raises, because nothing was sent then.

        Args:
            codes: The code of the block.
        """
        made = dict(self._made)
        kept = [code for code in (codes, *(code for _, code in made.values())) if not isinstance(code, type)]
        attributes = [(vars(code), dict(vars(code))) for code in kept if hasattr(code, "__dict__")]
        try:
            yield
        except BaseException:
            self._made = made
            for current, stored in attributes:
                current.clear()
                current.update(stored)
            raise

    def _encoded(self, name: str, x: Any, codes: Codes) -> Encoded:
        used, code = self._made.get(name, (None, None))
        if code is None or used is not codes:
            code = _made(codes)
            self._made[name] = codes, code
        return Encoded(codes, [code.encode(x.reshape(-1))], tuple(x.shape), x.dtype)


@public
def gathered(encodings: Iterable[Mapping[str, Encoded]]) -> dict[str, Encoded]:
    """Combine the encoded tensors of several workers, so that the server decodes them in one push.

    The server applies the mean of the encoded values. For n workers, ``push(…, scale=n)`` applies the sum.

    Args:
        encodings: The encoded tensors of each worker, with the same names.

    Returns:
        Values for ``push``.

    Raises:
        ValueError: The names differ.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import ParameterServer, gathered
        >>> with ParameterServer({"w": torch.zeros(2)}, on="thread") as server:
        ...     client = server.client()
        ...     workers = [client.encode({"w": torch.full((2,), x)}, "fp16") for x in (1.0, 3.0)]
        ...     version = client.push(gathered(workers)).wait()
        ...     client.pull()
        {'w': tensor([2., 2.])}
    """
    first, *others = encodings
    if any(other.keys() != first.keys() for other in others):
        raise ValueError("gathered: encodings must have the same tensor names, got different names")
    return {name: one.joined(other[name] for other in others) for name, one in first.items()}


def _size(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    return int(getattr(value, "nbytes", 0))


def _made(codes: Codes) -> Any:
    from flowchan.collective.training.codes import code_maker

    if hasattr(codes, "encode") and not isinstance(codes, str | type):
        return codes
    made = code_maker(codes)()
    if not (hasattr(made, "encode") and hasattr(made, "decode")):
        raise TypeError(
            f"push: codes must create objects with encode(x) and decode(values, out), got {shown(made)}"
        )
    return made
