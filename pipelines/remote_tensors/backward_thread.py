"""Run backward passes in the calling thread where the C++ device guard is missing.

torch runs the backward operations of a device on a separate thread. The autograd engine starts the threads
for all devices at its first backward pass. The engine therefore aborts the program if a node starts later.
The engine also aborts the program for ``remote:1``, because torch's guard for Python devices knows only one
device. The C++ guard keeps backward passes in the calling thread. Where no compiler is available for the C++
guard, this module has the same effect.
"""

from __future__ import annotations

from typing import Any

import torch

from flowchan_torch.native import start_engine


def stay_in_calling_thread() -> None:
    """Replace the function through which ``torch.autograd`` starts the engine. Later calls have no effect."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward
    if getattr(engine, "_remote", False):
        return
    start_engine()

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    run._remote = True  # type: ignore[attr-defined]
    autograd._engine_run_backward = run
