"""What torch runs when it is imported: tells it of the backend ``"flowchan"`` of torch.distributed, and
imports nothing of flowchan's before that is used. So it stands beside flowchan, not in it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def register() -> None:
    """Called at the end of ``import torch``."""
    distributed: Any = sys.modules.get("torch.distributed")
    # Torch may have been built without it, or have it otherwise: to import torch has to work all the same.
    with contextlib.suppress(Exception):
        distributed.Backend.register_backend("flowchan", _process_group, devices=["cpu"])


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from flowchan.collective.torch.backend import ProcessGroup

    return ProcessGroup(store, rank, size, timeout)
