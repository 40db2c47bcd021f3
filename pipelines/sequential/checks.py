"""Check a pipe's arguments before anything starts.

Each error names the argument, its value, the allowed values, and the remedy.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowchan.declare.placements import Placement
from flowchan.items.arguments import is_whole
from flowchan.items.text import short, shown
from flowchan.items.unpicklable import refusal, smallest
from flowchan.pipelines.sequential.parts import Part, forks, run_part
from flowchan.pipelines.sequential.pipe_options import SequentialSettings
from flowchan.pipelines.sequential.skip import Pop, Stash
from flowchan.pipelines.sequential.tensor_trees import batch_size, leaves, mapped

BALANCES = ("time", "memory")
PLACEMENTS = ("thread", "process")
FSDP = "torch.distributed.fsdp"


def checked_module(module: Any) -> nn.Sequential:
    """Check a module or a list of layers, and return it as an ``nn.Sequential``."""
    if not isinstance(module, (nn.Module, Iterable)):
        raise TypeError(f"Sequential: module must be an nn.Module or a list of layers, got {shown(module)}")
    layers: Any = module if isinstance(module, nn.Sequential) else list(module)  # type: ignore[arg-type]
    for place, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"Sequential: layer {place} of module must be an nn.Module, got {shown(layer)}")
    if not len(layers):
        raise ValueError("Sequential: module must have at least one layer, got none")
    if isinstance(layers, nn.Sequential):
        check_container(layers)
    whole = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
    raise_if_lazy(whole)
    _check_skips(whole)
    return whole


def needs_tracing(module: Any) -> bool:
    """Return True if a module has its own ``forward`` and therefore must be traced."""
    if not isinstance(module, nn.Module) or isinstance(module, nn.ModuleList):
        return False
    return not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward


def raise_if_lazy(module: nn.Module) -> None:
    """Raise ``ValueError`` for lazy parameters, which get their shape with the first batch."""
    for name, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"Sequential: parameter {name!r} of module must have a shape, got a lazy parameter; "
                "call module(x) once first"
            )


def counts_by_name(parts: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the number of layers in each part; ``parts`` names the first layers of parts 1, 2, …."""
    for name in parts:
        if name not in names:
            raise ValueError(
                f"Sequential: parts must name layers of the module ({', '.join(map(repr, names))}), "
                f"got {name!r}"
            )
    ends = [0, *map(list(names).index, parts), len(names)]
    counts = [end - begin for begin, end in pairwise(ends)]
    if min(counts) < 1:
        raise ValueError(
            "Sequential: parts must name layers in the module's order, excluding the first layer, got "
            f"{short(list(parts))}"
        )
    return counts


def check_container(module: nn.Sequential) -> None:
    """Check that a container only calls its layers in order, because parts would skip any other code.

    Raises ``TypeError`` if the container has its own ``forward``, and ``ValueError`` if it has hooks.
    """
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"Sequential: module must be a plain nn.Sequential, got {type(module).__name__} with its "
            "own forward, which the parts would not call; move that code into layers"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            "Sequential: module has forward hooks, which the parts would not call; "
            "register them on its layers"
        )


def _check_skips(module: nn.Sequential) -> None:
    """Check that each ``Stash`` is followed by exactly one ``Pop`` with the same name.

    Raises ``ValueError`` for a ``Pop`` without a ``Stash``, a ``Stash`` without a ``Pop``, and two ``Stash``
    layers without a ``Pop`` between them. A layer that is not an ``nn.Sequential`` may contain such layers
    and use them in any order. From then on, names that such a layer uses are not checked.
    """
    stashed: dict[str, str] = {}  # stashed names, each with the path of its Stash layer
    unknown: set[str] = set()
    for path, layer in _in_a_row(module):
        if isinstance(layer, Stash):
            if layer.name in stashed:
                raise ValueError(
                    f"Sequential: layer {path!r}, {layer!r}, repeats the Stash in layer "
                    f"{stashed[layer.name]!r} without a Pop({layer.name!r}) between them; add the Pop, or "
                    "change one of the names"
                )
            stashed[layer.name] = path
        elif isinstance(layer, Pop):
            if stashed.pop(layer.name, None) is None and layer.name not in unknown:
                raise ValueError(
                    f"Sequential: layer {path!r}, {layer!r}, must have its own Stash({layer.name!r}) "
                    "before it, but that Stash is missing or already popped; put one Stash before each Pop"
                )
        else:
            inside = {inner.name for inner in layer.modules() if isinstance(inner, (Stash, Pop))}
            unknown |= inside
            stashed = {name: where for name, where in stashed.items() if name not in inside}
    for name, path in stashed.items():
        raise ValueError(
            f"Sequential: layer {path!r}, Stash({name!r}), has no Pop({name!r}) after it; add one, "
            "or remove the Stash"
        )


