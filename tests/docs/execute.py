"""Execute the code blocks of Markdown files and compare their output: ``python execute.py FILE.md …``.

- A ``python`` block runs on its own, as ``__main__``, so that a reader can paste it. If
  ``<!-- file: NAME -->`` is above the block, it is also written to that file, which later blocks can import
  or run.
- In an ``sh`` block, only the lines that begin with ``flowchan`` are run.
- ``# → text`` at the end of a Python line states one line of output. Together, these comments state the
  block's whole output. ``...`` at the end of ``text`` matches any characters.
- A ``text`` block directly below another block states the exact output of that block.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"<!-- file: (\S+) -->\n\Z")
PRINTS = re.compile(r"# → (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block on a page.

    ``line`` is how many lines of the page precede the block's text. ``file`` is the name of the file to
    write, or ``None``. ``expected`` is the expected output, or ``None``.
    """

    language: str
    text: str
    line: int
    file: str | None
    expected: str | None


def is_stated(printed: str, expected: str) -> bool:
    """Return whether the block printed the output that the page states."""
    pattern = re.escape(expected).replace(re.escape("...\n"), ".*\n")
    return re.fullmatch(pattern, printed) is not None


def blocks(markdown: str) -> Iterator[Block]:
    found = list(FENCE.finditer(markdown))
    for match, after in zip_longest(found, found[1:]):
        language, text = match.groups()
        expected = None
        if after is not None and after[1] == "text" and not markdown[match.end() : after.start()].strip():
            expected = after[2]
        elif language == "python" and PRINTS.search(text):
            expected = "".join(f"{line}\n" for line in PRINTS.findall(text))
        file = FILE.search(markdown, 0, match.start())
        line = markdown.count("\n", 0, match.start(2))
        yield Block(language, text, line, file and file[1], expected)


def run_python(block: Block, path: str, main: ModuleType) -> None:
    if block.file:
        Path(block.file).write_text(block.text)
    # Begin with empty lines, so that tracebacks show line numbers of the Markdown file.
    exec(compile("\n" * block.line + block.text, path, "exec"), vars(main))


def run_commands(block: Block) -> None:
    for line in block.text.splitlines():
        if line.startswith("flowchan"):
            subprocess.run(line, shell=True, check=True)


def printed_by(action: Callable[[], None]) -> str:
    """Return what an action, with its threads and child processes, prints to standard output."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as captured:
        os.dup2(captured.fileno(), 1)
        try:
            action()
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
        captured.seek(0)
        return captured.read()


def run_page(path: str) -> None:
    # A block must not see names of this module or of other blocks, so each block gets a new ``__main__``.
    ours = sys.modules["__main__"]
    for block in blocks(Path(path).read_text()):
        if block.language not in ("python", "sh"):
            continue
        if block.language == "python":
            user = sys.modules["__main__"] = ModuleType("__main__")
            printed = printed_by(partial(run_python, block, path, user))
            multiprocessing.set_start_method(None, force=True)
        else:
            printed = printed_by(partial(run_commands, block))
        if block.expected is not None and not is_stated(printed, block.expected):
            raise SystemExit(
                f"{path}:{block.line}: the block prints\n{printed}\nand the text says\n{block.expected}"
            )
    sys.modules["__main__"] = ours


def main() -> None:
    pages = sys.argv[1:]
    del sys.argv[1:]
    sys.path.insert(0, "")  # blocks may import files that earlier blocks have written
    for page in pages:
        run_page(page)


if __name__ == "__main__":
    main()
