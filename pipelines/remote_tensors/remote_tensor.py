"""Define the class of remote tensors, and the function that torch calls for each of their operations."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from flowchan.pipelines.remote_tensors.command_format import Slot, TensorForm, flat_results, form_of
from flowchan.pipelines.remote_tensors.device_table import client_at
from flowchan.pipelines.remote_tensors.local_forms import LocalForms
from flowchan.pipelines.remote_tensors.node_client import LIMIT, HandleRef, NodeClient, TensorHandle
from flowchan.pipelines.remote_tensors.remote_failures import SITES, is_library_code
from flowchan.pipelines.remote_tensors.templates import (
    NUMBERS,
    OpPlan,
    Template,
    TensorMeta,
    interned,
    new_template,
    only_strided,
    shape_of_call,
    spec_of,
    written_values,
)
from flowchan.public import public

_getframe = sys._getframe
_in_inference_mode = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype


@public
class RemoteTensor(LocalForms, torch.Tensor):  # type: ignore[misc]
    """Tensor whose values are on a node. Create one with ``device="remote:1"`` or ``.to("remote:1")``.

    Attributes:
        _m: Metadata, including the node.
        _h: Handle of the tensor in the node's table.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteNodes
        >>> with RemoteNodes(1) as nodes:
        ...     x = torch.ones(2, 2).to(nodes[0]) * 3
        ...     x.device, x.shape, x.sum(0).tolist(), x.numpy(force=True).tolist()
        (device(type='remote', index=0), torch.Size([2, 2]), [6.0, 6.0], [[3.0, 3.0], [3.0, 3.0]])
    """

    # No __slots__: torch swaps a local parameter and its remote copy when a module moves to a node.
    _m: TensorMeta
    _h: TensorHandle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Issue the command of an operation, and return its results."""
        try:
            plan = func._remote_plan
        except AttributeError:
            plan = plan_of(func)
        if plan.handler is not None:
            return plan.handler(plan, args, kwargs or {})
        inputs: list[Any] = []
        scalars: list[Any] = []
        try:
            template = plan.templates.get(call_key(plan, args, kwargs, inputs, scalars))
        except TypeError:  # an argument is not hashable
            template = None
        if template is None:
            return ordinary(plan, args, kwargs or {})
        return issue(template, inputs, scalars, _getframe(1).f_back)

    @property
    def data(self) -> Any:
        """The tensor without its gradient. Assigning another remote tensor replaces values and metadata."""
        return _data.__get__(self)

    @data.setter
    def data(self, new: Any) -> None:
        if type(new) is not RemoteTensor:
            raise TypeError(
                f"data: new values must be on {self.device}, got {new.device}; move them with .to()"
            )
        fresh: Any = new.detach()  # a new object, so that a shape change does not affect ``new``
        _replace(self, fresh)

    def __tensor_flatten__(self) -> Any:
        # torch only checks whether this method exists. Because the method exists, a module that moves to a
        # node keeps its parameter objects.
        raise NotImplementedError("torch.compile: remote tensors cannot be traced; run the function eagerly")

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise NotImplementedError("torch.compile: remote tensors cannot be traced; run the function eagerly")


_data: Any = torch.Tensor.data


def wrapped(meta: TensorMeta, handle: TensorHandle) -> RemoteTensor:
    """Return a tensor for a handle."""
    make = meta.make
    if make is None:
        # Leave out the strides of a contiguous tensor, because it takes torch time to parse them.
        plain = not meta.offset and meta.stride == torch.empty(meta.shape, device="meta").stride()
        make = functools.partial(
            torch.Tensor._make_wrapper_subclass,
            RemoteTensor,
            meta.shape,
            None if plain else meta.stride,
            None if plain else meta.offset,
            None,
            meta.dtype,
            torch.strided,
            meta.device,
        )
        if meta.conj or meta.neg:
            make = functools.partial(_with_bits, meta, make)
        meta.make = make
    tensor: RemoteTensor = make()
    tensor._m, tensor._h = meta, handle
    return tensor


