"""Recent messages to a node, kept to find the first operation that was lost if the node dies."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from flowchan.pipelines.remote_tensors.command_format import TemplateSpec, unpack_batch

RECENT = 200
"""Number of messages to keep. It exceeds the capacity of the command channel."""

Operation = tuple[int, str]
"""Number and name of an operation."""


class SentCommands:
    """Recent messages that a node may not have handled yet.

    Attributes:
        count: Number of messages sent so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._messages: collections.deque[tuple[int, bytes | Operation]] = collections.deque(maxlen=RECENT)
        self._templates: dict[int, tuple[str, int]] = {}
        self._dropped: collections.deque[tuple[int, list[int]]] = collections.deque()

    def defined(self, id: int, spec: TemplateSpec) -> None:
        """Record a template's operation, and the size of its commands."""
        self._templates[id] = spec.operation, spec.size

    def sent(self, message: bytes | Operation) -> None:
        """Record a packed batch or a single operation before it is sent."""
        self.count += 1
        self._messages.append((self.count, message))

    def withdraw(self) -> None:
        """Forget the latest message, which could not be sent."""
        self.count -= 1
        self._messages.pop()

    def answered(self, count: int) -> None:
        """Forget the first ``count`` messages, which the node has handled."""
        while self._messages and self._messages[0][0] <= count:
            self._messages.popleft()
        self._drop(count)

    def freed(self, ids: Sequence[int]) -> None:
        """Forget the templates among these ids, once the messages so far are forgotten."""
        dropped = [id for id in ids if id in self._templates]
        if dropped:
            self._dropped.append((self.count, dropped))
        self._drop(self.count - RECENT)

    def _drop(self, count: int) -> None:
        while self._dropped and self._dropped[0][0] <= count:
            for id in self._dropped.popleft()[1]:
                self._templates.pop(id, None)

    def first_lost(self, unsent: Sequence[Any], running: int | None) -> Operation | None:
        """Return the first operation that was lost with a dead node, or None.

        Args:
            unsent: Commands that were not sent.
            running: Number of the operation that the node was running, or the negative number of the last
                finished operation. None if unknown.
        """
        operations = [*self._recent(), *self._commands(unsent)]
        if running:
            numbers = [number for number, _ in operations]
            if abs(running) in numbers:
                operations = operations[numbers.index(abs(running)) + (running < 0) :]
        return operations[0] if operations else None

    def _recent(self) -> Iterator[Operation]:
        seen: set[int] = set()  # an interrupted flush sends its batch again
        for _, message in list(self._messages):
            found = self._commands(unpack_batch(message)[1]) if isinstance(message, bytes) else [message]
            for operation in found:
                if operation[0] not in seen:
                    seen.add(operation[0])
                    yield operation

    def _commands(self, commands: Sequence[Any]) -> Iterator[Operation]:
        place = 0
        while place < len(commands):
            name, size = self._templates[commands[place]]
            yield commands[place + 1], name
            place += size
