"""Run backward passes in the thread that calls them.

torch runs the backward operations of a device in a thread of that device, and it starts these threads when the
first backward pass begins. A device type in Python has one device only as far as torch's engine knows, so the
engine aborts for ``remote:1``. Commands are issued by the calling thread anyway, and no kernel runs in this
process, so device threads would give no speed.
"""

from __future__ import annotations

from typing import Any

import torch


def stay_in_calling_thread() -> None:
    """Replace the function by which ``torch.autograd`` starts the engine, once."""
    engine = torch.autograd._engine_run_backward
    if getattr(engine, "_remote", False):
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    run._remote = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run
