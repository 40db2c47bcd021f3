"""Declare the stages that read a stream, and the operator ``sink``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack, overload

from flowchan.declare.keyed import keyed, keyed_stage
from flowchan.declare.options import KeyedOptions, KeyedSettings, KeyedSinkOptions, NameOption, shows
from flowchan.declare.shapes import AnyFunction, Effect, WithState
from flowchan.declare.stream_handle import StreamHandle, origins
from flowchan.declare.values import Stage
from flowchan.items.arguments import callable_argument, known_options
from flowchan.items.tracebacks import methods_end_at_caller

T_co = TypeVar("T_co", covariant=True)


@methods_end_at_caller
class StreamEnd(StreamHandle[T_co]):
    """Stream as the input of a stage. ``Stream`` adds the operators that have outputs."""

    __slots__ = ()

    @overload
    def sink(self, function: Effect[T_co], **options: Unpack[KeyedSinkOptions]) -> None: ...
    @overload
    def sink(self, function: WithState[T_co, object], **options: Unpack[KeyedSinkOptions]) -> None: ...
    @shows(KeyedSinkOptions, KeyedSettings)
    def sink(self, function: AnyFunction, **options: Unpack[KeyedSinkOptions]) -> None:
        """Declare a stage that calls ``function(item)`` for its side effect, and ends the stream there.

        If a worker dies, the side effect may happen twice for the item that it was processing.

        Args:
            function: Function with one parameter, whose result is ignored. An ``async def`` function, or a
                class whose instances are called, is also allowed.
            **options: Keyword options of :meth:`map`, except ``ordered`` and ``capacity``.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(["a", "b"]).sink(print)
            >>> results = graph.run()
            a
            b
        """
        callable_argument("sink", "function", function)
        self._itemwise("sink", function, (), options)

    def _itemwise(
        self,
        kind: str,
        function: Any,
        outputs: Sequence[tuple[str, Any]],
        options: KeyedOptions | KeyedSinkOptions,
    ) -> Stage:
        """Declare a stage that calls the user's function for each item, with or without keys."""
        allowed = KeyedOptions if outputs else KeyedSinkOptions
        known_options(kind, options, allowed.__annotations__)
        own = {"members": True} if outputs and self.graph._gives_lists(self._origin) else {}
        by_key, (origin,) = keyed(kind, function, options), origins(self.graph, self)
        return keyed_stage(self.graph, kind, function, origin, self.item, by_key, own, outputs)

    def _stage(
        self,
        kind: str,
        outputs: Sequence[tuple[str, Any]],
        options: NameOption,
        *,
        function: Callable[..., Any] | None = None,
        own: dict[str, Any] | None = None,
        errors: bool = False,
    ) -> Stage:
        """Declare a stage that reads this stream.

        ``own`` contains the options that only this operator has.
        """
        return self.graph._declare(
            kind, function=function, options=own, inputs=origins(self.graph, self), outputs=outputs,
            errors=errors, **options,
        )  # fmt: skip
