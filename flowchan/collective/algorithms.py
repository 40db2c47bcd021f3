"""Choose the algorithm of each operation, unless the user has selected one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowchan import _core
from flowchan.collective import array_access
from flowchan.collective.operations import COMBINING, MOVING, NAMES, REDUCE_SCATTER, TELL
from flowchan.items.tracebacks import ends_at_caller

BACKENDS = ("gloo", "mpi", "nccl")
"""Backends of torch.distributed."""
BY_DEVICE = {"cuda": "nccl"}
"""Backend for the tensors of each device type."""
COMBINED = (*COMBINING, NAMES[REDUCE_SCATTER])


def algorithms_of(operation: str) -> tuple[str, ...]:
    """Return the algorithm names that ``set_algorithm`` accepts for this operation."""
    if operation in COMBINING:
        return ("exchange", "slices", *BACKENDS)
    if operation in MOVING:
        return ("chunks", "direct", *BACKENDS)
    return ("chunks", *BACKENDS) if operation == NAMES[REDUCE_SCATTER] else ()


class AlgorithmChoice:
    """Base class of groups, with the methods that choose algorithms."""

    if TYPE_CHECKING:

        @property
        def size(self) -> int: ...
        def _queue(self, change: int) -> None: ...
        def _explain(self, operation: str, x: Any) -> str: ...
        def _set_algorithm(self, doing: int, name: str | None) -> None: ...

    def _begin_algorithms(self) -> None:
        self._chosen_backends: dict[int, str] = {}
        self._backends: dict[str, Any] = {}

    @ends_at_caller
    def explain(self, operation: str, x: Any = None) -> str:
        """Describe in one sentence how an operation works.

        Args:
            operation: Name of an operation, such as ``"allreduce"``.
            x: Value that would be passed to the operation (default None).

        Returns:
            The sentence. If the operation does not accept ``x``, the sentence says why.

        Raises:
            ValueError: The group has no such operation.

        Example:
            >>> import numpy
            >>> from flowchan.collective import members
            >>> (g,) = members(1)
            >>> type(g.explain("allreduce", numpy.zeros(100_000))).__name__
            'str'
        """
        try:
            array_access.is_dense(x)
            backend = (
                self._backend_for(number_of("explain", operation), x) if array_access.is_array(x) else None
            )
            if backend is None:
                if operation in COMBINED and array_access.is_array(x) and array_access.is_here(x):
                    check_combined(x)
                return self._explain(operation, x)
        except TypeError as error:
            return f"{operation}: not possible: {error}"
        return f"{operation}: torch.distributed's {backend}, among all {self.size} members"

    @ends_at_caller
    def set_algorithm(self, operation: str, name: str | None) -> None:
        """Select an operation's algorithm for arrays of any size. All members must make this call.

        Args:
            operation: ``"allreduce"``, ``"reduce"``, ``"reduce_scatter"``, ``"broadcast"``, ``"allgather"``,
                ``"gather"`` or ``"alltoall"``.
            name: The algorithm; None selects the fastest one. ``allreduce`` and ``reduce`` accept
                ``"exchange"`` and ``"slices"``. The other operations accept ``"chunks"``. All of these except
                ``reduce_scatter`` also accept ``"direct"`` if members can read each other's memory. All
                operations also accept torch's ``"gloo"``, ``"mpi"`` and ``"nccl"``.

        Raises:
            ValueError: The operation has no such algorithm, or the backend is not available.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     g.set_algorithm("broadcast", "direct")
            ...     return g.broadcast(g.rank)
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [0, 0]
        """
        doing, known = number_of("set_algorithm", operation), algorithms_of(operation)
        if name is not None and name not in known:
            names = f"None or one of {', '.join(map(repr, known))}" if known else "None"
            raise ValueError(f"set_algorithm: name must be {names} for {operation}, got {name!r}")
        backend = name if name in BACKENDS else None
        if backend is not None:
            check_backend(backend)
        self._set_algorithm(doing, None if backend is not None else name)
        before = bool(self._chosen_backends)
        if backend is None:
            self._chosen_backends.pop(doing, None)
        else:
            self._chosen_backends[doing] = backend
        # Count a selected backend as an unfinished operation: the core then passes all calls to Python.
        self._queue(bool(self._chosen_backends) - before)

    def _backend_for(self, doing: int, x: Any) -> str | None:
        """Return the torch backend for the operation, or None.

        Unless the user selected another backend, a tensor on a device uses that device's backend.
        """
        chosen = self._chosen_backends.get(doing)
        if chosen is None and not array_access.is_here(x):
            return BY_DEVICE.get(x.device.type)
        return chosen

    def _by(self, doing: int, x: Any) -> Any:
        """Return the object that runs the operation: either this group or a torch backend."""
        name = self._backend_for(doing, x)
        if name is None:
            return self
        if name == "nccl" and array_access.is_here(x):
            raise TypeError(
                f"{NAMES[doing]} with nccl: x must be a CUDA tensor, got {array_access.described(x)}; move "
                "x to a GPU, or set another algorithm"
            )
        if name not in self._backends:
            check_backend(name)
            from flowchan.collective.torch_algorithms import TorchAlgorithm

            self._backends[name] = TorchAlgorithm(name, self)
        return self._backends[name]

    def _close_backends(self) -> None:
        for backend in self._backends.values():
            backend.close()


def wrong_device_message(call: str, x: Any) -> str:
    """Return the error message for a tensor that is neither in main memory nor on a CUDA device."""
    remedy = (
        "a meta tensor has no contents" if x.device.type == "meta" else "copy it, for example with .cpu()"
    )
    return f"{call}: x must be in main memory or on a CUDA device, got {array_access.described(x)}; {remedy}"


def check_combined(x: Any) -> None:
    """Raise ``TypeError`` if elements of this type cannot be reduced."""
    one = array_access.contiguous(x[(*[slice(1)] * x.ndim, ...)])
    try:
        _core._combine(one, [], "min")
    except TypeError:  # min is not defined for complex numbers, for example, but sum is
        _core._combine(one, [], "sum")


def number_of(call: str, operation: str) -> int:
    """Return the index of a public operation in :data:`NAMES`."""
    known = [name for number, name in enumerate(NAMES) if number not in (0, TELL)]
    if operation not in known:
        raise ValueError(f"{call}: operation must be one of {', '.join(map(repr, known))}, got {operation!r}")
    return NAMES.index(operation)


def check_backend(name: str) -> None:
    """Raise ``ValueError`` with a remedy if the backend is not available."""
    try:
        from flowchan.collective.torch_algorithms import check
    except ImportError as error:
        raise ValueError(
            f"set_algorithm: {name!r} needs torch.distributed, which cannot be imported ({error}); "
            "install torch, or set another algorithm"
        ) from error
    check(name)
