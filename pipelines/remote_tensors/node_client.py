"""The client's end of a node: the command buffer, the questions and their answers."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import torch

from flowchan import Channel, ChildDied, Closed, Empty
from flowchan.pipelines.remote_tensors import flusher
from flowchan.pipelines.remote_tensors.command_format import NodeReply, TemplateSpec, pack_batch
from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError
from flowchan.pipelines.remote_tensors.remote_failures import CallSites, RemoteFailure

MAX_TEMPLATES = 20_000
"""Number of templates of one node at which the client discards all of them."""
LIMIT = 512
"""Numbers in the command buffer at which the client sends it."""
POLL_INTERVAL_S = 0.1
"""Seconds between checks whether the node is alive, while the client waits for an answer."""


class TensorHandle:
    """Entry in the table of a node. When the last reference is gone, the id is freed with the next batch."""

    __slots__ = ("_frees", "id")

    def __init__(self, id: int, frees: list[int]) -> None:
        self.id, self._frees = id, frees

    def __del__(self) -> None:
        self._frees.append(self.id)


class NodeClient:
    """Connection of this process to one node. The methods are thread-safe.

    Several threads append commands without a lock: the command number comes from an atomic counter, and one
    ``+=`` appends the whole command. ``flush`` sends the commands, and then one slice assignment removes them
    and advances the position. If a signal handler raises in between, the next batch has the same position,
    and the node skips what it has.

    Attributes:
        device: Device of the node in this process.
        number: Number of the node in its ``RemoteNodes``.
        buffer: Commands that were not sent, after the position of the first one in the client's stream.
        frees: Ids to free with the next batch.
        numbers: Counter of command numbers and ids.
        sites: Lines of the program that issued the latest commands.
        idle: True if the background thread does not watch the buffer.
        metas: Interned metadata of the node's tensors.
        misses: Number of templates that were made.
        waits: Number of questions.
    """

    def __init__(
        self, device: torch.device, number: int, commands: Channel[Any], replies: Channel[Any]
    ) -> None:
        self.device, self.number = device, number
        self.id = uuid.uuid4().hex
        self.pid = os.getpid()
        self.buffer: list[Any] = [0]
        self.frees: list[int] = []
        self.numbers = itertools.count(1)
        self.sites = CallSites()
        self.idle = True
        self.misses = self.waits = 0
        self.strict = "off"
        self.route: Any = None  # how other processes reach the node; set by handle_transfer
        self.death: Callable[[], NodeDied] | None = None
        self.closed = False
        self._commands, self._replies = commands, replies
        self.metas: dict[tuple[Any, ...], Any] = {}
        self._templates = itertools.count(1)
        self._remembered: list[tuple[dict[Any, Any], Any]] = []
        self._sending, self._asking = threading.RLock(), threading.RLock()
        self._questions = itertools.count(1)
        self._raised: set[tuple[str, int]] = set()
        self._put((self.id, "hello", replies))

    # --- commands ---

    def next_template(self) -> int:
        """Return the number of a new template."""
        return next(self._templates)

    def define(self, id: int, spec: TemplateSpec) -> None:
        """Send a template to the node, before the first command that uses it."""
        self.misses += 1
        self._put((self.id, "template", id, pickle.dumps(spec)))

    def remember(self, templates: dict[Any, Any], key: Any) -> None:
        """Record where a template is kept. Discard all templates if there are too many."""
        self._remembered.append((templates, key))
        if len(self._remembered) > MAX_TEMPLATES:
            self.forget()

    def forget(self) -> None:
        """Discard all templates of this node."""
        remembered, self._remembered = self._remembered, []
        for templates, key in remembered:
            templates.pop(key, None)

    def flush(self) -> None:
        """Send the commands of the buffer."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        # The frees first: each command that uses one of these ids is already in the buffer or was sent.
        frees = self.frees[:]
        position, *commands = self.buffer
        if not commands and not frees:
            return
        self._put((self.id, None, pack_batch(position, commands, frees)))
        self.buffer[: 1 + len(commands)] = [position + len(commands)]
        del self.frees[: len(frees)]

    def send(self, *message: Any) -> None:
        """Send the buffered commands, and then a message."""
        with self._sending:
            self._flush()
            self._put((self.id, *message))

    def _put(self, message: Any) -> None:
        self._check()
        with self._sending:
            try:
                self._commands.put(message)
            except Closed:
                self._check()
                raise

    def wake(self) -> None:
        """Let the background thread watch the buffer."""
        flusher.flusher.watch(self)

    # --- questions ---

    def before_wait(self, what: str) -> None:
        """Warn or raise before a hidden wait, if the program asked for it.

        Raises:
            RuntimeError: The mode is ``"error"``.
        """
        if self.strict == "off":
            return
        self.flush()
        text = f"{what}: waits for node {self.number}"
        if self.strict == "error":
            raise RuntimeError(f"{text}, and strict mode is 'error'; fetch the value with .cpu()")
        warnings.warn(text, stacklevel=2)

    def ask(self, what: str, *args: Any, timeout: float | None = None) -> Any:
        """Ask the node a question after all commands, and wait for the answer.

        Raises:
            RemoteError: The answer depends on a failed operation.
            NodeDied: The node has died.
            TimeoutError: The node did not answer in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._asking:
            self.waits += 1
            question = next(self._questions)
            self.send("ask", question, what, args)
            while True:
                reply = self._reply(what, until)
                if reply.question == question:
                    break  # an earlier number answers a question whose wait was interrupted
        if reply.failed:
            raise self.error_of(reply.value)
        return reply.value

    def _reply(self, what: str, until: float | None) -> NodeReply:
        while True:
            left = (
                POLL_INTERVAL_S if until is None else min(POLL_INTERVAL_S, max(0.0, until - time.monotonic()))
            )
            try:
                return NodeReply(*self._replies.get(timeout=left))
            except Empty:
                if self._commands.closed:
                    self._check()
                    raise Closed(f"{what}: node {self.number} has ended") from None
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"{what}: node {self.number} did not answer in time") from None

    def error_of(self, failure: RemoteFailure) -> RemoteError:
        """Return the exception of a failed command, with the line that issued it."""
        self._raised.add(failure.key)
        site = self.sites.line_of(failure.number) if failure.client == self.id else "another node or process"
        return failure.raised(site)

    def failures(self, timeout: float | None = None) -> list[RemoteError]:
        """Wait for all commands, and return the failures that nobody has fetched."""
        found = self.ask("sync", timeout=timeout)
        new = [one for one in (RemoteFailure(*row) for row in found) if one.key not in self._raised]
        return [self.error_of(one) for one in new]

    # --- ends ---

    def _check(self) -> None:
        """Raise an error if the node cannot run commands."""
        if self.pid != os.getpid():
            raise RuntimeError(
                f"{self.device}: remote tensors cannot be used in a fork of the process that made them; "
                "send them through a channel"
            )
        if self.death is not None:
            raise self.death()
        if self.closed:
            raise Closed(f"{self.device}: the nodes were closed")

    def died(self, death: ChildDied) -> None:
        """Record that the node has died."""

        def error() -> NodeDied:
            lost = "a command"
            return NodeDied(
                f"node {self.number} ({self.device}): {str(death).partition(': ')[2]}; "
                f"the first lost operation is {lost}",
                node=self.number,
                host=death.host,
                pid=death.pid,
                signal=death.signal,
                exitcode=death.exitcode,
            )

        self.death = error

    def failed(self, error: BaseException) -> None:
        """Record that the node has ended with an exception outside of an operation."""
        if not self.closed:
            self.death = lambda: NodeDied(f"node {self.number} ({self.device}): {error}", node=self.number)

    def close(self) -> None:
        """Close the command channel, which ends the node after its last command."""
        self.closed = True
        self.forget()
        self._commands.close()
        self._replies.close()
