"""Run programs on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def on_terminal(
    command: Sequence[str], folder: Path, until: Sequence[str] = (), then: str = ""
) -> tuple[list[str], int]:
    """Run a program on a terminal of 80 columns, and return its lines and its exit code.

    Cursor movements are removed from the lines. The program gets Ctrl-C once it has written all texts in
    ``until``. Once the program has written ``then``, this function creates a file named "seen" in the folder.
    """
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    shown, wanted = b"", [word.encode() for word in until]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=folder
    ) as process:
        os.close(terminal)
        while True:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the program has ended
                break
            if then and then.encode() in shown:
                (folder / "seen").touch()
                then = ""
            if wanted and all(word in shown for word in wanted):
                wanted = []
                process.send_signal(signal.SIGINT)
    os.close(controller)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    return re.split("[\r\n]+", plain), process.returncode
