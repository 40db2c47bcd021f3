"""Compress the gradients that members exchange.

Each buffer has its own code object, which may store elements that it has not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flowchan.collective.group import Group
from flowchan.collective.operations import ALLREDUCE
from flowchan.items.arguments import whole
from flowchan.items.text import shown


class Code(Protocol):
    """Interface of a user-defined code, which compresses gradients.

    Encoded values are pickled and may differ in size.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import Gradients
        >>> class Signs:
        ...     def encode(self, x):
        ...         return x.sign().to(torch.int8)
        ...     def decode(self, values, out):
        ...         out.copy_(torch.stack(values).float().mean(0))
        >>> module = nn.Linear(2, 1)
        >>> with group() as g:
        ...     gradients = Gradients(module, g, compress=Signs)
        ...     module(torch.ones(4, 2)).mean().backward()
        ...     gradients.wait()
        >>> module.weight.grad
        tensor([[1., 1.]])
    """

    def encode(self, x: Tensor) -> Any:
        """Encode a one-dimensional tensor for the other members.

        Args:
            x: The tensor.

        Returns:
            Any value that can be pickled.
        """

    def decode(self, values: list[Any], out: Tensor) -> None:
        """Write the mean of all members' encoded values into ``out``.

        Args:
            values: Encoded values in rank order.
            out: Tensor to fill.
        """


class TopK:
    """Code that sends only the elements of a gradient with the largest absolute values.

    Elements that are not sent are added to the next gradient (error feedback). Such elements are therefore
    sent later rather than lost.

    Args:
        fraction: Fraction of elements to send, above 0 and at most 1 (default 0.01); at least one element is
            sent.

    Raises:
        ValueError: ``fraction`` is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import Gradients, TopK
        >>> module = nn.Linear(2, 1)
        >>> with group() as g:
        ...     gradients = Gradients(module, g, compress=lambda: TopK(0.5))
        ...     module(torch.tensor([[1.0, 2.0]])).mean().backward()
        ...     gradients.wait()
        >>> module.weight.grad, module.bias.grad
        (tensor([[0., 2.]]), tensor([0.]))
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"TopK: fraction must be above 0 and at most 1, got {fraction!r}")
        self._fraction = fraction
        self._residual: Tensor | None = None

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Add the elements that earlier calls left unsent to a tensor, and encode the sum's largest elements.

        Args:
            x: One-dimensional tensor.

        Returns:
            Indices and values of the sent elements.

        Example:
            >>> import torch
            >>> from flowchan.collective.training.gradients import TopK
            >>> code = TopK(0.5)
            >>> code.encode(torch.tensor([1.0, -3.0]))
            (tensor([1]), tensor([-3.]))
            >>> code.encode(torch.tensor([1.0, 1.0]))  # adds the 1.0 that was left out
            (tensor([0]), tensor([2.]))
        """
        total = x.clone() if self._residual is None else x + self._residual
        chosen = total.abs().topk(min(total.numel(), max(1, int(self._fraction * total.numel())))).indices
        values = total[chosen]
        total[chosen] = 0
        self._residual = total
        return chosen, values

    def decode(self, values: list[tuple[Tensor, Tensor]], out: Tensor) -> None:
        """Write the mean of all members' encoded values into ``out``.

        Args:
            values: Encoded values in rank order.
            out: Tensor to fill.

        Example:
            >>> import torch
            >>> from flowchan.collective.training.gradients import TopK
            >>> code, out = TopK(0.5), torch.empty(2)
            >>> code.decode([code.encode(torch.tensor([1.0, -3.0]))], out)
            >>> out
            tensor([ 0., -3.])
        """
        out.zero_()
        for chosen, found in values:
            out.index_add_(0, chosen, found)
        out.div_(len(values))


class QSGD:
    """Code that rounds each element randomly to a multiple of the tensor's norm divided by ``levels``.

    The expected value of a rounded element is the element itself, so the code is unbiased. Each element takes
    one byte. Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017.

    Args:
        levels: Number of positive levels, from 1 to 127 (default 127).

    Raises:
        ValueError: ``levels`` is out of range.

    Example:
        >>> import torch
        >>> from flowchan.collective.training.gradients import QSGD
        >>> code, out = QSGD(1), torch.empty(2)
        >>> code.decode([code.encode(torch.tensor([0.0, -3.0]))], out)
        >>> out
        tensor([ 0., -3.])
    """

    def __init__(self, levels: int = 127) -> None:
        self._levels = whole("QSGD", "levels", levels, 1, 127)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a tensor.

        Args:
            x: One-dimensional tensor of real numbers.

        Returns:
            The step between two levels, and the level of each element as ``int8``.

        Example:
            >>> import torch
            >>> from flowchan.collective.training.gradients import QSGD
            >>> QSGD(2).encode(torch.tensor([0.0, -4.0]))
            (tensor(2.), tensor([ 0, -2], dtype=torch.int8))
        """
        exact = x.float() if x.dtype in _TYPES.values() else x
        unit = torch.linalg.vector_norm(exact) / self._levels
        if not unit:
            return unit, torch.zeros_like(x, dtype=torch.int8)
        size = (exact.abs() / unit).clamp_(max=self._levels)
        lower = size.floor()
        level = lower + (torch.rand_like(size) < size - lower)
        return unit, (level * exact.sign()).to(torch.int8)

    def decode(self, values: list[tuple[Tensor, Tensor]], out: Tensor) -> None:
        """Write the mean of all members' encoded values into ``out``.

        Args:
            values: Encoded values in rank order.
            out: Tensor to fill.

        Example:
            >>> import torch
            >>> from flowchan.collective.training.gradients import QSGD
            >>> out = torch.empty(1)
            >>> QSGD().decode([(torch.tensor(0.5), torch.tensor([4], dtype=torch.int8))], out)
            >>> out
            tensor([2.])
        """
        out.zero_()
        for unit, levels in values:
            out.add_((levels.to(unit.dtype) * unit).to(out.dtype))
        out.div_(len(values))


