"""Keep recent messages to a node, to find the first operation that was lost if the node dies."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from flowchan.pipelines.remote_tensors.command_format import TemplateSpec, unpack_batch

RECENT = 200
"""Number of messages to keep. It exceeds the capacity of the command channel."""

Operation = tuple[int, str]
"""Number and name of an operation."""
Templates = dict[int, tuple[str, int]]
"""Name of the operation and size of the command of each template."""


class SentCommands:
    """Recent messages that a node may not have handled yet.

    Several threads use this object without a lock. ``answered`` only stores a number. All changes to the
    deques therefore come from the thread that sends, which holds its client's lock. ``first_lost`` reads
    copies.

    Attributes:
        count: Number of messages sent so far.
    """

    def __init__(self) -> None:
        self.count = self._handled = 0
        self._messages: collections.deque[tuple[int, bytes | Operation]] = collections.deque(maxlen=RECENT)
        self._templates: Templates = {}
        self._dropped: collections.deque[tuple[int, list[int]]] = collections.deque()

    def defined(self, id: int, spec: TemplateSpec) -> None:
        """Record a template's operation, and the size of its commands."""
        self._templates[id] = spec.operation, spec.size

    def sent(self, message: bytes | Operation) -> None:
        """Record a packed batch or a single operation that is about to be sent."""
        self.count += 1
        self._messages.append((self.count, message))

    def withdraw(self) -> None:
        """Forget the latest message, which could not be sent."""
        self.count -= 1
        self._messages.pop()

    def answered(self, count: int) -> None:
        """Record that the node has handled the first ``count`` messages, which the next ``freed`` forgets."""
        self._handled = count

    def freed(self, ids: Sequence[int]) -> None:
        """Forget the templates among these IDs as soon as all messages sent so far are forgotten."""
        dropped = [id for id in ids if id in self._templates]
        if dropped:
            self._dropped.append((self.count, dropped))
        forgotten = max(self._handled, self.count - RECENT)
        while self._messages and self._messages[0][0] <= forgotten:
            self._messages.popleft()
        while self._dropped and self._dropped[0][0] <= forgotten:
            for id in self._dropped.popleft()[1]:
                self._templates.pop(id, None)

    def first_lost(self, unsent: Sequence[Any], running: int | None) -> Operation | None:
        """Return the first operation that was lost with a dead node, or None.

        Args:
            unsent: Commands that were not sent.
            running: Number of the operation that the node was running, or minus the number of the last
                finished operation. None if unknown.
        """
        # Copy the messages first: the copied templates then include those of all messages that the node has
        # not handled.
        messages, templates, handled = self._messages.copy(), self._templates.copy(), self._handled
        recent = [message for count, message in messages if count > handled]
        operations = [*_operations(recent, templates), *_commands(unsent, templates)]
        if running:
            numbers = [number for number, _ in operations]
            if abs(running) in numbers:
                operations = operations[numbers.index(abs(running)) + (running < 0) :]
        return operations[0] if operations else None


def _operations(messages: Sequence[bytes | Operation], templates: Templates) -> Iterator[Operation]:
    seen: set[int] = set()  # numbers seen so far, because an interrupted flush sends its batch again
    for message in messages:
        found = _commands(unpack_batch(message)[1], templates) if isinstance(message, bytes) else [message]
        for operation in found:
            if operation[0] not in seen:
                seen.add(operation[0])
                yield operation


def _commands(commands: Sequence[Any], templates: Templates) -> Iterator[Operation]:
    place = 0
    while place < len(commands):
        name, size = templates[commands[place]]
        yield commands[place + 1], name
        place += size
