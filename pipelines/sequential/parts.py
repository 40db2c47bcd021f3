"""Divide an ``nn.Sequential`` into parts: consecutive layers, which keep their names in ``state_dict``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.pipelines.sequential.shared_memory import SharedModule
from flowchan.pipelines.sequential.skip import Skips, skip_store
from flowchan.pipelines.sequential.tensor_trees import Inputs, mapped

MOST_DRAWN = 6
"""Maximum number of lines for the layers of one part in a picture."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a module.

    ``number`` is the part's number, from 0. The layers compute on ``device``; if it is ``None``, they compute
    where their parameters are. ``remote`` is true if the part runs on another host, with copies of the
    tensors.
    """

    number: int
    module: nn.Sequential
    device: torch.device | None = None
    remote: bool = False

    @property
    def name(self) -> str:
        """Name of the stage, such as ``part 0``."""
        return f"part {self.number}"

    @property
    def drawn(self) -> str:
        """Label for pictures: the layers and the number of parameters."""
        kinds = [f"{name}: {type(layer).__name__}" for name, layer in self.module._modules.items()]
        if len(kinds) > MOST_DRAWN:
            kinds[MOST_DRAWN - 2 : -1] = [f"… {len(kinds) - MOST_DRAWN + 1} more …"]
        numbers = sum(parameter.numel() for parameter in self.module.parameters())
        return "\n".join([*kinds, f"{numbers:,} parameters"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the part for another process or host."""
        return Part, (self.number, SharedModule(self.module, self.remote), self.device, self.remote)

    def __str__(self) -> str:
        names = list(self.module._modules)
        layers = f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
        return f"part {self.number} ({layers})"


Casting = tuple[tuple[str, torch.dtype, bool], ...]
"""Arguments of ``torch.autocast``: the device type, the dtype of casts, and whether casts are cached."""


def current_casting() -> Casting:
    """Return the current state of ``torch.autocast`` in this thread."""
    keeps = torch.is_autocast_cache_enabled()
    return tuple(
        (name, torch.get_autocast_dtype(name), keeps)
        for name in ("cpu", "cuda", "xpu", "mps")
        if torch.is_autocast_enabled(name)
    )


@contextlib.contextmanager
def cast_as(casting: Casting) -> Iterator[None]:
    """Enter ``torch.autocast`` for each device type."""
    with contextlib.ExitStack() as stack:
        for device, kind, keeps in casting:
            stack.enter_context(torch.autocast(device, dtype=kind, cache_enabled=keeps))
        yield


def run_part(part: Part, value: Any, skips: Skips, keep: bool = True) -> tuple[Any, Skips]:
    """Run a part, and return its output and the skips for later parts.

    ``keep`` means that the input must not be changed, because it may have other readers. An input from
    another process has no other readers.
    """
    if part.device is not None:
        value, skips = mapped(lambda tensor: tensor.to(part.device), (value, skips))
    if keep and may_write(part.module):
        value = mapped(Tensor.clone, value)
    with skip_store(skips) as remaining:
        return called(part.module, value), remaining


def called(module: nn.Sequential, value: Any) -> Any:
    """Call the layers in order. Only the first layer may take several arguments."""
    if type(value) is not Inputs:
        return module(value)
    first, *others = module
    found = first(*value.args, **value.named)
    for layer in others:
        found = layer(found)
    return found


def may_write(module: nn.Module) -> bool:
    """Return True if the module may change its input in place.

    A torch layer that has parameters and no hooks does not change its input. The output is new memory, which
    later layers may change. Every other layer is assumed to change its input.
    """
    while isinstance(module, nn.Sequential) and len(module) and not module._forward_pre_hooks:
        module = module[0]
    if module._forward_pre_hooks or module._forward_hooks:
        return True
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or next(module.parameters(recurse=False), None) is None


def is_plain_torch(module: nn.Module) -> bool:
    """Return True if the module consists only of torch layers without hooks.

    Such a module contains no ``Stash`` or ``Pop``.
    """
    return not any(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or not type(layer).__module__.startswith("torch.nn.modules.")
        for layer in module.modules()
    )


def divided(
    module: nn.Sequential,
    counts: Sequence[int],
    devices: Sequence[torch.device] | None = None,
    remote: bool = False,
) -> list[Part]:
    """Divide a module into parts with ``counts`` layers each.

    The parts contain the module's own layers, not copies.
    """
    layers = list(module._modules.items())  # named_children() would skip the second occurrence of a layer
    ends = list(accumulate(counts, initial=0))
    parts = []
    for number, (start, end) in enumerate(pairwise(ends)):
        inner = nn.Sequential(OrderedDict(layers[start:end]))
        inner.training = module.training  # a new container starts in training mode
        parts.append(Part(number, inner, devices[number] if devices is not None else None, remote))
    return parts


def compute_threads(processes: int, forked: bool | None = None) -> int:
    """Return the number of compute threads for each of several processes.

    Together, the processes have about one compute thread per core.

    OpenMP threads do not survive a fork. A process that was ``forked`` after torch had been loaded therefore
    computes with one thread.
    """
    forked = forks() if forked is None else forked
    return 1 if forked else max(1, len(os.sched_getaffinity(0)) // processes)


def take_cores(number: int, processes: int, hosts: int = 0) -> None:
    """Pin this process to its share of the cores, if there are at least ``processes`` cores.

    Parts wake each other for each micro-batch. The scheduler tends to place the woken process on the core of
    the process that woke it. In tests without pinning, two parts sometimes shared one core for seconds while
    another core was idle. If ``hosts`` is given, processes are assigned to the hosts in round-robin order. An
    agent has not loaded torch, so its forked processes can use several threads.
    """
    if hosts:
        number, processes = number // hosts, len(range(number % hosts, processes, hosts))
    torch.set_num_threads(compute_threads(processes, forked=False if hosts else None))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= processes:
        # Some containers forbid pinning. The operating system then distributes the processes.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[number::processes])


def forks() -> bool:
    """Return True if processes are started by fork. This call does not fix the program's start method."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"