class HalfPrecision:
    """Code that rounds values to a 16-bit type and averages them in the output's type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: Tensor) -> Tensor:
        """Round a real tensor to the 16-bit type."""
        if x.dtype.is_complex:
            raise ValueError(f"code must be None for complex tensors, got {self._dtype}")
        return x.to(self._dtype)

    def decode(self, values: list[Tensor], out: Tensor) -> None:
        """Write the mean of the rounded tensors into ``out``."""
        out.copy_(torch.stack(values).to(out.dtype).mean(0))


Combine = Callable[[Group, Tensor], Any]
"""Replaces a tensor with its mean or sum over all members."""

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CODES: dict[str, Callable[[], Code]] = {"topk": TopK, "qsgd": QSGD}


def _found(codes: Any, must_be: str) -> Callable[[], Code]:
    """Return the factory of a code, given the factory or the code's name."""
    made = _CODES.get(codes) if isinstance(codes, str) else codes
    if not callable(made):
        raise ValueError(f"{must_be.format(', '.join(map(repr, [*_TYPES, *_CODES])))}, got {shown(codes)}")
    return made


def code_maker(codes: Any) -> Callable[[], Code]:
    """Return the factory of a code, as ``_found`` does, but also accept ``"fp16"`` and ``"bf16"``."""
    if isinstance(codes, str) and codes in _TYPES:
        return lambda: HalfPrecision(_TYPES[codes])
    return _found(codes, "push: codes must be {}, a Code or a function that returns one")


def combine_by(op: str, compress: str | Callable[[], Code] | None, dtype: torch.dtype) -> Combine:
    """Return the function that averages or sums a buffer with elements of this type.

    A code yields a mean. For a sum, the mean is multiplied by the number of members. A direct sum of ``fp16``
    values might exceed their range.
    """
    if compress is None:
        return lambda group, x: group._reduced(ALLREDUCE, x, op, None, -1, None)
    average = _mean_by(compress, dtype)
    if op == "mean":
        return average

    def add_up(group: Group, x: Tensor) -> Tensor:
        average(group, x)
        return x.mul_(group.size)

    return add_up


def _mean_by(compress: str | Callable[[], Code], dtype: torch.dtype) -> Combine:
    """Return the function that averages a buffer with elements of this type.

    The function may run in the member's background thread, while the operations of other members wait for it.
    """
    if isinstance(compress, str) and compress in _TYPES:
        if dtype.is_complex:
            raise ValueError(
                f"compress must be None for complex parameters, got {compress!r} for a {dtype} parameter"
            )
        return lambda group, x: _rounded(group, x, _TYPES[compress])
    code = _found(compress, "compress must be None, {} or a function that returns a Code")()
    return lambda group, x: code.decode(group._values(code.encode(x), None), x)


def _rounded(group: Group, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Average half-precision values in float32, and round only the result."""
    return x.copy_(group._reduced(ALLREDUCE, x.to(dtype), "mean", None, -1, None))
