"""Check ``tests/typed`` with mypy and pyright, against the package in its installed layout.

Neither checker may find an error in the correct program. In the file of mistakes, both must find exactly the
errors that its comments announce: ``# wrong: code of mypy, rule of pyright``. Run the script in the folder
that has the installed layout.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "tests" / "typed" / name for name in ("program.py", "mistakes.py")]
BIN = Path(sys.executable).parent

Finding = tuple[str, int, str, str]
"""File, line, code (mypy) or rule (pyright), and message."""


def mypy() -> Iterator[Finding]:
    """Yield the errors that mypy finds."""
    options = ["--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    for line in said(BIN / "mypy", *options, "--output", "json", *(file.name for file in FILES)).splitlines():
        one = json.loads(line)
        if one["severity"] == "error":
            yield one["file"], one["line"], one["code"], one["message"]


def pyright() -> Iterator[Finding]:
    """Yield the errors that pyright finds."""
    names = [file.name for file in FILES]
    options = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": names}
    Path("pyrightconfig.json").write_text(json.dumps(options))
    report = json.loads(said(BIN / "basedpyright", "--outputjson", "--pythonpath", sys.executable))
    for one in report["generalDiagnostics"]:
        line = one["range"]["start"]["line"] + 1
        yield Path(one["file"]).name, line, one.get("rule", "syntax"), one["message"]


def said(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def expected() -> Iterator[tuple[str, int, str]]:
    """Yield the errors that the comments expect, with at least one code for each comment."""
    for file in FILES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if "# wrong" in line:
                if not re.search(r"# wrong: (?!report)\S+, (.*, )?report\w+$", line):
                    sys.exit(f"{file}:{number}: comment must be '# wrong: MYPY_CODE, PYRIGHT_RULE'")
                yield from ((file.name, number, code) for code in line.split("# wrong: ")[1].split(", "))


def main() -> int:
    for file in FILES:
        shutil.copy(file, ".")
    awaited = set(expected())
    found = {(file, line, code): message for file, line, code, message in (*mypy(), *pyright())}
    for file, line, code in sorted(awaited - found.keys()):
        print(f"tests/typed/{file}:{line}: {code} was not found")
    for file, line, code in sorted(found.keys() - awaited):
        print(f"tests/typed/{file}:{line}: {code}: {found[file, line, code]}")
    return int(awaited != found.keys())


if __name__ == "__main__":
    sys.exit(main())
