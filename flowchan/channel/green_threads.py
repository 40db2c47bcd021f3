"""Reject green threads of gevent and eventlet, because a native wait would block all of them."""

from __future__ import annotations

import sys

_PATCHERS = (
    ("gevent.monkey", "is_module_patched", "threading", "gevent.monkey.patch_all(thread=False)"),
    ("eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
)
"""For each library: the module that patches, its function that reports whether a module is patched, the
argument for that function, and the remedy."""


def refuse_green_threads() -> None:
    """Raise ``RuntimeError`` if gevent or eventlet has replaced this program's threads with green threads."""
    for module, is_patched, threads, remedy in _PATCHERS:
        patcher = sys.modules.get(module)
        if patcher is not None and getattr(patcher, is_patched)(threads):
            library = module.partition(".")[0]
            raise RuntimeError(
                f"Channel: threads must not be patched by {library}, because a waiting put would block all "
                f"of its green threads; call {remedy}"
            )
