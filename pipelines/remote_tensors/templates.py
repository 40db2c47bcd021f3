"""Create and cache the templates of remote commands.

When an operation is called with new metadata for the first time, the client runs it on meta tensors. This run
determines the shapes, strides and dtypes of the results, and which results are inputs. The outcome is a
:class:`Template`, which is also sent to the node. Later calls with the same key only look up the template.

The key of a call contains the default dtype, the metadata of the tensors, the Python types of the scalars,
and all other arguments. The key does not contain the values of scalars (schema type ``Scalar``), because a
value such as a learning rate may change with every step. The command carries these values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flowchan.pipelines.remote_tensors.command_format import (
    NodeDevice,
    Payload,
    Slot,
    TemplateSpec,
    TensorForm,
    flat_results,
    form_of,
)
from flowchan.pipelines.remote_tensors.node_client import NodeClient

RUN_FOR_METADATA = (
    "aten::_fft_",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::linalg_eig",
    "aten::_embedding_bag",
    "aten::_linalg_svd",
)
"""Operators whose meta kernels give other shapes or strides than their CPU kernels, so the client runs them
on zeros."""

VIEW_AS_DTYPE = "aten::view.dtype"
"""Operator whose result, unlike other views, is an inference tensor if the call is made in inference mode."""
DETACH = "aten::detach"
"""Operator whose result, unlike other views, has a version counter if made outside inference mode."""
NUMBERS = frozenset((int, float, bool, complex))
"""Types of the scalars that commands carry."""
VALUES_IN_KEY = ("aten::arange", "aten::range")
"""Operations whose scalars determine the shape of the result."""


Handler = Callable[["OpPlan", Sequence[Any], dict[str, Any]], Any]

handlers: dict[str, Handler] = {}
"""Functions that replace an operator's ordinary command, by the operator's name."""


BATCH_NORM = "aten::native_batch_norm"
COMPOSED = "CompositeImplicitAutograd"
"""Dispatch key of the operators that torch composes from others, such as ``to``. In inference mode, torch
dispatches them as a whole."""
TRACKED = "ADInplaceOrView"
"""Dispatch key with which torch tracks views and versions, even in inference mode."""


def _composed(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Let torch compose an operation from other operations, whose views and versions it tracks."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return plan.op.decompose(*args, **kwargs)


def _composed_view(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Let torch compose an operation whose results torch tracks as a whole, such as ``chunk``."""
    return plan.op.decompose(*args, **kwargs)