def _with_bits(meta: TensorMeta, make: Callable[[], Any]) -> Any:
    return meta.with_bits(make())


def new_tensor(meta: TensorMeta, id: int) -> RemoteTensor:
    """Return a tensor for a new entry in the node's table."""
    return wrapped(meta, meta.client.handle(id))


def call_key(
    plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any] | None, inputs: list[Any], scalars: list[Any]
) -> tuple[Any, ...]:
    """Return the key of a call, and collect its tensors and scalars. The C++ part builds the same keys."""
    # The key includes the default dtype, which determines, for example, the dtype of an int tensor divided by
    # a number.
    key = _default_dtype(), *_key_of(plan.scalars, args, inputs, scalars)
    if kwargs:
        flags = [name in plan.named for name in kwargs]
        key += (tuple(kwargs), *_key_of(flags, kwargs.values(), inputs, scalars))
    return key


def _key_of(
    flags: Iterable[bool], values: Iterable[Any], inputs: list[Any], scalars: list[Any]
) -> tuple[Any, ...]:
    """Return the part of a key that describes ``values``.

    Append the tensors among the values to ``inputs``, and the numbers to ``scalars``. A true flag means that
    the operator takes a scalar at this position.
    """
    key: list[Any] = []
    for scalar, value in zip(flags, values, strict=False):
        kind = type(value)
        if kind is RemoteTensor:
            key.append(value._m)
            inputs.append(value)
        elif scalar and kind in NUMBERS:
            key.append(kind)
            scalars.append(value)
        elif kind is list or kind is tuple:
            key.append(_key_of(itertools.repeat(scalar), value, inputs, scalars))
        else:
            key.append(exact(value) if kind is float else value)
    return tuple(key)


def exact(value: float) -> float | str:
    """Return a key that distinguishes 0.0 from -0.0 and treats all NaNs as equal."""
    return str(value) if value == 0 or value != value else value


def issue(
    template: Template, inputs: Sequence[Any], scalars: Sequence[Any], frame: FrameType | None = None
) -> Any:
    """Append a command to its node's buffer, and return the results.

    Args:
        template: Template of the command.
        inputs: Input tensors.
        scalars: Values of the scalars.
        frame: The innermost frame that may be the program's (default: the caller's).
    """
    viewed = template.viewed
    if viewed is not None and inputs[viewed].is_inference() is not _in_inference_mode():
        with _mode_of(inputs[viewed]):
            view = issue(template, inputs, scalars, frame or _getframe(1))
        return _with_version(view) if template.detaches and view.is_inference() else view
    client = template.client
    number = next(client.numbers)
    client.sites.note(number, frame or _getframe(1))
    single = template.single
    buffer = client.buffer
    if single is not None:
        buffer += (template.id, number, number, *[one._h.id for one in inputs], *scalars)
        result: Any = new_tensor(single, number)
    else:
        outputs = template.outputs
        ids = [number, *[next(client.numbers) for _ in outputs[1:]]] if outputs else ()
        buffer += (template.id, number, *ids, *[one._h.id for one in inputs], *scalars)
        new = [new_tensor(meta, id) for meta, id in zip(outputs, ids, strict=True)]
        result = _built(template.results, inputs, new)
        for slot, meta in template.changed:
            change_meta(inputs[slot], meta)
    if len(buffer) >= LIMIT:
        client.flush()
    elif client.idle:
        client.wake()
    return result


def _built(results: Any, inputs: Sequence[Any], new: Sequence[Any]) -> Any:
    """Replace the placeholders in a call's results with the tensors."""
    kind = type(results)
    if kind is int:
        return inputs[results]
    if kind is Slot:
        return new[results.place]
    if results is None:
        return None
    return kind([_built(one, inputs, new) for one in results])


