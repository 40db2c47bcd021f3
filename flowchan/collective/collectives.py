"""Define a group's collective operations on arrays, tensors, scalars and other Python objects.

The operations use a few primitives for bytes and contiguous arrays. Groups in shared memory (``one_host.py``)
and groups across hosts (``many_hosts.py``) implement these primitives differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flowchan.collective.call_arguments import parts_argument
from flowchan.collective.group_steps import GroupSteps, Op
from flowchan.collective.operations import REDUCE, SCATTER
from flowchan.collective.value_bytes import dumps, loads


class Collectives(GroupSteps):
    """Collective operations of :class:`Group`.

    The native core overrides the operations that it can run faster.
    """

    def allreduce(
        self, x: Any, op: Op = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine the values of all members element by element, in rank order.

        All members get bit-identical results.

        Args:
            x: Array or tensor, which is overwritten with the result, or any other value, which is combined
                with Python's operators.
            op: ``"sum"`` (default), ``"mean"``, ``"prod"``, ``"min"``, ``"max"``, ``"and"``, ``"or"`` or
                ``"xor"``. For values other than arrays, it may also be a function of two values, which rank 0
                runs for all members.
            out: Array for the result, with the element type and size of ``x``; ``x`` then stays unchanged.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            ``out`` if given, otherwise ``x`` if it is an array or tensor, otherwise the combined value.

        Raises:
            TypeError: The operation is not defined for elements of this type.
            ValueError: ``out`` does not fit.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import numpy
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     gradient = numpy.array([1.0, 2.0]) * g.rank
            ...     return g.allreduce(gradient, "mean").tolist()
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [[0.5, 1.0], [0.5, 1.0]]
        """
        return self._allreduce(x, op, out, timeout, wait)

    def broadcast(self, x: Any = None, root: int = 0, timeout: float | None = None, wait: bool = True) -> Any:
        """Copy a value from ``root`` to all members.

        Args:
            x: Array or tensor of the same type and shape on all members, or any other value on ``root``. On
                members other than ``root``, the array is overwritten.
            root: Rank of the member that sends its value (default 0).
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            ``x`` if it is an array or tensor, otherwise the value from ``root``.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.broadcast("go" if g.rank == 0 else None), members(2)))
            ['go', 'go']
        """
        return self._broadcast(x, root, timeout, wait)

    def barrier(self, timeout: float | None = None, wait: bool = True) -> Any:
        """Wait until all members have called ``barrier``.

        Args:
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            None, or a :class:`Handle` with ``wait=False``.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.barrier(timeout=60), members(2)))
            [None, None]
        """
        return self._barrier(timeout, wait)

    def allgather(self, x: Any, out: Any = None, timeout: float | None = None, wait: bool = True) -> Any:
        """Gather one value from each member on all members.

        Args:
            x: Any value. The shapes of arrays and tensors may differ between members. With ``out``, ``x``
                must be an array or tensor with the element type of ``out``.
            out: Where to put the result: one array with ``size`` times the elements of ``x``, or a list of
                one array per member.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            ``out`` if given, otherwise the list of values in rank order.

        Raises:
            ValueError: A member's array does not fit into its part of ``out``.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.allgather(f"rank {g.rank}"), members(2)))
            [['rank 0', 'rank 1'], ['rank 0', 'rank 1']]
        """
        return self._allgather(x, out, timeout, wait)

    def alltoall(
        self,
        xs: Sequence[Any],
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Send one value to each member and receive one value from each.

        Args:
            xs: Values to send; ``xs[i]`` goes to rank i.
            out: Arrays to receive into, one per member. All of ``xs`` must then be arrays of the same element
                type.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            The list of received values in rank order.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     return g.alltoall([f"{g.rank} to {rank}" for rank in range(2)])
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [['0 to 0', '1 to 0'], ['0 to 1', '1 to 1']]
        """
        return self._alltoall_any(xs, out, timeout, wait)

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine the arrays of all members, and return this member's part of the result.

        Args:
            x: Array or tensor, whose first dimension is divided into ``size`` equal parts. Rank i gets part i
                of the result.
            op: Name of the operation, as in :meth:`allreduce`.
            out: Array for this member's part (default: a new one).
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            This member's part of the result.

        Raises:
            ValueError: ``x`` cannot be divided into ``size`` equal parts, or ``out`` does not fit.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import numpy
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.reduce_scatter(numpy.array([1, 2])).tolist(), members(2)))
            [[2], [4]]
        """
        return self._reduce_scatter_any(x, op, out, timeout, wait)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Op = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Combine the values of all members like ``allreduce``, but return the result only on ``root``.

        Args:
            x: Value, as in :meth:`allreduce`. An array is overwritten only on ``root``.
            root: Rank of the member that gets the result (default 0).
            op: Operation, as in :meth:`allreduce`.
            out: Array for the result on ``root``.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            The result on ``root``, and None on the other members.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.reduce(g.rank + 1, root=1), members(2)))
            [None, 3]
        """
        self._check_root("reduce", root)

        def do(remaining: float | None) -> Any:
            result = self._reduced(REDUCE, x, op, out, root, remaining)
            return result if self.rank == root else None

        return self._do(do, timeout, wait, x)

    def gather(self, x: Any, root: int = 0, *, timeout: float | None = None, wait: bool = True) -> Any:
        """Gather one value from each member on ``root``.

        Args:
            x: Any value. The shapes of arrays and tensors may differ between members.
            root: Rank of the member that gets the list (default 0).
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            On ``root``, the list of values in rank order; None on the other members.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.gather(g.rank), members(2)))
            [[0, 1], None]
        """
        self._check_root("gather", root)
        return self._do(lambda remaining: self._gather(x, root, remaining), timeout, wait, x)

    def scatter(
        self, xs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Send one value from ``root`` to each member.

        Args:
            xs: On ``root``, one value for each member; ``xs[i]`` goes to rank i. None on the other members.
            root: Rank of the sender (default 0).
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            The value for this member.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.scatter(["a", "b"] if g.rank == 0 else None), members(2)))
            ['a', 'b']
        """
        self._check_root("scatter", root)
        parts = [b""] * self.size
        if self.rank == root:
            parts = [dumps(x) for x in parts_argument("scatter", "xs", xs, self.size)]
        return self._do(
            lambda remaining: loads(self._swap(SCATTER, parts, remaining, root)[root]), timeout, wait
        )

    # --- collectives for members that may run out of values ---

    def allreduce_with(
        self,
        value: Any,
        fn: Callable[[Any, Any], Any],
        *,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Combine the values of all members that still contribute, using a function of two values.

        The function is applied to each leaf of nested dictionaries, lists and tuples, in rank order. Rank 0
        runs the function for all members; if the function raises, all members raise. If ``fn`` is ``min`` or
        ``max``, or ``add``, ``mul``, ``and_``, ``or_`` or ``xor`` from ``operator``, each member runs the
        function itself, which saves a step.

        Args:
            value: Value of this member.
            fn: Function of two values, which may modify its first argument.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once.

        Returns:
            The result, and the number of members that contributed.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import operator
            >>> from flowchan.collective import members
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(lambda g: g.allreduce_with({"w": g.rank + 1}, operator.add), members(2)))
            [({'w': 3}, 2), ({'w': 3}, 2)]
        """
        return self._allreduce_with((True, value), fn, timeout, wait)

    def join(
        self, fn: Callable[[Any, Any], Any], *, timeout: float | None = None
    ) -> Iterator[tuple[Any, int]]:
        """Take part in ``allreduce_with`` without a value, until no member contributes a value any more.

        Args:
            fn: Function that the other members pass to :meth:`allreduce_with`.
            timeout: Seconds for each round; None means no limit.

        Yields:
            For each round, the result and the number of members that contributed.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import operator
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     rounds = [g.allreduce_with(1, operator.add) for _ in range(g.rank + 1)]
            ...     return rounds + list(g.join(operator.add))  # rank 0 has fewer rounds
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [[(2, 2), (1, 1)], [(2, 2), (1, 1)]]
        """
        while (found := self._allreduce_with((False, None), fn, timeout))[1]:
            yield found
