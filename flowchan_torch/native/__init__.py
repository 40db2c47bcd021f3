"""Compile the C++ files of remote tensors against the installed torch, on first use.

The compiled files are stored in torch's extension folder: ``TORCH_EXTENSIONS_DIR``, or
``~/.cache/torch_extensions`` by default. The names of these files depend on the source and on the versions of
torch and Python. Without a compiler, :func:`load` returns None and logs the reason once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("device_guard.cpp")
COMMANDS = Path(__file__).with_name("command_path.cpp")
_WITHOUT = {
    SOURCE: "an operation that fails in a backward pass ends the process",
    COMMANDS: "the program issues operations more slowly",
}
"""Consequences of a missing compiler, by file."""

_log = logging.getLogger("flowchan.remote_tensors")
_loading = threading.Lock()
_loaded: dict[Path, ModuleType | None] = {}


def load(source: Path = SOURCE) -> ModuleType | None:
    """Load a C++ file, after compiling it if necessary.

    Args:
        source: The source file, ``SOURCE`` (default) or ``COMMANDS``.

    Returns:
        The extension module, or None if the file cannot be compiled here.
    """
    with _loading:
        if source not in _loaded:
            try:
                _loaded[source] = load_file(_compiled(source), source)
            except (OSError, RuntimeError, ImportError) as error:
                _log.warning("remote tensors do not use %s, so %s: %s", source.name, _WITHOUT[source], error)
                _loaded[source] = None
        return _loaded[source]


def load_file(path: Path, source: Path = SOURCE) -> ModuleType:
    """Load a compiled file, after torch's autograd engine has started.

    Args:
        path: The compiled file.
        source: The source file.

    Returns:
        The extension module.
    """
    start_engine()
    loader = importlib.machinery.ExtensionFileLoader(source.stem, str(path))
    spec = importlib.util.spec_from_loader(source.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compile_to(path: Path, flags: Sequence[str] = ("-O2",), source: Path = SOURCE) -> None:
    """Compile a C++ file.

    Args:
        path: Path of the compiled file. The file appears only when it is complete.
        flags: Additional compiler flags.
        source: C++ file to compile.

    Raises:
        RuntimeError: The compiler is missing, or it fails.
    """
    import torch

    root = Path(torch.__file__).parent
    named = os.environ.get("CXX", "g++")
    compiler = shutil.which(named)
    if compiler is None:
        raise RuntimeError(f"the C++ compiler {named!r} is missing; install it, or name another one in CXX")
    abi: Any = torch._C
    own = path.with_suffix(f".{os.getpid()}")
    command = [
        compiler, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *flags,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(abi._GLIBCXX_USE_CXX11_ABI)}",
        "-isystem", str(root / "include"), "-isystem", sysconfig.get_path("include"),
        str(source), "-o", str(own), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[:500]}")
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _compiled(source: Path) -> Path:
    """Return the path of the compiled file for this version of torch and Python."""
    import torch

    key = "|".join((torch.__version__, str(sysconfig.get_config_var("SOABI")), source.read_text()))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / "flowchan"
    path = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path, source=source)
    return path


def start_engine() -> None:
    """Start torch's autograd engine, unless it has already started.

    The engine starts a thread for each device that is known at that moment. The forked children of a process
    with such threads cannot run backward passes. The engine therefore starts before the device type of the
    nodes is registered.
    """
    # Use a new thread, in which none of torch's modes (such as no_grad) is active.
    thread = threading.Thread(target=_first_pass)
    thread.start()
    thread.join()


def _first_pass() -> None:
    import torch

    # In a forked child of a process with engine threads, every backward pass raises this error.
    with contextlib.suppress(RuntimeError):
        loss: Any = torch.ones(1, device="cpu", requires_grad=True).sum()
        loss.backward()
