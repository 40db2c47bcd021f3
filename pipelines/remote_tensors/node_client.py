"""Implement the client's end of the connection to a node: its command buffer, questions and answers."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import uuid
import warnings
import weakref
from typing import Any

import torch

from flowchan import Broken, Channel, ChildDied, Closed, Empty, Full
from flowchan.pipelines.children.child_state import released
from flowchan.pipelines.remote_tensors import flusher
from flowchan.pipelines.remote_tensors.command_format import NodeReply, TemplateSpec, pack_batch
from flowchan.pipelines.remote_tensors.command_progress import CommandProgress
from flowchan.pipelines.remote_tensors.node_copies import NodePlace
from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError
from flowchan.pipelines.remote_tensors.remote_failures import CallSites, RemoteFailure, users_line
from flowchan.pipelines.remote_tensors.sent_commands import SentCommands
from flowchan.transport.interrupts import append_result

MAX_TEMPLATES = 20_000
"""Maximum number of templates for one node. When it is reached, the client discards all of them."""
LIMIT = 512
"""Length of the command buffer, in numbers, at which the client sends the buffer."""
POLL_INTERVAL_S = 0.1
"""Seconds between checks whether the node is alive, while the client waits for an answer."""
NO_OPERATION = 0, ""
_COPIES = {"upload": "upload", "send": "copy to a node", "receive": "copy from a node"}

_by_id: weakref.WeakValueDictionary[str, NodeClient] = weakref.WeakValueDictionary()
"""Clients of this process, by id."""


class TensorHandle:
    """Handle of an entry in a node's table.

    When the last reference to the handle is gone, the next batch frees the ID.
    """

    __slots__ = ("__weakref__", "id")
    id: int


class HandleRef(weakref.ref[Any]):
    """Weak reference that is appended to its client's ``frees`` when its handle or template dies.

    The callback is the C method ``list.append``. With a ``__del__`` method, Python would sometimes swallow a
    Ctrl-C, because it ignores exceptions that signal handlers raise in finalisers.
    """

    __slots__ = ("id",)
    id: int


class NodeClient:
    """Connection of this process to one node. The methods are thread-safe.

    Several threads append commands without a lock. The command number comes from an atomic counter, and a
    single ``+=`` appends the whole command. ``flush`` sends the commands, and then one slice assignment
    removes them and advances the position. If a signal handler raises an exception between these steps, the
    next batch has the same position. The node then skips the commands that it already has.

    Attributes:
        device: Device of the node in this process.
        number: Number of the node in its ``RemoteNodes``.
        place: How other nodes reach the node.
        introduced: Inboxes of the nodes to which this node can send tensors, by the ID of their
            ``NodePlace``.
        relay: Channel through which this node receives tensors from nodes that cannot connect to its inbox.
        kernels: Type of the device on which the node runs its kernels.
        buffer: Position of the first unsent command in the client's stream, followed by the unsent commands.
        refs: References to the living handles and templates, by ID.
        frees: References to handles and templates that are gone. The next batch frees their IDs.
        freed: Callback for dropped references.
        numbers: Counter of command numbers, and of the IDs of tensors and templates.
        sites: Lines of the program that issued the most recent commands.
        idle: True while the background thread does not check the buffer every millisecond.
        metas: Interned metadata of the node's tensors.
        misses: Number of templates that were made.
        waits: Number of questions.
        finished: Number of the last event that the node has reached. All earlier commands have finished.
        probe: Number of the latest probe by a stream, and the number of its event.
        timed: Recorded events whose time will be needed, by number.
        progress: Progress of a node that runs on this machine and was started by this process; otherwise
            None.
        death: Exception that describes the death of the node; None while the node runs.
        death_raised: True if an exception has reported the node's death to the program.
    """

    def __init__(
        self,
        device: torch.device,
        number: int,
        commands: Channel[Any],
        replies: Channel[Any],
        place: NodePlace,
    ) -> None:
        self.device, self.number, self.place = device, number, place
        self.introduced: dict[str, Channel[Any]] = {}
        self.relay: Channel[Any] | None = None
        self.kernels = "cpu"
        self.id = uuid.uuid4().hex
        self.pid = os.getpid()
        self.buffer: list[Any] = [0]
        self.refs: dict[int, HandleRef] = {}
        self.frees: list[HandleRef] = []
        self.freed = self.frees.append
        self.numbers = itertools.count(1)
        self.sites = CallSites()
        self.idle = True
        self.misses = self.waits = self.finished = 0
        self.probe = 0, 0
        self.timed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.strict = "off"
        self.route: Any = None  # how other processes reach the node; handle_transfer sets it
        self.progress: CommandProgress | None = None
        self.death: BaseException | None = None
        self.closed = self.death_raised = False
        self._commands, self._replies = commands, replies
        self.metas: dict[tuple[Any, ...], Any] = {}
        self._remembered: list[tuple[dict[Any, Any], Any]] = []
        self._flushing = self._waiting = False
        self._sending, self._asking = threading.RLock(), threading.RLock()
        self._questions = itertools.count(1)
        self._raised: set[int] = set()
        self._sent = SentCommands()
        _by_id[self.id] = self
        self._put((self.id, "hello", replies))
        flusher.flusher.add(self)

    # --- commands ---

    def handle(self, id: int) -> TensorHandle:
        """Return a new handle for an entry in the node's table."""
        handle = TensorHandle()
        handle.id = id
        ref = self.refs[id] = HandleRef(handle, self.freed)
        ref.id = id
        return handle

    def free_with(self, template: Any, id: int) -> None:
        """Let the node drop a template as soon as this process no longer refers to it."""
        ref = self.refs[id] = HandleRef(template, self.freed)
        ref.id = id

    def define(self, id: int, spec: TemplateSpec) -> None:
        """Send a template to the node before the first command that uses it."""
        self.misses += 1
        self._sent.defined(id, spec)
        self._put((self.id, "template", id, pickle.dumps(spec)))

    def remember(self, templates: dict[Any, Any], key: Any) -> None:
        """Record where a template is stored, so that it can be discarded.

        Discard all templates if there are too many.
        """
        self._remembered.append((templates, key))
        if len(self._remembered) > MAX_TEMPLATES:
            self.forget()

    def forget(self) -> None:
        """Discard all templates of this node. The node drops those that no call is using."""
        remembered, self._remembered = self._remembered, []
        for templates, key in remembered:
            templates.pop(key, None)

    def flush(self) -> None:
        """Send the buffered commands."""
        with self._sending:
            self._flush()

    def try_flush(self) -> None:
        """Send the buffered commands if the channel has room and no other thread sends."""
        held: list[bool] = []
        try:
            append_result(held, self._sending.acquire, False)
            if held[0] and self.death is None:
                self._flush(until=0)
        except Full:
            pass
        finally:
            if True in held:
                self._sending.release()

    def _flush(self, until: float | None = None) -> None:
        if self._flushing:
            raise self._reentered("while this thread sends commands")
        self._flushing = True
        try:
            # Read the freed ids first: every command that uses one of them is already in the buffer or has
            # been sent. A call keeps its template and its inputs until its command is in the buffer.
            frees = [ref.id for ref in self.frees]
            position, *commands = self.buffer
            if not commands and not frees:
                return
            batch = pack_batch(position, commands, frees)
            self._check()
            self._sent.sent(batch)
            try:
                self._put((self.id, None, batch), until)
            except Full:
                self._sent.withdraw()
                raise
            self.buffer[: 1 + len(commands)] = [position + len(commands)]
            del self.frees[: len(frees)]
            for id in frees:
                self.refs.pop(id, None)
            self._sent.freed(frees)
        finally:
            self._flushing = False

    def _reentered(self, when: str) -> RuntimeError:
        return RuntimeError(
            f"{self.device}: a signal handler must not use remote tensors {when}; let it set a flag instead"
        )

    def send(
        self, *message: Any, operation: tuple[int, str] = NO_OPERATION, until: float | None = None
    ) -> int:
        """Send the buffered commands, and then send a message.

        Args:
            *message: Kind and content of the message.
            operation: Number and name of the operation, for the error message if the node dies.
            until: Time at which a full command channel raises ``Full`` (default: never).

        Returns:
            Number of messages sent so far.
        """
        self._check()
        with self._sending:
            self._flush(until)
            if operation is not NO_OPERATION:
                self._sent.sent(operation)
            elif message[0] in ("upload", "send", "receive"):
                self._sent.sent((message[1], _COPIES[message[0]]))
            count = self._sent.count
            self._put((self.id, *message), until)
            return count

    def _put(self, message: Any, until: float | None = None) -> None:
        self._check()
        with self._sending:
            while True:
                try:
                    self._commands.put(message, _next_wait(until))
                    return
                except Full:
                    if until is not None and time.monotonic() >= until:
                        raise
                    self.note_replies()  # make room, because the node may be waiting to send replies
                except (Closed, Broken):
                    self._check()
                    raise

    def wake(self) -> None:
        """Make the background thread check the buffer."""
        flusher.flusher.wake()

    # --- questions ---

    def before_wait(self, what: str) -> None:
        """Warn or raise before a hidden wait, if the program has called ``strict`` for that.

        Raises:
            RuntimeError: The mode is ``"error"``.
        """
        if self.strict == "off":
            return
        text = f"{what} waits for {self.device}"
        if self.strict == "error":
            raise RuntimeError(f"{text}, and strict mode is 'error'; fetch the values with .cpu()")
        code, line = users_line()
        warnings.warn_explicit(text, RuntimeWarning, code.co_filename, line)

    def ask(
        self,
        what: str,
        *args: Any,
        timeout: float | None = None,
        operation: tuple[int, str] = NO_OPERATION,
    ) -> Any:
        """Ask the node a question after all earlier commands, and wait for the answer.

        Raises:
            RemoteError: The answer depends on a failed operation.
            NodeDied: The node has died.
            TimeoutError: The node did not answer in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        asking: list[bool] = []
        try:
            append_result(asking, self._asking.acquire, True, -1 if timeout is None else timeout)
            if not asking[0]:  # another thread is still waiting for the node
                raise self._late(what)
            if self._waiting:
                raise self._reentered("while this thread waits for the node")
            self._waiting = True
            try:
                reply = self._answer(what, args, until, operation)
            finally:
                self._waiting = False
        finally:
            if True in asking:
                self._asking.release()
        if reply.failed:
            raise self.error_of(reply.value)
        return reply.value

    def _answer(
        self, what: str, args: tuple[Any, ...], until: float | None, operation: tuple[int, str]
    ) -> NodeReply:
        """Send a question, and return the node's answer."""
        self.waits += 1
        question, number = next(self._questions), next(self.numbers)
        # Read replies while waiting for the lock. The thread that holds the lock may wait for the node, and
        # the node may wait for room for its replies.
        held: list[bool] = []
        try:
            while True not in held:
                append_result(held, self._sending.acquire, True, _next_wait(until))
                if not held[-1]:
                    self.note_replies()
                    if until is not None and time.monotonic() >= until:
                        raise self._late(what)
            count = self.send("ask", question, what, args, operation=operation, until=until)
        except Full:
            raise self._late(what) from None
        finally:
            if True in held:
                self._sending.release()
        while True:
            reply = self._reply(what, until)
            if reply.question == question:
                break  # other replies belong to earlier questions; the wait for those was interrupted
            self._note(reply)
        self.finished = max(self.finished, number)
        self._sent.answered(count)
        return reply

    def _reply(self, what: str, until: float | None) -> NodeReply:
        while True:
            try:
                return NodeReply(*self._replies.get(timeout=_next_wait(until)))
            except (Closed, Broken):
                self._check()
                raise
            except Empty:
                if self._commands.closed:
                    self._check()
                    raise Closed(f"{what}: node {self.number} has ended") from None
                if until is not None and time.monotonic() >= until:
                    raise self._late(what) from None

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"{what}: node {self.number} did not answer in time")

    def wait_finished(self, number: int) -> None:
        """Wait until the node has reached the event with this number."""
        with self._asking:
            while self.finished < number:
                self.try_flush()  # not flush(), which could wait for a thread that waits for the node
                self._note(self._reply("synchronize", None))

    def note_replies(self) -> None:
        """Handle the replies that have arrived, unless another thread is waiting for one."""
        self._check()
        held: list[bool] = []
        try:
            append_result(held, self._asking.acquire, False)
            while held[0]:
                self._note(NodeReply(*self._replies.get_nowait()))
        except (Empty, Closed):
            pass
        finally:
            if True in held:
                self._asking.release()

    def _note(self, reply: NodeReply) -> None:
        """Record that the node has reached an event. Replies about events have negative numbers."""
        if reply.question < 0:
            number = -reply.question
            self.finished = max(self.finished, number)
            event = self.timed.pop(number, None)
            if event is not None:
                event.arrived(number, reply.value)

    def error_of(self, failure: RemoteFailure) -> RemoteError:
        """Return the exception of a failed command, with the line that issued it."""
        client = _by_id.get(failure.client)
        if failure.died:
            if client is not None:
                client.death_raised = True
            return failure.raised("")
        if not failure.number:
            return failure.raised("this line")
        if client is None:
            return failure.raised("a line of another process")
        client._raised.add(failure.number)
        return failure.raised(client.sites.line_of(failure.number))

    def failures(self, timeout: float | None = None) -> list[RemoteFailure]:
        """Wait for all commands to finish, then return the failures that have not been raised yet."""
        known = self._raised.copy()
        found = [RemoteFailure(*row) for row in self.ask("sync", known, timeout=timeout)]
        self._raised -= known  # the node has forgotten these failures
        return [one for one in found if one.number not in self._raised]

    # --- ends ---

    def _check(self) -> None:
        """Raise an error if the node cannot run commands."""
        if self.pid != os.getpid():
            raise RuntimeError(
                f"{self.device}: remote tensors cannot be used in a fork of the process that made them; "
                "send them through a channel"
            )
        if self.closed:
            raise Closed(f"{self.device}: the nodes were closed; fetch values before close()")
        if self.death is not None:
            # The program does not see an exception in the background thread. The error must then be raised
            # once more, in a thread of the program.
            if not flusher.flusher.is_current():
                self.death_raised = True
            raise self.death_error()

    def died(self, death: BaseException) -> None:
        """Record that the node has died, or that an exception outside any operation has ended the node."""
        self.death = death

    def death_error(self) -> NodeDied:
        """Return the error for a node that has died. The error names the first operation that was lost."""
        progress = self.progress
        running = None if progress is None else progress.running()
        number, operation = self._sent.first_lost(self.buffer[1:], running) or NO_OPERATION
        how = str(self.death).partition(": ")[2].replace(f"child {self.number + 1} ", "", 1)
        lost = f"; the first lost operation is {operation}, issued at {self.sites.line_of(number)}"
        where = f"node {self.number} ({self.device}) {how}".replace(") (", ", ", 1)
        text = where + (lost if operation else "")
        if not isinstance(self.death, ChildDied):
            error = NodeDied(text, operation=operation, node=self.number)
            error.__cause__ = self.death
            return error
        return NodeDied(
            text,
            operation=operation,
            node=self.number,
            host=self.death.host,
            pid=self.death.pid,
            signal=self.death.signal,
            exitcode=self.death.exitcode,
        )

    def death_failure(self) -> RemoteFailure:
        """Return the failure of a copy from this node, after the node has died."""
        error = self.death_error()
        return RemoteFailure(self.number, self.id, 0, error.operation, pickle.dumps(error), "", died=True)

    def close_inbox(self) -> None:
        """Close this process's channels through which the node receives tensors."""
        for channel in (self.place.inbox, self.relay):
            if channel is not None:
                channel.close()

    def close(self) -> None:
        """Close the command channel, which ends the node after its last command."""
        self.closed = True
        self.refs.clear()
        self.forget()
        self._commands.close()
        self._replies.close()
        self.close_inbox()
        self.introduced = {}
        self.relay, self.place = None, self.place._replace(inbox=None)
        flusher.flusher.remove(self)
        # Tensors that outlive the node keep this object alive, but no descriptors stay open.
        self._commands = self._replies = released()
        self.progress = None


def _next_wait(until: float | None) -> float:
    """Return the seconds to wait before the next check, but not beyond ``until`` on the monotonic clock."""
    return POLL_INTERVAL_S if until is None else min(POLL_INTERVAL_S, max(0.0, until - time.monotonic()))


def _in_fork() -> None:
    """Replace the locks in a forked child, because another thread may have held them."""
    for client in list(_by_id.values()):
        client._sending, client._asking = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_in_fork)
