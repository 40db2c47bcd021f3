"""Run backward passes in the calling thread if the C++ device guard is missing.

torch runs the backward operations of a device in a thread of that device. The engine starts one thread for
each device at its first backward pass, and therefore aborts for nodes that start later. It also aborts for
``remote:1``, because torch's guard for devices in Python has one device. The C++ guard keeps passes in the
calling thread. This module does so without a compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from flowchan_torch.native import start_engine


def stay_in_calling_thread() -> None:
    """Replace the function by which ``torch.autograd`` starts the engine, once."""
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
