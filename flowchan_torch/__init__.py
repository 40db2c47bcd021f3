"""Register the backend ``"flowchan"`` when torch is imported.

torch finds this package through its entry point. The package is separate from flowchan so that ``import
torch`` does not import flowchan. The backend imports flowchan on first use.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def register() -> None:
    """Register the backend; torch calls this function at the end of ``import torch``."""
    distributed: Any = sys.modules.get("torch.distributed")
    # Importing torch must not fail just because it lacks ``distributed`` or has an unexpected version.
    with contextlib.suppress(Exception):
        distributed.Backend.register_backend("flowchan", _process_group, devices=["cpu"])


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from flowchan.collective.torch.backend import ProcessGroup

    return ProcessGroup(store, rank, size, timeout)
