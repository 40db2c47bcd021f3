"""The C++ part of remote tensors, which is compiled against the installed torch at its first use.

The compiled file is kept in torch's folder for extensions: ``TORCH_EXTENSIONS_DIR``, else
``~/.cache/torch_extensions``. Its name depends on the source, on torch and on Python. Without a compiler
:func:`load` returns None and logs the reason once.
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

_log = logging.getLogger("flowchan.remote_tensors")
_loading = threading.Lock()
_loaded: list[ModuleType | None] = []


def load() -> ModuleType | None:
    """Load the C++ part; compile it first if that has not been done.

    Returns:
        The extension module, or None if it cannot be compiled here.
    """
    with _loading:
        if not _loaded:
            try:
                _loaded.append(load_file(_compiled()))
            except (OSError, RuntimeError, ImportError) as error:
                _log.warning("remote tensors use no C++ part, so that an operation that fails in a "
                             "backward pass ends the process: %s", error)  # fmt: skip
                _loaded.append(None)
        return _loaded[0]


def load_file(path: Path) -> ModuleType:
    """Load a compiled file.

    torch's autograd engine starts before that, if it has not. It makes a thread for each device that it finds
    then, and a process with such threads cannot run backward passes in its forks.
    """
    # A fresh thread has no modes of torch such as no_grad.
    thread = threading.Thread(target=_start_engine)
    thread.start()
    thread.join()
    loader = importlib.machinery.ExtensionFileLoader(SOURCE.stem, str(path))
    spec = importlib.util.spec_from_loader(SOURCE.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compile_to(path: Path, flags: Sequence[str] = ("-O2",), source: Path = SOURCE) -> None:
    """Compile the C++ part.

    Args:
        path: The file to write. It appears when it is complete.
        flags: Further flags of the compiler.
        source: The file to compile.

    Raises:
        RuntimeError: The compiler is missing or fails.
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
        str(source), "-o", str(own), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[:500]}")
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _compiled() -> Path:
    """Return the path of the compiled file for this torch and this Python."""
    import torch

    key = "|".join((torch.__version__, str(sysconfig.get_config_var("SOABI")), SOURCE.read_text()))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / "flowchan"
    path = folder / f"{SOURCE.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path)
    return path


def _start_engine() -> None:
    import torch

    # A child of a process whose engine has threads cannot run backward passes at all.
    with contextlib.suppress(RuntimeError):
        loss: Any = torch.ones(1, device="cpu", requires_grad=True).sum()
        loss.backward()
