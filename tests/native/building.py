"""Build the native test programs on demand, with the Makefile of this folder."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "native-tests"


@functools.cache
def program(name: str) -> Path:
    """Return the path of an up-to-date program in ``build/native-tests``.

    ``make test`` builds the programs in advance. Otherwise, one test process builds the programs while the
    other test processes wait.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    make = ["make", "--silent", "--jobs=2", f"--file={Path(__file__).with_name('Makefile')}"]
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            [*make, str((OUT / name).relative_to(ROOT))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert made.returncode == 0, made.stdout + made.stderr
    return OUT / name


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits."""
    return subprocess.run(
        [str(program), *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
