"""Run backward passes over two nodes: ``backward_passes.py COUNT [COMPILED FILE]``.

Two threads run passes that cross both nodes and this process. In every tenth pass, an operation raises an
exception in the middle of the pass. At the end, a forked child runs a pass on the CPU. COMPILED FILE is the
C++ part to use.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowchan.pipelines import RemoteNodes
from flowchan_torch import native


class Refusal(Exception):
    """Exception of a refused operation."""


class Refuse(TorchDispatchMode):
    """Mode that refuses matrix products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            raise Refusal
        return func(*args, **kwargs or {})


def loss_of(x: Any, y: Any, here: Any, there: Any) -> Any:
    crossed = (x @ x).mul(2).to(there) * y
    return (crossed.cpu().sum() * 3).to(here) * x.sum()


def passes(nodes: RemoteNodes, count: int, outcomes: list[str]) -> None:
    # in each thread, the last pass gives the same gradients as without nodes
    values = torch.rand(4, 4), torch.rand(4, 4)
    local = [one.clone().requires_grad_() for one in values]
    loss_of(*local, "cpu", "cpu").backward()
    x, y = (one.to(node).requires_grad_() for one, node in zip(values, nodes, strict=True))
    for number in range(count):
        x.grad = y.grad = None
        loss = loss_of(x, y, *nodes)
        try:
            if number % 10 == 9:
                with Refuse():
                    loss.backward()
            else:
                loss.backward()
        except Refusal:
            outcomes.append("refused")
            continue
        same = all(torch.equal(one.grad.cpu(), other.grad) for one, other in zip((x, y), local, strict=True))
        outcomes.append("equal" if same else "different")


def backward_in_fork() -> int:
    pid = os.fork()
    if pid == 0:
        x = torch.ones(3, requires_grad=True)
        x.sum().backward()
        os._exit(0 if x.grad is not None else 1)
    return os.waitpid(pid, 0)[1]


def main(count: int, compiled: str | None) -> None:
    if compiled:
        native._loaded[native.SOURCE] = native.load_file(Path(compiled))
    outcomes: list[str] = []
    with RemoteNodes(2) as nodes:
        threads = [
            threading.Thread(target=passes, args=(nodes, count // 2, outcomes), name=f"passes {number}")
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        forked = backward_in_fork()
    print(dict(Counter(outcomes)), "fork", forked)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
