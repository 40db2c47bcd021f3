"""Starting a worker's process so that nothing is left of it when that fails, and so that the next one starts
sooner.

``multiprocessing`` leaves the pipes of a process open that could not be started, and a process unreaped that
could not be told what to do. Which they are stands in the frames of its launch, and the exception has those.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from multiprocessing.process import BaseProcess
from typing import Any

PIPES = ("parent_r", "parent_w", "child_r", "child_w", "alive_r", "alive_w", "w")
"""What CPython's launches call the ends of their pipes."""


def start_process(process: BaseProcess) -> None:
    """Starts it, or raises and has undone everything."""
    if process._start_method == "forkserver":  # type: ignore[attr-defined]
        _leave_the_parents_server()
        _share_imports()
    try:
        process.start()
    except BaseException as error:
        _undo_launch(error)
        raise


def start_server() -> None:
    """Starts Python's forkserver, where new processes come from it, unless it runs already. It keeps the
    standard streams that it begins with."""
    # without settling the default one, which the program may still change
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "forkserver":
        from multiprocessing import forkserver

        _leave_the_parents_server()
        _share_imports()
        forkserver.ensure_running()


def forkserver_pid() -> int | None:
    """Of Python's forkserver, if one runs; its module is slow to import."""
    module = sys.modules.get("multiprocessing.forkserver")
    return module._forkserver._forkserver_pid if module else None


def _leave_the_parents_server() -> None:
    """In a child that the program has forked by itself, Python takes its parent's forkserver for its own, and
    fails, for it can't wait for it. The child gets one of its own. Under Python's own lock, which whoever
    starts a process from a server takes next anyway: several threads may come here at once."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with server._lock:
        if server._forkserver_pid is None:
            return
        try:
            os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            os.close(server._forkserver_alive_fd)
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _share_imports() -> None:
    """Python's forkserver, if it is yet to be started, imports what each worker needs, so that none of them
    has to: our modules, and those of the large libraries that the program has imported. Unless the program
    has said what it is to import."""
    from multiprocessing import forkserver

    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        loaded = [name for name in ("numpy", "torch") if name in sys.modules]
        multiprocessing.set_forkserver_preload(["__main__", "flowchan.run.worker.process_main", *loaded])


def _undo_launch(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "multiprocessing.forkserver" and function == "connect_to_new_process":
            if "child_r" not in frame.f_locals:  # else it has closed them itself
                _close(frame.f_locals)
        elif module == "multiprocessing.forkserver" and function == "ensure_running":
            if "fds_to_pass" not in frame.f_locals:  # likewise
                _close(frame.f_locals)
        elif module.startswith("multiprocessing.popen_") and function == "_launch":
            _undo_popen(frame.f_locals)


def _undo_popen(names: dict[str, Any]) -> None:
    popen: Any = names["self"]
    if getattr(popen, "pid", None):
        popen.kill()
        popen.wait()
    if popen.finalizer is not None:
        popen.close()
        return
    _close(names)
    if "w" in names:
        os.close(popen.sentinel)


def _close(names: dict[str, Any]) -> None:
    for name in PIPES:
        if isinstance(names.get(name), int):
            with contextlib.suppress(OSError):
                os.close(names[name])
