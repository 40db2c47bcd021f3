"""Parts: consecutive layers of an ``nn.Sequential``, which keep their names, so that the keys of
``state_dict`` do too."""

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

from flowchan.pipelines.sequential.shared_memory import Lent
from flowchan.pipelines.sequential.skip import Skips, skip_store
from flowchan.pipelines.sequential.tensor_trees import Inputs, mapped

MOST_DRAWN = 6
"""Lines for the layers of a part in a picture."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some consecutive layers, counted from 0 on. ``device`` is where they compute; ``None``: where they
    are. ``away``: they compute on another host, with copies of the numbers."""

    number: int
    module: nn.Sequential
    device: torch.device | None = None
    away: bool = False

    @property
    def name(self) -> str:
        """``part 0``."""
        return f"part {self.number}"

    @property
    def drawn(self) -> str:
        """Its layers and parameters, for pictures."""
        kinds = [f"{name}: {type(layer).__name__}" for name, layer in self.module._modules.items()]
        if len(kinds) > MOST_DRAWN:
            kinds[MOST_DRAWN - 2 : -1] = [f"… {len(kinds) - MOST_DRAWN + 1} more …"]
        numbers = sum(parameter.numel() for parameter in self.module.parameters())
        return "\n".join([*kinds, f"{numbers:,} parameters"])

    def __reduce__(self) -> tuple[Any, ...]:
        """On its way to a process."""
        return Part, (self.number, Lent(self.module, self.away), self.device, self.away)

    def __str__(self) -> str:
        names = list(self.module._modules)
        layers = f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
        return f"part {self.number} ({layers})"


Casting = tuple[tuple[str, torch.dtype, bool], ...]
"""The arguments of ``torch.autocast``: the type of device, the type that operations are cast to if they can
take it, and whether casts are kept."""


def casting_here() -> Casting:
    """The state of ``torch.autocast`` in this thread."""
    keeps = torch.is_autocast_cache_enabled()
    return tuple(
        (name, torch.get_autocast_dtype(name), keeps)
        for name in ("cpu", "cuda", "xpu", "mps")
        if torch.is_autocast_enabled(name)
    )


@contextlib.contextmanager
def cast_as(casting: Casting) -> Iterator[None]:
    """Enter ``torch.autocast`` for each device."""
    with contextlib.ExitStack() as stack:
        for device, kind, keeps in casting:
            stack.enter_context(torch.autocast(device, dtype=kind, cache_enabled=keeps))
        yield


def run_part(part: Part, value: Any, skips: Skips, keep: bool = True) -> tuple[Any, Skips]:
    """What comes out of a part, and the skips that travel on behind it. ``keep``: the value that came in is
    left as it is, for others may read it too; what came from another process is the part's own."""
    if part.device is not None:
        value, skips = mapped(lambda tensor: tensor.to(part.device), (value, skips))
    if keep and may_write(part.module):
        value = mapped(Tensor.clone, value)
    with skip_store(skips) as left:
        return called(part.module, value), left


def called(module: nn.Sequential, value: Any) -> Any:
    """What the layers make of a value, of which the first may have several arguments."""
    if type(value) is not Inputs:
        return module(value)
    first, *others = module
    found = first(*value.args, **value.named)
    for layer in others:
        found = layer(found)
    return found


def may_write(module: nn.Module) -> bool:
    """Whether the module may change its input in place. A layer of torch's own with parameters and without
    hooks doesn't, and what comes behind it works in new memory; of anything else it is not known."""
    while isinstance(module, nn.Sequential) and len(module) and not module._forward_pre_hooks:
        module = module[0]
    if module._forward_pre_hooks or module._forward_hooks:
        return True
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or next(module.parameters(recurse=False), None) is None


def is_torchs_own(module: nn.Module) -> bool:
    """Whether it consists of torch's own layers only, without hooks: nothing in it stashes or pops."""
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
    away: bool = False,
) -> list[Part]:
    """The parts of a module, ``counts`` layers each. They hold the module's own layers, no copies."""
    layers = list(module._modules.items())  # named_children() would leave a layer out that is there twice
    ends = list(accumulate(counts, initial=0))
    parts = []
    for number, (start, end) in enumerate(pairwise(ends)):
        inner = nn.Sequential(OrderedDict(layers[start:end]))
        inner.training = module.training  # the container's own flag; True in a new one
        parts.append(Part(number, inner, devices[number] if devices is not None else None, away))
    return parts


def compute_threads(processes: int, forked: bool | None = None) -> int:
    """How many threads each of some processes computes with, so that together they use every core once.
    OpenMP's threads do not survive a fork, so a process computes with one that is ``forked`` after torch was
    loaded."""
    forked = forks() if forked is None else forked
    return 1 if forked else max(1, len(os.sched_getaffinity(0)) // processes)


def take_cores(number: int, processes: int, hosts: int = 0) -> None:
    """Gives this process, number ``number`` of some that work together, its share of the cores, where there
    is one for each. Parts wake each other for each micro-batch, and the system likes to run who is woken
    beside who woke it: without this two parts were seen to share one core for seconds while another was
    idle. The processes may be on so many ``hosts``, in turn; an agent has not loaded torch."""
    if hosts:
        number, processes = number // hosts, len(range(number % hosts, processes, hosts))
    torch.set_num_threads(compute_threads(processes, forked=False if hosts else None))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= processes:
        # some containers refuse it; the parts are then placement_argument by the system
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[number::processes])


def forks() -> bool:
    """Whether processes are started by a fork. Asking does not decide it for the program."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"
