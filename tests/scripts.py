"""Programs as users write and start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """Writes a program."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def start(*command: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Starts ``python *command`` in a session of its own, as a terminal does, with its output in pipes."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment, start_new_session=True, **options,
    )  # fmt: skip


def run_python(*command: str | Path, **options: Any) -> str:
    """What ``python *command`` prints; it must end with exit code 0."""
    with start(*command, **options) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return out