def _mode_of(tensor: Any) -> Any:
    """Return a mode in which torch creates tensors of the same kind as ``tensor``: inference or normal.

    A view must be of the same kind as its base, regardless of the current mode.
    """
    return torch.inference_mode(tensor.is_inference())


def _with_version(tensor: RemoteTensor) -> RemoteTensor:
    """Return an inference tensor with a version counter, so that it allows in-place operations in any mode.

    torch adds the counter when it copies the metadata outside inference mode.
    """
    with torch._C._DisableTorchDispatch():  # so that the copy issues no command
        counted = torch.Tensor._make_subclass(RemoteTensor, tensor)
    counted._m, counted._h = tensor._m, tensor._h
    return counted


def change_meta(tensor: Any, meta: TensorMeta) -> None:
    """Set a tensor's metadata, after an in-place operation has changed its shape."""
    with _mode_of(tensor):
        _replace(tensor, wrapped(meta, tensor._h))


def _replace(tensor: Any, fresh: Any) -> None:
    """Give a tensor the metadata and the handle of a fresh tensor.

    torch compares the dispatch keys of the two tensors. The function therefore first clears the conjugate and
    negative bits of both.
    """
    for one in (tensor, fresh):
        torch._C._set_conj(one, False)
        torch._C._set_neg(one, False)
    try:
        _data.__set__(tensor, fresh)
        tensor._m, tensor._h = fresh._m, fresh._h
    finally:
        tensor._m.with_bits(tensor)


def plan_of(op: Any) -> OpPlan:
    """Return the plan of an operator. A plan is created only once."""
    try:
        plan: OpPlan = op._remote_plan
    except AttributeError:
        plan = op._remote_plan = OpPlan(op)
        if _native is not None and plan.handler is None and not plan.dynamic:
            _native.accelerate(plan.name, plan.templates, plan.scalars)
    return plan


_native: Any = None


def use_native(module: Any) -> None:
    """Let the C++ part issue commands with known templates. If it is None, do nothing."""
    global _native
    if module is not None:
        module.start(RemoteTensor, TensorHandle, HandleRef, is_library_code, LIMIT, SITES)
        _native = module


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a torch operator on the node of its inputs. Handlers of special operations call this function."""
    return ordinary(plan_of(op), args, kwargs)


def ordinary(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle a call with its template, which is created first if it is missing."""
    client, args, kwargs = on_one_node(plan, args, kwargs)
    if plan.factory:
        _check_device(plan, client, args, kwargs)
    if kwargs.get("generator") is not None:
        raise RuntimeError(
            f"{plan.name}: generator must be None, got {kwargs['generator']}; "
            "seed the generator of a node with torch.remote.manual_seed"
        )
    inputs: list[Any] = []
    scalars: list[Any] = []
    key = call_key(plan, args, kwargs, inputs, scalars)
    if not inputs:
        key = client, *key
    if plan.dynamic and (plan.name != "aten::index.Tensor" or any(one.dtype in MASKS for one in inputs[1:])):
        return run_and_ask(client, plan, args, kwargs)
    try:
        template = plan.templates.get(key)
    except TypeError as error:
        raise TypeError(f"{plan.name}: arguments of remote tensors must be hashable; {error}") from error
    if template is None:
        try:
            template = new_template(client, plan, shape_of_call(plan, RemoteTensor, args, kwargs))
        except NotImplementedError:
            return run_and_ask(client, plan, args, kwargs)
        plan.templates[key] = template
        client.remember(plan.templates, key)
    return issue(template, inputs, scalars)