class TensorMeta:
    """Metadata of remote tensors.

    For each node, equal metadata is represented by the same object. Keys can therefore compare identities.
    ``conj`` and ``neg`` are the conjugate and the negative bit, which torch resolves in this process. A node
    gets a tensor with such a bit only for operations that do not need resolved tensors.
    """

    __slots__ = ("client", "conj", "device", "dtype", "make", "neg", "offset", "shape", "stride")

    def __init__(self, client: NodeClient, form: TensorForm) -> None:
        self.client, self.device = client, client.device
        self.make: Callable[[], Any] | None = None
        self.shape, self.stride, self.offset, self.dtype, self.conj, self.neg = form

    @property
    def form(self) -> TensorForm:
        """Metadata without the node."""
        return TensorForm(self.shape, self.stride, self.offset, self.dtype, self.conj, self.neg)

    def empty(self, device: str = "meta") -> torch.Tensor:
        """Return a meta tensor with this metadata, or a tensor of zeros on the CPU."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if 0 in self.shape:
            last = -1
        base = torch.zeros(self.offset + last + 1, dtype=self.dtype, device=device)
        return self.with_bits(base.as_strided(self.shape, self.stride, self.offset))

    def with_bits(self, tensor: torch.Tensor) -> torch.Tensor:
        """Set the conjugate and the negative bit of a new tensor, and return it."""
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        return tensor

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"


def only_strided(what: str, tensor: torch.Tensor) -> None:
    """Raise an error for sparse, quantized and nested tensors.

    Raises:
        RuntimeError: The tensor is not an ordinary strided tensor.
    """
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    kind = "a quantized" if tensor.is_quantized else "a nested" if tensor.is_nested else f"a {tensor.layout}"
    raise RuntimeError(f"{what}: remote tensors must be strided, got {kind} tensor; call .to_dense() on it")


def meta_of(client: NodeClient, tensor: torch.Tensor) -> TensorMeta:
    """Return the interned metadata for a tensor with this shape on the node."""
    only_strided("remote tensors", tensor)
    return interned(client, form_of(tensor))


def interned(client: NodeClient, form: TensorForm) -> TensorMeta:
    """Return the interned metadata with these values."""
    found: TensorMeta | None = client.metas.get(form)
    return found or client.metas.setdefault(form, TensorMeta(client, form))


class Template:
    """Information that the client needs to repeat a call.

    Attributes:
        client: Node that runs the commands.
        id: ID of the template on the node. The node drops the template after this object is gone.
        native: The C++ part's copy of the template; None until the template is first used.
        single: Metadata of the result, if the only result is one new tensor; else None.
        outputs: Metadata of the new tensors, in the order of their IDs.
        results: Structure of the results. An int is the index of an input, and a :class:`Slot` is the index
            of a new tensor. A tuple or list contains further results.
        changed: Indices of the inputs whose metadata the operation changes, with the new metadata.
        viewed: Index of the input whose views are the results; None if the results are not views.
        detaches: True for ``detach``.
    """

    __slots__ = (
        "__weakref__",
        "changed",
        "client",
        "detaches",
        "id",
        "native",
        "outputs",
        "results",
        "single",
        "viewed",
    )

    def __init__(self, client: NodeClient) -> None:
        self.client, self.id = client, next(client.numbers)
        client.free_with(self, self.id)
        self.native: Any = None
        self.single: TensorMeta | None = None
        self.outputs: tuple[TensorMeta, ...] = ()
        self.results: Any = None
        self.changed: tuple[tuple[int, TensorMeta], ...] = ()
        self.viewed: int | None = None
        self.detaches = False


class OpPlan:
    """Information for the dispatch of one operator, stored as an attribute of the operator.

    Attributes:
        templates: Templates by key.
        scalars: For each positional argument, whether its schema type is scalar.
        named: Names of the arguments with a scalar type.
        handler: Function that replaces the command; None for ordinary operations.
        factory: True if the operation has a ``device`` argument.
        dynamic: True if the shape of the results depends on values.
    """

    __slots__ = ("dynamic", "factory", "handler", "name", "named", "op", "scalars", "templates")

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op = op
        self.name: str = op.name()
        self.handler = handlers.get(self.name) or handlers.get(self.name.partition(".")[0])
        if self.handler is None and torch._C._dispatch_has_kernel_for_dispatch_key(self.name, COMPOSED):
            tracked = torch._C._dispatch_has_kernel_for_dispatch_key(self.name, TRACKED)
            self.handler = _composed_view if tracked else _composed
        self.templates: dict[tuple[Any, ...], Template] = {}
        by_value = not self.name.startswith(VALUES_IN_KEY)
        kinds = {one.name: by_value and _takes_number(one.type) for one in schema.arguments}
        self.scalars = tuple(kinds.values())
        self.named = frozenset(name for name, scalar in kinds.items() if scalar)
        self.factory = "device" in kinds
        tags = op.tags
        self.dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def module_of(name: str) -> str:
    """Return the Python module that defines a custom operator, which a node may have to import."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(name.partition(".")[0])
    module: str = found._init_fn.__module__ if found is not None else ""
    return "" if module == "__main__" else module


def _takes_number(kind: Any) -> bool:
    """Return whether a command contains the number that a call passes for a parameter of this type."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    # torch reports Scalar as NumberType, and only the printed schema distinguishes it from int and float.
    # Tensor is included, because a number such as the 2 in ``x * 2`` may also change with every call.
    return str(kind) in ("number", "Scalar", "Tensor")


class CallShape(NamedTuple):
    """Call with placeholders for its tensors, its scalars and the devices of nodes.

    Attributes:
        args: Positional arguments; lists are tuples.
        kwargs: Keyword arguments.
        inputs: Tensors.
        scalars: Values of the scalars.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Any]
    scalars: list[Any]


def shape_of_call(plan: OpPlan, tensor_type: type, args: Sequence[Any], kwargs: dict[str, Any]) -> CallShape:
    """Replace the tensors, scalars and node devices in the arguments with placeholders."""
    inputs: list[Any] = []
    scalars: list[Any] = []
    flags = plan.scalars
    replaced = functools.partial(_placeholder, tensor_type, inputs, scalars)
    new_args = tuple(replaced(value, place < len(flags) and flags[place]) for place, value in enumerate(args))
    new_kwargs = {name: replaced(value, name in plan.named) for name, value in kwargs.items()}
    return CallShape(new_args, new_kwargs, inputs, scalars)


def _placeholder(tensor_type: type, inputs: list[Any], scalars: list[Any], value: Any, scalar: bool) -> Any:
    """Return the placeholder for a value, or the value itself if it needs no placeholder.

    This is not a nested function, because a recursive closure would form a reference cycle with the tensors.
    """
    if type(value) is tensor_type:
        inputs.append(value)
        return Slot(len(inputs) - 1)
    if isinstance(value, (list, tuple)):
        return tuple(_placeholder(tensor_type, inputs, scalars, one, scalar) for one in value)
    if scalar and type(value) in NUMBERS:
        scalars.append(value)
        return Payload(len(scalars) - 1)
    if isinstance(value, torch.device) and value.type == "remote":
        return NodeDevice()
    return value


