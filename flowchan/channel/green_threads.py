"""Refuse threads that gevent or eventlet has replaced. A native wait blocks all of them."""

from __future__ import annotations

import sys

_PATCHERS = (
    ("gevent.monkey", "is_module_patched", "threading", "gevent.monkey.patch_all(thread=False)"),
    ("eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
)
"""Module, its function that tells whether a module is patched, that module, and the call that leaves threads
alone."""


def refuse_green_threads() -> None:
    """Raise ``RuntimeError`` if the threads of this program are green threads."""
    for module, is_patched, threads, remedy in _PATCHERS:
        patcher = sys.modules.get(module)
        if patcher is not None and getattr(patcher, is_patched)(threads):
            library = module.partition(".")[0]
            raise RuntimeError(
                f"Channel: threads must be those of Python, got green threads of {library}, which one "
                f"waiting put would block for good; call {remedy}"
            )
