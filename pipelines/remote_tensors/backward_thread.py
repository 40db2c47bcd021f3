"""Run backward passes in the calling thread if the C++ device guard is missing.

torch runs the backward operations of a device in a thread of that device. The engine starts one thread for
each device at its first backward pass, and therefore aborts for nodes that start later. It also aborts for
``remote:1``, because torch's guard for devices in Python has one device. The C++ guard keeps passes in the
calling thread. This module does so without a compiler.
"""

from __future__ import annotations

from typing import Any

import torch


def stay_in_calling_thread() -> None:
    """Replace the function by which ``torch.autograd`` starts the engine, once."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward
    if getattr(engine, "_remote", False):
        return
    # Start the engine before the device type exists: forks of a process that has
    # device threads cannot run backward passes.
    with torch.inference_mode(False), torch.enable_grad():
        loss: Any = torch.ones(1, device="cpu", requires_grad=True).sum()
        loss.backward()

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    run._remote = True  # type: ignore[attr-defined]
    autograd._engine_run_backward = run