def filled(value: Any, tensors: Sequence[Any], scalars: Sequence[Any], device: Any) -> Any:
    """Replace the placeholders in an argument."""
    if type(value) is Slot:
        return tensors[value.place]
    if type(value) is Payload:
        return scalars[value.place]
    if type(value) is NodeDevice:
        return device
    if type(value) is tuple:
        return [filled(one, tensors, scalars, device) for one in value]
    return value


class Evaluated:
    """Outcome of an operation on meta tensors."""

    def __init__(
        self,
        client: NodeClient,
        plan: OpPlan,
        result: Any,
        metas: Sequence[torch.Tensor],
        mutated: Sequence[int],
    ) -> None:
        self.kept: list[int] = []
        self.outputs: list[TensorMeta] = []
        places = {id(meta): place for place, meta in enumerate(metas)}
        # Some results are the modified arguments themselves.
        places |= {id(metas[place]): place for place in mutated}
        leaves = flat_results(result)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
                only_strided(plan.name, leaf)
                self.kept.append(place)
                self.outputs.append(meta_of(client, leaf))
            elif leaf is not None and not isinstance(leaf, torch.Tensor):
                raise NotImplementedError(f"{plan.name}: results must be tensors, got {type(leaf).__name__}")
        counter = iter(range(len(self.outputs)))
        self.results = self._structure(result, places, counter)
        self.single = type(self.results) is Slot

    def _structure(self, result: Any, places: dict[int, int], counter: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return places[id(result)] if id(result) in places else Slot(next(counter))
        if isinstance(result, (tuple, list)):
            return type(result)([self._structure(one, places, counter) for one in result])
        return None


def written_values(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors, or their placeholders, that the operator modifies according to its schema."""
    written = _aliased(plan, args, kwargs, write=True)
    # The operator also modifies the statistics, although its schema does not say so.
    if plan.name == BATCH_NORM and args[5]:
        written += args[3:5]
    return flat_results(written)


def _aliased(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], write: bool) -> list[Any]:
    """Return the arguments that the operator modifies.

    If ``write`` is false, return the arguments of which the results are views.
    """
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(plan.op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write is write
    ]


def spec_of(plan: OpPlan, shape: CallShape) -> TemplateSpec:
    """Return the template of a call in the form that is sent to the node.

    ``kept`` describes a single new tensor.
    """
    return TemplateSpec(
        plan.name,
        shape.args,
        shape.kwargs,
        len(shape.inputs),
        len(shape.scalars),
        None,
        tuple(one.place for one in written_values(plan, shape.args, shape.kwargs) if type(one) is Slot),
        torch.get_default_dtype(),
        module_of(plan.name),
    )


def evaluate(
    client: NodeClient, plan: OpPlan, shape: CallShape, mutated: Sequence[int]
) -> tuple[Evaluated, list[torch.Tensor]]:
    """Run the operator on meta tensors."""
    by_tensor: dict[int, torch.Tensor] = {}
    meta = torch.device("cpu" if plan.name.startswith(RUN_FOR_METADATA) else "meta")
    metas = [by_tensor.setdefault(id(one), one._m.empty(meta.type)) for one in shape.inputs]
    result = plan.op(
        *(filled(value, metas, shape.scalars, meta) for value in shape.args),
        **{name: filled(value, metas, shape.scalars, meta) for name, value in shape.kwargs.items()},
    )
    return Evaluated(client, plan, result, metas, mutated), metas


def new_template(client: NodeClient, plan: OpPlan, shape: CallShape) -> Template:
    """Create a template for a call, and send it to the node."""
    spec = spec_of(plan, shape)
    found, metas = evaluate(client, plan, shape, spec.mutated)
    template = Template(client)
    template.outputs, template.results = tuple(found.outputs), found.results
    if found.single:
        template.single = found.outputs[0]
    changed = [(place, meta_of(client, metas[place])) for place in spec.mutated]
    if plan.name != VIEW_AS_DTYPE:
        viewed = flat_results(_aliased(plan, shape.args, shape.kwargs, write=False))
        template.viewed = next((one.place for one in viewed if type(one) is Slot), None)
        template.detaches = plan.name == DETACH
    template.changed = tuple((place, meta) for place, meta in changed if meta is not shape.inputs[place]._m)
    client.define(template.id, spec if found.single else spec._replace(kept=tuple(found.kept)))
    return template
