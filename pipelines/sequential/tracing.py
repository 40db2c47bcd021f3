"""Cut modules with their own ``forward`` into layers, by tracing them with ``torch.fx``.

``forward`` is called once with proxies for its inputs. The recorded list of operations can be cut between any
two operations.

torch's own layers stay whole. The modes, hooks, parameters and buffers of these layers therefore behave as in
the plain module, and so do ``eval()``, ``to()``, optimizers and ``load_state_dict``. A submodule that cannot
be traced with proxies, because it branches on values or its operations depend on its mode, is also kept
whole. The module is traced in both modes. If a trace fails or the two traces differ, both are repeated, and
the innermost submodule at fault is kept whole.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from flowchan.items.text import short
from flowchan.pipelines.sequential.parts import called
from flowchan.pipelines.sequential.segments import Name, Operation, Owned, Segment
from flowchan.pipelines.sequential.skip import Pop, Stash
from flowchan.pipelines.sequential.tensor_trees import mapped, tensors

MAKERS = "arange", "zeros", "ones", "full", "empty", "eye", "linspace"
"""Functions that create tensors from numbers, and that fx cannot trace if the numbers are proxies."""

HOOKS = "_forward_hooks", "_forward_pre_hooks"


class Traced:
    """Traced module. Its segments are in ``layers``.

    Each segment begins with an operation that has parameters. If ``names`` are given, each segment begins
    with the first operation of a named layer instead. Raises ``TypeError`` if the module cannot be traced,
    and ``ValueError`` for an unknown layer name.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] = ()) -> None:
        self.module = module
        graph, constants = _traced(module)
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        if not nodes:
            raise ValueError("Sequential: module must have at least one layer, got none")
        self._leaves = {str(node.target) for node in nodes if node.op == "call_module"}
        self._check_hooks()
        self._seen = self._state()
        begins = [_begin(nodes, name) for name in names] or _heavy(nodes, module)[1:]
        if sorted(set(begins)) != begins or 0 in begins:
            raise ValueError(
                "Sequential: parts must name layers in the order in which they run, excluding the first "
                f"layer, got {short(list(names))}"
            )
        self.layers = nn.Sequential()
        self.layers.training = module.training
        cutting = _Cutting(module, graph, nodes, _Own(module, constants))
        for begin, end in pairwise([0, *begins, len(nodes)]):
            self.layers._modules[_label(nodes[begin], self.layers)] = cutting.segment(begin, end)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy. It lacks the IDs of modules, because the copy has different modules."""
        return {name: value for name, value in vars(self).items() if name != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._seen = self._state()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the module has changed since it was traced."""
        if self._state() != self._seen:
            raise RuntimeError(
                "Sequential: a layer, a parameter or a hook of the module has changed since it was traced; "
                "create another pipe"
            )

    def verify(self, value: Any) -> None:
        """Raise ``ValueError`` if the segments and the module give different outputs for a micro-batch.

        The check runs on copies, in ``eval`` mode. The check ignores exceptions, which the run will report.
        """
        plain, line = copy.deepcopy(self.module).eval(), copy.deepcopy(self.layers).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                outputs = [
                    tensors(called(nn.Sequential(one), _cloned(value))) for one in (plain, line, plain)
                ]
            except Exception:
                return
        one, other, again = outputs
        if not _near(one, other) and _near(one, again):
            raise ValueError(
                f"Sequential: the traced segments of {type(self.module).__name__} and the module itself "
                "give different outputs; move code such as isinstance(x, Tensor) into a separate layer"
            )

    def _through(self) -> Iterator[nn.Module]:
        """Yield the modules whose ``forward`` was traced. Modules that were kept whole are not among them."""
        for path, one in self.module.named_modules(remove_duplicate=False):
            if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in self._leaves):
                yield one

    def _check_hooks(self) -> None:
        for one in self._through():
            if any(vars(one)[hooks] for hooks in HOOKS):
                raise ValueError(
                    f"Sequential: layer {type(one).__name__} of module has forward hooks, which the "
                    "parts would not call; register them on its inner layers"
                )

    def _state(self) -> list[Any]:
        """Return the state of the module that must not change after tracing.

        The state consists of the modules, and the hooks and parameters of the traced modules.
        """
        found: list[Any] = [id(one) for one in self.module.modules()]
        for one in self._through():
            found += map(id, one._parameters.values())
            found += [key for hooks in HOOKS for key in vars(one)[hooks]]
        return found


