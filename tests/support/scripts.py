"""Write programs and start them as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.preloaded_programs import Template

_template: Template | None = None
"""Template that forks the programs, if there is one."""


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a program to a file."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def start(*command: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start ``python *command`` in a new session, as a terminal would, with its output in pipes.

    The program gets the tests' environment, updated by ``env``.
    """
    pipe: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"PYTHONUNBUFFERED": "1"} | options.pop("env", {})
    options |= {**pipe, "env": env, "start_new_session": True}
    if _template is not None:
        return _template.popen(*command, text=True, **options)
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, **options)


@contextmanager
def forked(*modules: str) -> Iterator[None]:
    """Within the block, fork all programs from a process that has imported these modules and flowchan.

    The programs import all other modules themselves.
    """
    global _template
    _template = Template("flowchan.run.graph", *modules)
    try:
        yield
    finally:
        _template.close()
        _template = None


def run_python(*command: str | Path, **options: Any) -> str:
    """Return the output of ``python *command``, which must end with exit code 0."""
    with start(*command, **options) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return out
