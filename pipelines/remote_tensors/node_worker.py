"""Run the program of a node, which executes the clients' commands in order, on ordinary tensors.

Each client has its own table that maps IDs to tensors. A failed command stores a :class:`RemoteFailure` for
each of its outputs, and a command with a failed input is skipped. Views are ordinary torch views. In-place
operations and their aliases therefore behave as they do locally.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowchan import Broken, Channel, Closed
from flowchan.hosts.pool_channels import Reach
from flowchan.items import arrays
from flowchan.pipelines.children.parent_handle import Parent
from flowchan.pipelines.remote_tensors.command_format import (
    NodeDevice,
    Payload,
    Slot,
    TemplateSpec,
    flat_results,
    form_of,
    unpack_batch,
)
from flowchan.pipelines.remote_tensors.command_progress import CommandProgress
from flowchan.pipelines.remote_tensors.node_copies import Inbox, Outbox, Senders
from flowchan.pipelines.remote_tensors.remote_failures import RemoteFailure
from flowchan.pipelines.remote_tensors.templates import only_strided

MAX_UNFETCHED = 1000
"""Number of failures that a node keeps for ``sync``."""
LSTM_LAYER = "aten::mkldnn_rnn_layer"
"""Operator whose kernel depends on the grad mode, which the client sends as the last argument."""


class Compiled:
    """Template in the form that the node runs."""

    __slots__ = ("function", "inputs", "kept", "mutated", "name", "outputs", "size")

    def __init__(self, spec: TemplateSpec, function: Callable[[Sequence[Any]], Any]) -> None:
        self.name, self.inputs, self.kept, self.mutated = spec.operation, spec.inputs, spec.kept, spec.mutated
        self.outputs, self.size, self.function = spec.outputs, spec.size, function


def _zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.zeros(size, **options)


NODE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::_efficientzerotensor": _zeros,  # a real tensor, because one without storage cannot be sent
}
"""Functions that nodes run instead of operators."""


def operator(name: str, module: str = "") -> Any:
    """Return the operator of the given name, such as ``aten::add.Tensor``."""
    if name in NODE_FUNCTIONS:
        return NODE_FUNCTIONS[name]
    if module:
        importlib.import_module(module)
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def compiled(spec: TemplateSpec, device: torch.device) -> Callable[[Sequence[Any]], Any]:
    """Return a function that takes the inputs and scalars of a command and runs the operator."""
    constants: list[Any] = []

    def source(value: Any) -> str:
        if type(value) is Slot:
            return f"v[{value.place}]"
        if type(value) is Payload:
            return f"v[{spec.inputs + value.place}]"
        if type(value) is NodeDevice:
            constants.append(device)
        elif type(value) is tuple:
            return "[" + ", ".join(map(source, value)) + "]"
        else:
            constants.append(value)
        return f"c[{len(constants) - 1}]"

    parts = [*map(source, spec.args), *(f"{name}={source(value)}" for name, value in spec.kwargs.items())]
    op = operator(spec.operation, spec.module)
    call = eval(f"lambda v: op({', '.join(parts)})", {"op": op, "c": constants})

    def with_dtype(values: Sequence[Any]) -> Any:
        before = torch.get_default_dtype()
        if before is spec.dtype:
            return call(values)
        torch.set_default_dtype(spec.dtype)
        try:
            return call(values)
        finally:
            torch.set_default_dtype(before)

    if spec.operation == LSTM_LAYER:
        call = (torch.enable_grad() if spec.args[-1] else torch.no_grad())(call)
    plain: Callable[[Sequence[Any]], Any] = call
    return plain if spec.dtype is torch.get_default_dtype() else with_dtype


def _fail(error: Exception, values: Sequence[Any]) -> Any:
    raise error


class ClientTable:
    """Tensors, templates and failures of one client of this node."""

    def __init__(self, replies: Channel[Any], number: int) -> None:
        self.replies, self.number = replies, number
        self.events = Outbox(replies)  # never waits for room, because another node may wait for this node
        self.tensors: dict[int, Any] = {}
        self.templates: dict[int, Compiled] = {}
        self.unfetched: dict[int, RemoteFailure] = {}
        self.commands = self.position = self.uploaded = self.downloaded = 0


def own_object(value: Any) -> Any:
    """Return a view of a tensor. A later change to the view's shape does not affect the tensor."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class Node:
    """State of one node.

    Args:
        number: Number of the node in its ``RemoteNodes``.
        commands: Channel with the messages of all clients.
        inbox: Inbox in shared memory; None on a host.
        device: Device on which this node runs its kernels.
        progress: Memory for the number of the running command; None on another host.
    """

    def __init__(
        self,
        number: int,
        commands: Channel[Any],
        inbox: Channel[Any] | None,
        device: torch.device,
        progress: CommandProgress | None = None,
    ) -> None:
        self.number, self.commands, self.device = number, commands, device
        self.inbox, self.senders = Inbox(inbox), Senders()
        self.clients: dict[str, ClientTable] = {}
        self.numbers = itertools.count()
        self.running: Any = [0, 0] if progress is None else progress.words

    def run(self) -> None:
        """Handle messages until the command channel is closed."""
        with torch.no_grad():
            while True:
                try:
                    client, kind, *rest = self.commands.get()
                except Closed:
                    return
                if kind == "hello":
                    self.clients[client] = ClientTable(rest[0], next(self.numbers))
                    continue
                if kind == "drop":  # the client has exited, or its exported tensors are unused
                    self.clients.pop(client, None)
                    continue
                table = self.clients.get(client)
                if table is None:
                    continue  # the client sent this message before it exited
                self.running[0] = table.number
                if kind is None:
                    self.run_batch(client, table, rest[0])
                else:
                    getattr(self, f"on_{kind}")(client, table, *rest)
                rest = []

    # --- commands ---

    def run_batch(self, client: str, table: ClientTable, data: bytes) -> None:
        """Run the commands of a batch, and then free the listed IDs."""
        position, commands, frees = unpack_batch(data)
        tensors, templates, running = table.tensors, table.templates, self.running
        number = abs(running[1])
        # Skip the first commands if an earlier batch already contained them.
        place, end = max(0, table.position - position), len(commands)
        table.position = max(table.position, position + end)
        while place < end:
            template = templates[commands[place]]
            following = place + template.size
            running[1] = number = commands[place + 1]
            self.run_command(client, table, template, commands, place)
            place = following
        running[1] = -number
        for id in frees:
            if tensors.pop(id, None) is None:
                templates.pop(id, None)

    def run_command(
        self, client: str, table: ClientTable, template: Compiled, commands: list[Any], place: int
    ) -> None:
        """Run one command, and store its results or its failure."""
        tensors = table.tensors
        table.commands += 1
        first = place + 2 + template.outputs
        values = commands[first : place + template.size]
        for slot in range(template.inputs):
            value = values[slot] = tensors[values[slot]]
            if type(value) is RemoteFailure:
                self.fail(table, template, commands, place, value)
                return
        try:
            result = template.function(values)
        except BaseException as error:
            failure = self.failed(client, table, commands[place + 1], template.name, error)
            self.fail(table, template, commands, place, failure)
            return
        if template.kept is None:
            tensors[commands[place + 2]] = result
        elif template.kept:
            leaves = flat_results(result)
            for id, kept in zip(commands[place + 2 : first], template.kept, strict=True):
                tensors[id] = leaves[kept]

    def failed(
        self, client: str, table: ClientTable, number: int, name: str, error: BaseException
    ) -> RemoteFailure:
        """Return the failure of an operation, and keep it for ``sync``."""
        failure = RemoteFailure.of(self.number, client, number, name, error)
        if len(table.unfetched) < MAX_UNFETCHED:
            table.unfetched[number] = failure
        return failure

    def fail(
        self, table: ClientTable, template: Compiled, commands: list[Any], place: int, failure: RemoteFailure
    ) -> None:
        """Store a failure for the outputs of a command, and for all views of the tensors that it modifies."""
        first = place + 2 + template.outputs
        for id in commands[place + 2 : first]:
            table.tensors[id] = failure
        for slot in template.mutated:
            changed = table.tensors[commands[first + slot]]
            if type(changed) is not RemoteFailure:
                self.poison(changed, failure)

    def poison(self, changed: Any, failure: RemoteFailure) -> None:
        """Replace all tensors that share this storage with a failure."""
        storage = changed.untyped_storage()._cdata
        for table in self.clients.values():
            for id, tensor in table.tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata == storage:
                    table.tensors[id] = failure

    # --- messages ---

    def on_template(self, client: str, table: ClientTable, id: int, data: bytes) -> None:
        """Add a template. Commands of the template fail if this node does not have the operator."""
        spec = pickle.loads(data)
        try:
            function = compiled(spec, self.device)
        except Exception as error:
            function = functools.partial(_fail, error)
        table.templates[id] = Compiled(spec, function)

    def on_upload(self, client: str, table: ClientTable, id: int, tensor: Any) -> None:
        """Store a tensor of the client."""
        self.running[1] = id
        table.uploaded += tensor.nbytes
        self._store(client, table, id, "upload", tensor)
        self.running[1] = -id

    def _store(self, client: str, table: ClientTable, id: int, name: str, value: Any) -> None:
        """Store a tensor or a failure from another process."""
        if type(value) is not RemoteFailure and self.device.type != "cpu":
            try:
                value = value.to(self.device)
            except Exception as error:
                value = self.failed(client, table, id, name, error)
        table.tensors[id] = value

    def on_export(self, client: str, table: ClientTable, id: int, name: str, token: int) -> None:
        """Keep a tensor for the receivers of an item, in a separate table."""
        exports = self.clients.setdefault(name, ClientTable(table.replies, table.number))
        exports.tensors[token] = own_object(table.tensors[id])

    def on_import(self, client: str, table: ClientTable, id: int, name: str, token: int) -> None:
        """Give a client a tensor that was in an item that the client has received."""
        export = self.clients.get(name)
        if export is None:
            error = RuntimeError("the tensor's lease has ended before the tensor was received")
            table.tensors[id] = self.failed(client, table, id, "receive a tensor", error)
        else:
            table.tensors[id] = own_object(export.tensors[token])

    def on_send(self, client: str, table: ClientTable, number: int, id: int, peer: str, key: str) -> None:
        """Send a tensor or its failure to another node."""
        self.running[1] = number
        value = table.tensors[id]
        if isinstance(value, torch.Tensor):
            try:
                value = value.cpu().resolve_conj().resolve_neg()
            except Exception as error:
                value = self.failed(client, table, number, "copy to a node", error)
        self.senders.send(peer, key, value)
        self.running[1] = -number

    def on_receive(self, client: str, table: ClientTable, id: int, key: str, sender: str) -> None:
        """Wait for a tensor from another node."""
        self.running[1] = id
        self._store(client, table, id, "copy from a node", self.inbox.take(key, sender))
        self.running[1] = -id

    def on_peer(self, client: str, table: ClientTable, peer: str, channel: Channel[Any]) -> None:
        """Store the inbox of another node."""
        self.senders.add(peer, channel)

    def on_relay(self, client: str, table: ClientTable, channel: Channel[Any]) -> None:
        """Also receive tensors through a channel of the program."""
        self.inbox.add(channel)

    def on_event(self, client: str, table: ClientTable, number: int) -> None:
        """Report that all commands before an event have run, and when."""
        table.events.put((-number, time.perf_counter(), False))

    def on_seed(self, client: str, table: ClientTable, number: int, seed: int) -> None:
        """Seed the random number generators."""
        try:
            torch.manual_seed(seed)
        except Exception as error:
            self.failed(client, table, number, "manual_seed", error)

    def on_set_rng_state(self, client: str, table: ClientTable, number: int, state: torch.Tensor) -> None:
        """Set the state of the random number generator."""
        try:
            self._random().set_rng_state(state.clone())
        except Exception as error:
            self.failed(client, table, number, "set_rng_state", error)

    def _random(self) -> Any:
        """Return the torch module with the random number generator for this node's kernels."""
        return torch if self.device.type == "cpu" else torch.get_device_module(self.device)

    def on_ask(
        self, client: str, table: ClientTable, question: int, what: str, args: tuple[Any, ...]
    ) -> None:
        """Answer a question."""
        failure = None
        try:
            value = getattr(self, f"answer_{what}")(client, table, *args)
        except Exception as error:
            value = RemoteFailure.of(self.number, client, 0, what, error)
        if type(value) is RemoteFailure:
            failure = value
        table.events.wait()  # earlier events must arrive before the answer; the client reads them now
        try:
            try:
                table.replies.put((question, value, failure is not None))
            except TypeError as error:  # the answer cannot be sent
                table.replies.put((question, RemoteFailure.of(self.number, client, 0, what, error), True))
        except (Closed, Broken):
            self.clients.pop(client, None)  # the client has exited

    # --- answers ---

    def answer_item(self, client: str, table: ClientTable, id: int) -> Any:
        """Return the value of a tensor with one element."""
        tensor = table.tensors[id]
        return tensor if type(tensor) is RemoteFailure else tensor.item()

    def answer_fetch(self, client: str, table: ClientTable, id: int) -> Any:
        """Return a tensor."""
        tensor = table.tensors[id]
        if type(tensor) is RemoteFailure:
            return tensor
        table.downloaded += tensor.nbytes
        return tensor.cpu().resolve_conj().resolve_neg()

    def answer_inbox(self, client: str, table: ClientTable, reach: Reach) -> tuple[str, bytes, bool]:
        """Return the address of an inbox that this node owns."""
        return self.inbox.address(reach)

    def answer_peer(
        self, client: str, table: ClientTable, peer: str, address: str, secret: bytes, tls: bool
    ) -> None:
        """Connect to an inbox that another node owns."""
        self.senders.connect(peer, address, secret, tls)

    def answer_metadata(self, client: str, table: ClientTable, ids: list[int]) -> list[Any]:
        """Return the metadata of tensors, or None for failures. Tests compare it with that of the client."""
        found = [table.tensors[id] for id in ids]
        return [tuple(form_of(one)) if isinstance(one, torch.Tensor) else None for one in found]

    def answer_ping(self, client: str, table: ClientTable) -> None:
        """Reply when all earlier commands have run."""

    def answer_sync(self, client: str, table: ClientTable, raised: set[int]) -> list[tuple[Any, ...]]:
        """Forget the failures that the client has already raised, and return the remaining ones."""
        for number in raised:
            table.unfetched.pop(number, None)
        return [tuple(one) for one in table.unfetched.values()]

    def answer_rng_state(self, client: str, table: ClientTable) -> torch.Tensor:
        """Return the state of the random number generator."""
        state: torch.Tensor = self._random().get_rng_state()
        return state

    def answer_stats(self, client: str, table: ClientTable) -> tuple[int, ...]:
        """Return the numbers of commands, live tensors, bytes received and bytes sent."""
        tensors = sum(len(one.tensors) for one in self.clients.values())
        return table.commands, tensors, table.uploaded, table.downloaded

    def answer_run(
        self, client: str, table: ClientTable, number: int, spec: bytes, inputs: list[int], scalars: list[Any]
    ) -> Any:
        """Run an operator whose shapes depend on values, and return the metadata of its results."""
        template = pickle.loads(spec)
        values: list[Any] = [table.tensors[id] for id in inputs]
        failure = next((value for value in values if type(value) is RemoteFailure), None)
        self.running[1] = number
        if failure is None:
            try:
                result = compiled(template, self.device)([*values, *scalars])
            except BaseException as error:
                failure = RemoteFailure.of(self.number, client, number, template.operation, error)
        self.running[1] = -number
        if failure is not None:
            for slot in template.mutated:
                if type(values[slot]) is not RemoteFailure:
                    self.poison(values[slot], failure)
            return failure
        return self._described(table, number, result, values, itertools.count(1))

    def _described(self, table: ClientTable, number: int, result: Any, inputs: list[Any], more: Any) -> Any:
        if isinstance(result, torch.Tensor):
            only_strided("a result", result)
            form = tuple(form_of(result))
            for place, one in enumerate(inputs):
                if one is result:
                    return "input", (place, form)
            # The first new result has the id of the command. Later results get ids that no client uses.
            place = next(more)
            id = number if place == 1 else -(number * 1000 + place)
            table.tensors[id] = result
            return "new", (id, form)
        if isinstance(result, (tuple, list)):
            parts = [self._described(table, number, one, inputs, more) for one in result]
            return "list" if isinstance(result, list) else "tuple", parts
        return "value", result


def node_main(
    parent: Parent,
    number: int,
    commands: Channel[Any],
    inbox: Channel[Any] | None,
    device: str,
    threads: int,
    progress: CommandProgress | None = None,
) -> None:
    """Run a node in a child process."""
    error: list[BaseException] = []
    arrays.tensors_in_place = True
    # This warning is wrong, because the memory of received arrays is writable.
    warnings.filterwarnings("ignore", "The given buffer is not writable")

    def run() -> None:
        try:
            # Use a new thread, because the main thread of a forked child would use the OpenMP threads of the
            # parent, which do not exist here.
            torch.set_num_threads(threads)
            Node(number, commands, inbox, torch.device(device), progress).run()
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name=f"flowchan node {number}")
    thread.start()
    thread.join()
    if error:
        raise error[0]
