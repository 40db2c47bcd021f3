"""Transfer bytes, descriptors and device memory to other processes and hosts.

Public names are imported on first use, because every program imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowchan.transport.sockets import SocketListener, connect, listen

__all__ = ["SocketListener", "connect", "listen"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("flowchan.transport.sockets"), name)
