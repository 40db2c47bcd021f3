"""Replace ``ssh`` with a stand-in that runs commands on this machine, for tests without an ssh server.

Like an ssh server, the stand-in runs each command in a new session. If the stand-in is killed, the command
keeps running, but its output is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

STUB = """#!{python} -ISE
import subprocess, sys

*options, host = sys.argv[1 : sys.argv.index("--") + 2]
command = sys.argv[len(options) + 2 :]
if "-G" in options:
    print("hostname 127.0.0.1")
else:
    remote = subprocess.Popen(
        ["sh", "-c", " ".join(command)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    while output := remote.stdout.read1(65536):
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
    code = remote.wait()
    sys.exit(code if code >= 0 else 255)
"""


@contextlib.contextmanager
def ssh_stub(folder: Path) -> Iterator[None]:
    """Put the stand-in on ``PATH`` under the name ``ssh``. Every host name then refers to this machine."""
    before = os.environ["PATH"]
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(STUB.format(python=sys.executable))
    (folder / "bin" / "ssh").chmod(0o755)
    os.environ["PATH"] = f"{folder}/bin:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