def _check_device(plan: OpPlan, client: NodeClient, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise an error if a factory such as ``zeros_like`` would not run on the requested device."""
    device = kwargs.get("device")
    if device is None or not any(type(one) is RemoteTensor for one in args):
        return
    if device.type != "remote" or client_at(device) is not client:
        raise RuntimeError(
            f"{plan.name}: device must be {client.device} like the tensor, got {device}; "
            "copy the result with .to()"
        )


def on_one_node(
    plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[NodeClient, Sequence[Any], dict[str, Any]]:
    """Return the client of a call's node, and the arguments. CPU tensors without dimensions move there.

    Args:
        plan: Plan of the operator.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The client, the positional arguments and the keyword arguments.

    Raises:
        RuntimeError: The tensors are on several nodes, or a tensor with at least one dimension is on the CPU.
    """
    tensors = [
        one for one in flat_results([list(args), list(kwargs.values())]) if isinstance(one, torch.Tensor)
    ]
    remote = [one for one in tensors if type(one) is RemoteTensor]
    if not remote:
        device = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)), None)
        client = client_at(device or torch.device("remote"))
    else:
        client = remote[0]._m.client
    for one in remote:
        if one._m.client is not client:
            raise RuntimeError(
                f"{plan.name}: all tensors must be on one device, got {client.device} and {one.device}; "
                "move one with .to()"
            )
    if len(remote) == len(tensors):
        return client, args, kwargs

    written = {id(one) for one in written_values(plan, args, kwargs)}

    def moved(value: Any, index: bool = False) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([moved(one, index) for one in value])
        if not isinstance(value, torch.Tensor) or type(value) is RemoteTensor:
            return value
        if (value.dim() == 0 or index) and id(value) not in written:
            return upload(client, value)
        only_strided(plan.name, value)
        raise RuntimeError(
            f"{plan.name}: all tensors must be on {client.device}, got one on {value.device}; "
            "move it with .to()"
        )

    indexing = plan.name.startswith(CPU_INDICES)
    moved_args = tuple(moved(value, indexing and place == 1) for place, value in enumerate(args))
    return client, moved_args, {name: moved(value) for name, value in kwargs.items()}


MASKS = torch.bool, torch.uint8
"""Dtypes of mask tensors, which select one element for each true value."""
CPU_INDICES = ("aten::index", "aten::_index", "aten::_unsafe_index")
"""Operations whose index tensors (the second argument) may be on the CPU, as with CUDA."""


def upload(client: NodeClient, value: torch.Tensor) -> RemoteTensor:
    """Copy a tensor of this process to a node."""
    only_strided("Tensor.to", value)
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_shared():  # type: ignore[no-untyped-call]
        # Otherwise, the channel would share the memory with the node.
        value = value.clone()
    number = next(client.numbers)
    client.send("upload", number, value)
    return new_tensor(interned(client, form_of(value)._replace(offset=0)), number)


def run_and_ask(client: NodeClient, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the node, and wait for the metadata of its results."""
    if not plan.dynamic and plan.name not in _noticed:
        _noticed.add(plan.name)
        _log.warning("%s has no meta kernel, so each call waits for the shapes of its results", plan.name)
    client.before_wait(plan.name)
    number = next(client.numbers)
    client.sites.note(number, _getframe(1))
    shape = shape_of_call(plan, RemoteTensor, args, kwargs)
    ids = [one._h.id for one in shape.inputs]
    spec = pickle.dumps(spec_of(plan, shape))
    answer = client.ask("run", number, spec, ids, shape.scalars, operation=(number, plan.name))
    return _restored(client, answer, shape.inputs)


def _restored(client: NodeClient, answer: Any, inputs: Sequence[Any]) -> Any:
    """Return the results that a node's answer describes."""
    kind, value = answer
    if kind == "new":
        id, form = value
        return new_tensor(interned(client, TensorForm(*form)), id)
    if kind == "input":
        place, form = value
        new = interned(client, TensorForm(*form))
        if new is not inputs[place]._m:
            change_meta(inputs[place], new)
        return inputs[place]
    if kind == "value":
        return value
    return (list if kind == "list" else tuple)(_restored(client, one, inputs) for one in value)


_noticed: set[str] = set()
_log = logging.getLogger("flowchan.remote_tensors")
