"""Start a worker process faster, and release everything if the start fails.

After a failed start, ``multiprocessing`` leaves the pipes to the process open. If ``multiprocessing`` could
start the process but not send its task, it does not reap the process either. This module finds the pipes and
the process in the frames of the error's traceback.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

PIPES = ("parent_r", "parent_w", "child_r", "child_w", "alive_r", "alive_w", "w")
"""Variables of CPython's launch functions that hold the ends of the pipes."""


def start_process(process: BaseProcess) -> None:
    """Start a process. On an error, release its resources and raise the error."""
    if process._start_method == "forkserver":  # type: ignore[attr-defined]
        _leave_the_parents_server()
        _share_imports()
    elif process._start_method == "fork":  # type: ignore[attr-defined]
        process._bootstrap = functools.partial(_run_child, type(process)._bootstrap, process)  # type: ignore[attr-defined]
    try:
        process.start()
    except BaseException as error:
        _undo_launch(error)
        raise
    finally:
        # Remove the attribute, because it forms a reference cycle with the process.
        process.__dict__.pop("_bootstrap", None)


def _run_child(bootstrap: Callable[..., int], process: BaseProcess, **options: Any) -> int:
    """Run a forked child with a new ``sys.stdin``.

    ``multiprocessing`` closes the ``sys.stdin`` of the child. If another thread of the program was reading
    ``sys.stdin`` during the fork, the lock of ``sys.stdin`` would never be released in the child.
    ``_inherited`` keeps the old object alive, so that nothing closes it.
    """
    if sys.stdin is not None:
        _inherited.append(sys.stdin)
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    return bootstrap(process, **options)


_inherited: list[Any] = []


def start_server() -> None:
    """Start Python's forkserver if it will start new processes and is not running yet.

    The forkserver and its children use the standard streams that this process has now.
    """
    # Do not fix the default start method here, because the program may still change it.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "forkserver":
        from multiprocessing import forkserver

        _leave_the_parents_server()
        _share_imports()
        forkserver.ensure_running()


def forkserver_pid() -> int | None:
    """Return the process ID of Python's forkserver, or None if it is not running.

    This function does not import the forkserver's module, because that import is slow.
    """
    module = sys.modules.get("multiprocessing.forkserver")
    return module._forkserver._forkserver_pid if module else None


def _leave_the_parents_server() -> None:
    """In a forked child, forget the parent's forkserver, so that the child starts its own.

    Otherwise, Python would use the parent's forkserver and fail, because the child cannot wait for that
    process. Several threads may call this function at once. This function therefore holds Python's own lock
    for the forkserver.
    """
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
    """Let Python's future forkserver import flowchan and, if they are loaded here, numpy and torch.

    The workers then inherit the imported modules, including those of ``flowchan.Graph``, which most programs
    import. If the program has set a list of modules itself, this function does not change it.
    """
    from multiprocessing import forkserver

    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        loaded = [name for name in ("numpy", "torch") if name in sys.modules]
        own = ("flowchan.run.worker.stack_file", "flowchan.run.worker.process_main", "flowchan.run.graph")
        multiprocessing.set_forkserver_preload(["__main__", *own, *loaded])


def _undo_launch(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "multiprocessing.forkserver" and function == "connect_to_new_process":
            if "child_r" not in frame.f_locals:  # otherwise, CPython itself has closed the pipes
                _close(frame.f_locals)
        elif module == "multiprocessing.forkserver" and function == "ensure_running":
            if "fds_to_pass" not in frame.f_locals:  # otherwise, CPython itself has closed the pipes
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