class _Cutting:
    """Cuts the operations ``nodes`` of a graph into segments."""

    def __init__(self, module: nn.Module, graph: fx.Graph, nodes: list[fx.Node], own: _Own) -> None:
        self.module, self.nodes, self.own = module, nodes, own
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (self.result,) = (node for node in graph.nodes if node.op == "output")

    def segment(self, begin: int, end: int) -> Segment:
        """Return the segment with the operations number ``begin`` to ``end - 1``."""
        inside, last = self.nodes[begin:end], end == len(self.nodes)
        takes = self._needed(begin) if begin else self.inputs
        gives = _plain(self.result.args[0]) if last else _several(self._needed(end))
        used = {one for node in inside for one in node.all_input_nodes}
        used |= {*self.result.all_input_nodes} if last else set()
        attributes = self._in_order(one for one in used if one.op == "get_attr")
        paths = {str(node.target) for node in inside if node.op == "call_module"}
        layers: dict[str, Any] = {path: self.module.get_submodule(path) for path in sorted(paths)}
        return Segment(
            [*map(self.own.operation, attributes), *self._operations(inside, gives)],
            [one.name for one in takes],
            gives,
            not begin,
            {**layers, **self.own.owned(attributes)},
        )

    def _needed(self, place: int) -> list[fx.Node]:
        """Return the values that are computed before an operation and used by it or a later operation."""
        later = {*self.nodes[place:], self.result}
        before = [*self.inputs, *self.nodes[:place]]
        return self._in_order(one for one in before if not later.isdisjoint(one.users))

    def _operations(self, inside: list[fx.Node], gives: Any) -> Iterator[Operation]:
        needed = set(_names(gives))
        last = {one: node for node in inside for one in node.all_input_nodes}
        for node in inside:
            over = [one for one in dict.fromkeys(node.all_input_nodes) if last[one] is node]
            over += [] if node.users else [node]
            args, named = _plain(tuple(node.args)), {key: _plain(one) for key, one in node.kwargs.items()}
            freed = tuple(one.name for one in over if one.name not in needed)
            yield Operation(cast("Any", node.op), node.name, node.target, args, named, freed)

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)


class _Own:
    """Parameters and buffers that operations use directly, with the modules that own them."""

    def __init__(self, module: nn.Module, constants: dict[str, Tensor]) -> None:
        self.module, self.constants = module, nn.Module()
        for name, tensor in constants.items():
            self.constants.register_buffer(name, tensor, persistent=False)

    def operation(self, node: fx.Node) -> Operation:
        """Return an operation that reads an attribute."""
        path, name = self._place(node)
        return Operation("get_attr", node.name, (f"{path}'s own", name), (), {})

    def owned(self, nodes: list[fx.Node]) -> dict[str, Owned]:
        """Return the owners of the attributes that ``nodes`` read."""
        names: dict[str, list[str]] = {}
        for node in nodes:
            path, name = self._place(node)
            names.setdefault(path, []).append(name)
        return {
            f"{path}'s own": Owned(
                self.constants if path == "trace" else self.module.get_submodule(path), found
            )
            for path, found in names.items()
        }

    def _place(self, node: fx.Node) -> tuple[str, str]:
        path, _, name = str(node.target).rpartition(".")
        return ("trace", name) if name in self.constants._buffers else (path, name)


# --- tracing ---


class _Tracer(fx.Tracer):
    """Tracer that traces the calls of only one thread.

    ``kept_whole`` contains the types and IDs of modules to keep whole. ``inside`` is the stack of modules
    around the current operation. After a failure, it is the stack around the failed operation.
    """

    proxy_buffer_attributes = True

    def __init__(self, kept_whole: set[Any]) -> None:
        super().__init__()
        self._kept_whole, self.inside = kept_whole, list[nn.Module]()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True if a module is kept whole."""
        kept = type(m) in self._kept_whole or id(m) in self._kept_whole or isinstance(m, (Stash, Pop))
        return kept or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call of a module.

        fx intercepts the calls of all threads, so calls from other threads are passed on unchanged.
        """
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        self.inside.append(m)
        found = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return found

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module: a proxy while tracing, the attribute itself in other threads."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Create proxies for the arguments without defaults."""
        args: list[Any] = [self.root]
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD or parameter.default is not parameter.empty:
                continue
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise TypeError(f"forward takes {parameter}, whose values are unknown before the call")
            args.append(self.create_proxy("placeholder", parameter.name, (), {}))
        return root_fn, args