def _in_a_row(module: nn.Sequential, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in execution order, including the layers of nested ``nn.Sequential`` containers."""
    for name, layer in module._modules.items():
        assert layer is not None
        if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
            yield from _in_a_row(layer, f"{path}{name}.")
        else:
            yield f"{path}{name}", layer


def checked_counts(parts: Any, layers: int) -> int | list[int]:
    """Return ``parts`` as a number of parts, or as a list with the number of layers in each part."""
    if is_whole(parts):
        if not 1 <= parts <= layers:
            raise ValueError(
                f"Sequential: parts must be between 1 and {layers} (the number of layers), got {parts}"
            )
        return parts
    if isinstance(parts, (str, bool)) or not isinstance(parts, Iterable):
        raise TypeError(
            "Sequential: parts must be an int, or a list of layer counts or of layer names, "
            f"got {shown(parts)}"
        )
    counts = list(parts)
    for count in counts:
        if not is_whole(count) or count < 1:
            raise ValueError(
                f"Sequential: parts={short(counts)} must contain ints of at least 1, the number of "
                f"layers in each part, got {short(count)}"
            )
    if sum(counts) != layers:
        raise ValueError(
            f"Sequential: parts={counts} must add up to {layers}, the number of layers, got {sum(counts)}"
        )
    return counts


def check_switches(**switches: Any) -> None:
    """Check the boolean arguments."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"Sequential: {name} must be True or False, got {shown(value)}")


def check_joining(dim: Any, join: Any) -> None:
    """Check ``dim`` and ``join``."""
    if not is_whole(dim) or dim < 0:
        raise ValueError(f"Sequential: dim must be the batch dimension, a non-negative int, got {shown(dim)}")
    if join is not None and not callable(join):
        raise TypeError(
            f"Sequential: join must be a function that takes a list of micro-batch outputs, got {shown(join)}"
        )


def check_choices(settings: SequentialSettings, counts: int | list[int]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an argument whose value is not allowed."""
    _check_placement(settings.on)
    chunks, balance, sample = settings.chunks, settings.balance, settings.sample
    param_scale: Any = settings.param_scale
    if chunks is not None and not is_whole(chunks):
        raise TypeError(f"Sequential: chunks must be an int of at least 1, or None, got {shown(chunks)}")
    if chunks is not None and chunks < 1:
        raise ValueError(f"Sequential: chunks must be at least 1, got {chunks}; use 1 to send whole batches")
    _check_balance(balance, sample, counts)
    if isinstance(param_scale, bool) or not isinstance(param_scale, (int, float)) or not param_scale >= 0:
        raise ValueError(f"Sequential: param_scale must be a non-negative number, got {shown(param_scale)}")
    if param_scale != 1 and balance != "memory":
        raise ValueError(
            f'Sequential: balance must be "memory" if param_scale is passed, got {shown(balance)}'
        )
    if sample is not None:
        batch_size(sample, "sample", settings.dim)


def _check_placement(on: Any) -> None:
    if isinstance(on, Placement) and on.missing:
        raise ValueError(f"Sequential: {on.missing}")
    is_word = isinstance(on, str) and on in PLACEMENTS
    if not is_word and not (isinstance(on, Placement) and on.hosts):
        raise ValueError(
            f'Sequential: on must be "thread", "process" or a pool from flowchan.hosts, got {shown(on)}'
        )
    if isinstance(on, Placement) and (on.shares or on.by_worker):
        raise ValueError(
            f"Sequential: on must be a pool without shares or assigned hosts, got {on}; use the whole pool, "
            "whose hosts get the parts in turn"
        )


def _check_balance(balance: Any, sample: Any, counts: int | list[int]) -> None:
    if balance is None:
        if sample is not None:
            raise ValueError('Sequential: balance must be "time" or "memory" if sample is passed, got None')
        return
    if not isinstance(balance, str) or balance not in BALANCES:
        raise ValueError(f'Sequential: balance must be "time", "memory" or None, got {shown(balance)}')
    if not isinstance(counts, int):
        raise ValueError(
            f"Sequential: parts must be an int if balance={balance!r} is passed, got {counts}; use "
            f"parts={len(counts)}"
        )
    if sample is None:
        raise ValueError(
            f"Sequential: sample must be a typical batch if balance={balance!r} is passed, got None"
        )


def checked_devices(devices: Any, parts: int, on: Placement) -> list[torch.device] | None:
    """Return one device for each part.

    Devices on this host must exist. Devices on other hosts cannot be checked here.
    """
    if devices is None:
        return None
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(
            f"Sequential: devices must be a list with one device for each part, got {shown(devices)}"
        )
    if len(devices) != parts:
        raise ValueError(
            f"Sequential: devices must have {parts} entries, one for each part, "
            f"got {len(devices)}: {shown(devices)}"
        )
    found = [torch.device(name) if on.hosts else _device(name) for name in devices]
    if on.own_process and not on.hosts and forks() and any(device.type == "cuda" for device in found):
        # Receiving an output initialises CUDA in the program. After that, the program must not fork more
        # workers.
        raise ValueError(
            f"Sequential: devices={short(devices)} cannot be used in forked processes, because CUDA does not "
            'survive a fork; call multiprocessing.set_start_method("spawn") first, or use on="thread"'
        )
    return found


def _device(name: Any) -> torch.device:
    """Return the device with this name, if it can be used.

    ``meta`` tensors have no values, so that device is rejected. CUDA devices are only counted, because a
    part's process may have to be the first to initialise CUDA.
    """
    usable = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
        if device.type == "meta" or (
            device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
        ):
            raise RuntimeError("no such device")
        if device.type not in ("cpu", "cuda"):
            torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"Sequential: devices must contain only usable devices ({', '.join(usable)}), got "
            f"{short(name)} ({reason})"
        ) from None
    return device


# --- layers that FSDP shards ---

# FSDP gathers parameters for a whole call and reduces their gradients once. FSDP can therefore wrap a whole
# pipe whose parts are on threads. Inside a pipe, FSDP would gather and reduce once per micro-batch, and the
# gradients would be wrong.


def refuse_sharded_layers(module: nn.Module) -> None:
    """Raise ``TypeError`` for layers that FSDP shards individually."""
    fsdp = sys.modules.get(FSDP)
    kinds = tuple(
        kind
        for kind in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None))
        if kind is not None
    )
    if not kinds:
        return
    if "_flat_param" in module._parameters:
        raise TypeError(
            "Sequential: FSDP has replaced the parameters of the layers, so a pipe cannot find them; "
            "use use_orig_params=True"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, kinds):
            what = f"layer {name!r}" if name else "module"
            raise TypeError(
                f"Sequential: {what} must not be sharded separately by FSDP, because its parameters "
                "would be gathered for each micro-batch; shard the whole pipe instead with "
                "fully_shard(pipe)"
            )


def refuse_sharded(module: nn.Module, pipe: str, remedy: str) -> None:
    """Raise ``TypeError`` if FSDP wraps the pipe and has sharded its parameters."""
    if FSDP not in sys.modules:
        return
    for name, layer in module.named_modules():
        if _is_sharded(layer):
            named = f"layer {name!r}" if name else "module"
            raise TypeError(
                f"Sequential: FSDP wraps the pipe and has sharded the parameters of {named}, but {pipe} "
                f"does not support sharded parameters; {remedy}"
            )


def _is_sharded(layer: nn.Module) -> bool:
    """Return True if FSDP 1 or 2 manages the layer's parameters, whether or not they are gathered."""
    hooks = layer._state_dict_pre_hooks.values()
    return any(getattr(hook, "__module__", "").startswith(FSDP) for hook in hooks) or any(
        hasattr(tensor, "_local_tensor") or getattr(tensor._base, "_fsdp_flattened", False)
        for tensor in layer._parameters.values()
        if tensor is not None
    )


# --- pickling ---


def check_sendable(parts: Sequence[Part]) -> None:
    """Raise ``TypeError`` if a layer cannot be pickled. The message names the layer and the attribute."""
    for part in parts:
        for name, layer in part.module._modules.items():
            if layer is not None and (reason := _refusal(layer)) is not None:
                path, culprit, reason = smallest(layer, reason, _refusal, _children)
                raise TypeError(
                    f"Sequential: layer {name!r} ({type(layer).__name__}) of {part.name} must be picklable, "
                    f"got {''.join([name, *path])} of type {type(culprit).__name__} ({reason}); "
                    'create it in forward(), or use on="thread"'
                )


class _Weightless(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickler that omits the values of tensors, because they may be large and can always be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, Tensor) else super().reducer_override(obj)


def _refusal(value: Any) -> str | None:
    return refusal(value, _Weightless)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of a module or container, each with its notation in source code.

    A module's children are its submodules and attributes; a container's children are its elements.
    """
    if isinstance(value, nn.Module):
        yield from ((f".{name}", child) for name, child in value.named_children())
        yield from ((f".{name}", child) for name, child in vars(value).items() if name != "_modules")
    elif isinstance(value, dict):
        yield from ((f"[{short(key)}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", child) for place, child in enumerate(value))


# --- batch dimension ---


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations in matrix products and similar functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and count its floating-point operations."""
        out = func(*args, **(kwargs or {}))
        operations = flop_registry.get(func._overloadpacket)
        if operations is not None:
            self.count += operations(*args, **(kwargs or {}), out_val=out)
        return out


def check_shapes(module: nn.Sequential, micro: Any, dim: int = 0) -> list[float] | None:
    """Check the shape of each layer's output by running the layers on ``meta`` tensors, which have no values.

    Returns the operations per sample of each layer, or ``None`` if they are unknown. Raises ``TypeError`` if
    the output is not made of tensors, and ``ValueError`` if it does not have one row per sample. Both errors
    name the layer. If a layer cannot run on ``meta``, the check ends without an error.
    """
    samples = batch_size(micro, dim=dim)
    for size in (samples, samples + 1):  # two sizes, because one could match by coincidence
        counts = _check_run(module, mapped(partial(_without_numbers, size, dim), micro), size, dim)
    return [count / size for count in counts] if any(counts) else None


def _without_numbers(samples: int, dim: int, tensor: Tensor) -> Tensor:
    shape = (*tensor.shape[:dim], samples, *tensor.shape[dim + 1 :])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _check_run(module: nn.Sequential, value: Any, samples: int, dim: int) -> list[int]:
    """Return the number of operations of each layer, or an empty list if a layer could not run."""
    counts: list[int] = []
    skips: dict[str, Tensor | None] = {}
    culprit: str | None = None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, (name, layer) in enumerate(module._modules.items()):
            assert layer is not None
            part = Part(number, nn.Sequential())
            try:
                part.module.add_module(name, _meta_copy(layer))
                with _Operations() as operations:
                    value, skips = run_part(part, value, skips)
            # The layer does not support meta tensors or copies, or it fails. In the last case, the run will
            # report the error.
            except Exception:
                return []
            counts.append(operations.count)
            wrong = _first_wrong(value, samples, dim)
            culprit = None if wrong is None else culprit or f"layer {name!r} ({type(layer).__name__})"
    if wrong is None:
        return counts
    path, leaf = wrong
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"Sequential: {path} must be a tensor, got {shown(leaf)} from {culprit}; return tensors, or "
            "tuples, lists or dicts of them"
        )
    raise ValueError(
        f"Sequential: {culprit} must keep the batch dimension of {samples}, got shape {tuple(leaf.shape)} "
        f"of {path}; change the layer, or apply it to the joined output"
    )


def _first_wrong(value: Any, samples: int, dim: int) -> tuple[str, Any] | None:
    """Return the first leaf that could not be joined with the corresponding leaves of other micro-batches."""
    for path, leaf in leaves(value, "the output"):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != samples:
            return path, leaf
    return None


def _meta_copy(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer whose parameters and buffers have shapes but no values.

    Other threads may be using the layer itself, so it is never changed, not even temporarily.
    """
    memo: dict[int, Any] = {id(tensor): tensor.to("meta") for tensor in layer.buffers()}
    memo |= {
        id(tensor): nn.Parameter(tensor.to("meta"), requires_grad=False) for tensor in layer.parameters()
    }
    return copy.deepcopy(layer, memo)
