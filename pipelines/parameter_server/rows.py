"""Update and read rows of a tensor, selected by ID along the first dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.push_rules import Rule, apply
from flowchan.pipelines.parameter_server.tensor_kinds import as_tensor, dtype_name, is_tensor
from flowchan.public import public


@public
@dataclass(frozen=True)
class RowOptimizer:
    """Optimizer for the rows of a table, such as an embedding table.

    The server stores each row's optimizer state. A push changes only the pushed rows and their state. The
    results are bit-for-bit equal to the torch optimizer's results with sparse gradients. Create a
    ``RowOptimizer`` with one of its class methods.

    Args:
        name: Name of a class in ``torch.optim``.
        options: Keyword arguments for this class.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import ParameterServer, RowOptimizer
        >>> rows = {"users": RowOptimizer.sgd(lr=0.5)}
        >>> with ParameterServer({"users": torch.ones(3, 2)}, rows=rows, on="thread") as server:
        ...     client = server.client()
        ...     push = client.push_rows("users", [1], torch.ones(1, 2), rule="gradient")
        ...     version = push.wait()
        ...     client.pull_rows("users", [0, 1])
        tensor([[1.0000, 1.0000],
                [0.5000, 0.5000]])
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def sgd(cls, lr: float) -> RowOptimizer:
        """Return an optimizer that subtracts ``lr`` times the gradient (``torch.optim.SGD``).

        Args:
            lr: Learning rate.

        Returns:
            The optimizer.
        """
        return cls("SGD", (("lr", lr),))

    @classmethod
    def adagrad(cls, lr: float = 0.01, *, eps: float = 1e-10) -> RowOptimizer:
        """Return an optimizer that divides gradients by the root of the sum of all earlier squares.

        The optimizer is ``torch.optim.Adagrad``.

        Args:
            lr: Learning rate (default 0.01).
            eps: Number added to the divisor (default 1e-10).

        Returns:
            The optimizer.

        Example:
            >>> from flowchan.pipelines import RowOptimizer
            >>> RowOptimizer.adagrad(lr=0.1)
            RowOptimizer(name='Adagrad', options=(('lr', 0.1), ('eps', 1e-10)))
        """
        return cls("Adagrad", (("lr", lr), ("eps", eps)))

    @classmethod
    def adam(
        cls, lr: float = 0.001, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> RowOptimizer:
        """Return an optimizer that averages gradients and their squares (``torch.optim.SparseAdam``).

        The bias correction counts the pushes to the table, not the pushes to each row.

        Args:
            lr: Learning rate (default 0.001).
            betas: Decay rates of the two averages (default 0.9 and 0.999).
            eps: Number added to the divisor (default 1e-8).

        Returns:
            The optimizer.

        Example:
            >>> from flowchan.pipelines import RowOptimizer
            >>> RowOptimizer.adam(eps=0.1)
            RowOptimizer(name='SparseAdam', options=(('lr', 0.001), ('betas', (0.9, 0.999)), ('eps', 0.1)))
        """
        return cls("SparseAdam", (("lr", lr), ("betas", betas), ("eps", eps)))

    def __call__(self, params: Any) -> Any:
        """Create the torch optimizer for these parameters.

        Args:
            params: The parameters.

        Returns:
            The optimizer.
        """
        import torch

        return getattr(torch.optim, self.name)(params, **dict(self.options))


def checked_ids(call: str, table: str, ids: Any, rows: int) -> Any:
    """Check row IDs in the client.

    Args:
        call: Name of the call, for error messages.
        table: Name of the table.
        ids: List, array or tensor of integers.
        rows: Number of rows in the table.

    Returns:
        The IDs as a one-dimensional ``int64`` array.

    Raises:
        TypeError: The IDs are not integers.
        ValueError: The IDs have more than one dimension.
        IndexError: At least one of the IDs has no row in the table.
    """
    import numpy as np

    found = np.asarray(ids.detach().cpu() if is_tensor(ids) else ids)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{call}: ids must be integers, got {dtype_name(found.dtype)}")
    if found.ndim != 1:
        raise ValueError(f"{call}: ids must have one dimension, got {found.ndim}")
    if found.min() < 0 or found.max() >= rows:
        wrong = found.min() if found.min() < 0 else found.max()
        raise IndexError(f"{call}: ids must be between 0 and {rows - 1} for {table!r}, got {wrong}")
    return found.astype(np.int64)


def summed(ids: Any, values: Any) -> tuple[Any, Any]:
    """Sum the values of equal IDs, in the order of the values.

    Args:
        ids: One-dimensional ``int64`` array.
        values: Array or tensor with one row per ID.

    Returns:
        The unique IDs in ascending order, and one row for each ID.
    """
    import numpy as np

    unique, places = np.unique(ids, return_inverse=True)
    if len(unique) == len(ids) and bool((unique == ids).all()):
        return ids, values
    if is_tensor(values):
        import torch

        # Sum in the same way as torch's optimizers, so that the sums are bit-for-bit equal.
        size = int(unique[-1]) + 1, *values.shape[1:]
        sparse = torch.sparse_coo_tensor(torch.from_numpy(ids)[None], values, size, check_invariants=False)
        return unique, sparse.coalesce().values()
    total = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(total, places, values)
    return unique, total


def apply_to_rows(rule: Rule, ids: Any, given: Any, scale: float, out: Any) -> None:
    """Apply a rule to some rows of a table in the shadow block, in place.

    Args:
        rule: ``"zero"``, ``"copy"``, ``"add"`` or a function.
        ids: Unique IDs.
        given: One row per ID.
        scale: Factor that multiplies the pushed rows.
        out: The table.
    """
    index = as_tensor(ids) if is_tensor(out) else ids
    rows = out[index]
    apply(rule, rows, given, scale, rows)
    out[index] = rows


def read_rows(table: Any, ids: Any) -> Any:
    """Return a copy of some rows of a table."""
    return table[as_tensor(ids) if is_tensor(table) else ids]


def sparse_gradient(ids: Any, given: Any, scale: float, table: Any) -> Any:
    """Return a table's gradient as a sparse torch tensor."""
    import torch

    values = as_tensor(given)
    values = values if scale == 1 else values * scale
    return torch.sparse_coo_tensor(
        as_tensor(ids)[None], values, tuple(table.shape), is_coalesced=True, check_invariants=False
    )


def check_row_optimizer(table: Any, name: str, optimizer: Any) -> None:
    """Raise an error unless the optimizer is a ``RowOptimizer`` and the table has rows."""
    if not isinstance(optimizer, RowOptimizer):
        raise TypeError(f"ParameterServer: rows[{name!r}] must be a RowOptimizer, got {shown(optimizer)}")
    if len(table.shape) < 1:
        raise ValueError(f"ParameterServer: rows[{name!r}] must name a tensor with rows, got shape ()")