def _traced(module: nn.Module) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return the graph, and the tensors that the forward pass creates, by name."""
    kept_whole: set[Any] = set()
    while True:
        graphs = []
        for training in (True, False):
            tracer = _Tracer(kept_whole)
            try:
                graphs.append(_once(tracer, module, training))
            except Exception as error:
                if not _keep_innermost_whole(tracer.inside, kept_whole):
                    raise TypeError(
                        f"Sequential: forward of {type(module).__name__} cannot be traced "
                        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); move "
                        "branches that depend on values into a separate layer, or pass a list of layers"
                    ) from error
                break
        if len(graphs) == 2:
            differs = _difference(*graphs)
            if differs is None:
                return graphs[0][:2]
            if not _keep_innermost_whole(differs, kept_whole):
                raise TypeError(
                    f"Sequential: forward of {type(module).__name__} cannot be traced, because its "
                    "operations differ between calls or modes; move such operations into layers such as "
                    "nn.Dropout"
                )


def _once(
    tracer: _Tracer, module: nn.Module, training: bool
) -> tuple[fx.Graph, dict[str, Tensor], nn.Module]:
    modes = [(one, one.training) for one in module.modules()]
    before = set(vars(module))
    try:
        for one, _ in modes:
            one.training = training
        with _makers():
            graph = tracer.trace(module)
        # fx stores tensors that are created during tracing as attributes of the module.
        constants = {name: value for name, value in vars(module).items() if name not in before}
        return graph, {name: value for name, value in constants.items() if isinstance(value, Tensor)}, module
    finally:
        for name in set(vars(module)) - before:
            delattr(module, name)
        for one, mode in modes:
            one.training = mode


@contextmanager
def _makers() -> Iterator[None]:
    """Let functions that create tensors accept proxies in place of numbers."""

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **named: Any) -> Any:
            found = [one for one in (*args, *named.values()) if isinstance(one, fx.Proxy)]
            nested = [one for each in args if isinstance(each, (tuple, list)) for one in each]
            found += [one for one in nested if isinstance(one, fx.Proxy)]
            if not found:
                return function(*args, **named)
            return found[0].tracer.create_proxy("call_function", function, args, named)

        return make

    before = {name: getattr(torch, name) for name in MAKERS}
    try:
        for name, function in before.items():
            setattr(torch, name, taking(function))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def _keep_innermost_whole(inside: Sequence[nn.Module], kept_whole: set[Any]) -> bool:
    """Mark the innermost module that is not kept whole yet. Return False if all modules are kept whole."""
    for one in reversed(inside):
        key = id(one) if type(one) is nn.Sequential else type(one)
        if key not in kept_whole:
            kept_whole.add(key)
            return True
    return False


def _difference(one: Any, other: Any) -> list[nn.Module] | None:
    """Return the modules that contain the first operation that differs; ``None`` if the graphs are equal."""
    (graph, made, module), (second, made_second, _) = one, other
    nodes, others = list(graph.nodes), list(second.nodes)
    for node, other_node in zip(nodes, others, strict=False):
        same = (node.op, node.target, str(node.args), str(node.kwargs)) == (
            other_node.op, other_node.target, str(other_node.args), str(other_node.kwargs)
        )  # fmt: skip
        if same and node.op == "get_attr" and node.target in made:
            same = torch.equal(made[node.target], made_second[node.target])
        if not same:
            return [module.get_submodule(path) for path in _around(node) if path]
    return None if len(nodes) == len(others) else []


def _around(node: fx.Node) -> list[str]:
    """Return the paths of the modules that contain an operation, outermost first."""
    return [key.partition("@")[0] for key in node.meta.get("nn_module_stack", {})]


# --- where to cut ---


def _heavy(nodes: list[fx.Node], module: nn.Module) -> list[int]:
    """Return the indices of the operations that have parameters.

    The first index is replaced with 0, because the first segment begins at the first operation.
    """
    found = [
        place
        for place, node in enumerate(nodes)
        if any(one.op == "get_attr" for one in node.all_input_nodes)
        or (
            node.op == "call_module"
            and any(True for _ in module.get_submodule(str(node.target)).parameters())
        )
    ]
    return [0, *found[1:]]


def _begin(nodes: list[fx.Node], name: Any) -> int:
    """Return the index of a layer's first operation."""
    for place, node in enumerate(nodes):
        paths = [str(node.target), *_around(node)] if node.op == "call_module" else _around(node)
        if any(path == name or path.startswith(f"{name}.") for path in paths):
            return place
    known = dict.fromkeys(path for node in nodes for path in _around(node) if path)
    raise ValueError(
        "Sequential: parts must name layers that forward() calls "
        f"({', '.join(map(repr, list(known)[:20]))}), got {short(name)}"
    )


def _label(node: fx.Node, line: nn.Sequential) -> str:
    """Return a name for a segment: the name of the segment's first layer, if there is one.

    Dots are replaced, because names must not contain any.
    """
    path = str(node.target) if node.op == "call_module" else next(reversed(_around(node)), "") or node.name
    name = label = path.replace(".", "/")
    while label in line._modules:
        label = f"{name} {len(line)}"
    return label


def _several(nodes: list[fx.Node]) -> Any:
    names = [Name(node.name) for node in nodes]
    return names[0] if len(names) == 1 else tuple(names)


def _names(value: Any) -> list[str]:
    if isinstance(value, Name):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [name for one in inner for name in _names(one)]


def _plain(value: Any) -> Any:
    """Convert an argument: replace nodes with names, and fx's containers with plain ones."""
    if isinstance(value, fx.Node):
        return Name(value.name)
    if isinstance(value, tuple):
        return tuple(map(_plain, value)) if type(value) is tuple else type(value)(*map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    return value


def _cloned(value: Any) -> Any:
    return mapped(Tensor.clone, value)


def _near(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        left.shape == right.shape and torch.allclose(left, right, 1e-3, 1e-5, equal_nan=True)
        for left, right in zip(one, other, strict=True)
    )
