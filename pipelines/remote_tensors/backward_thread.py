"""Run backward passes in the thread that calls them.

torch runs the backward operations of a device in a thread of that device. It starts the threads at the first
backward pass, one for each device of that time, so it aborts for nodes that start later. A device type in
Python has one device for torch's engine, so it also aborts for ``remote:1``. No kernel runs in this process,
so device threads would give no speed. Forked children could not run backward passes if the engine had such
threads, so the engine starts before the device type is registered.
"""

from __future__ import annotations

from typing import Any

import torch


def stay_in_calling_thread() -> None:
    """Start the engine, and replace the function by which ``torch.autograd`` calls it, once."""
    engine = torch.autograd._engine_run_backward
    if getattr(engine, "_remote", False):
        return
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    run._remote = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run
