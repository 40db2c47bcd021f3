"""An agent behind a command such as ``ssh``: what is known of its end.

That the command has ended does not tell what became of the agent: a broken connection ends the one and not
the other, and ``ssh`` gives 255 for both and for a killed agent. So a small shell script stands around the
agent over there, and says on its output that the agent starts and how it ended.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial

from flowchan.hosts.providers.child import Explain
from flowchan.hosts.providers.output import MARK, Said
from flowchan.run.crew.process_exit import exit_text

SCRIPT = f'echo "{MARK}started"; "$@"; echo "{MARK}ended $?"'
ENDED = re.compile(r"ended (\d+)")
NOT_FOUND = (126, 127)  # what a shell says of a program that is not there, or can't be executed

RAISED = 1  # what Python ends with where an exception ends it; the last line is that


def around(python: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The script and the agent's command, as arguments."""
    return ("sh", "-c", SCRIPT, "sh", python, *arguments)


def as_text(command: tuple[str, ...]) -> str:
    """A command for whatever shell reads it there, which expands a leading ``~``."""
    return " ".join(map(_quoted, command))


def _quoted(word: str) -> str:
    home, slash, rest = word.partition("/")
    if slash and re.fullmatch(r"~[\w-]*", home):
        return home + slash + (shlex.quote(rest) if rest else "")
    return shlex.quote(word)


def explainer(
    host: str,
    python: str,
    remedy: str,
    unreached: Explain,
    cut_off: Callable[[Said, bool], str | None] = lambda *_: None,
) -> Explain:
    """Says why the agent of ``host`` ended. ``unreached`` says it where not even the script has run, and
    ``cut_off`` if it is known for certain that something else has ended it; its second argument is whether
    the script has said how it ended. ``remedy`` is for a Python that is missing or lacks flowchan."""
    return partial(_explain, host, python, remedy, unreached, cut_off)


def _explain(
    host: str,
    python: str,
    remedy: str,
    unreached: Explain,
    cut_off: Callable[[Said, bool], str | None],
    code: int,
    said: Said,
) -> str | None:
    if not said.marks:
        return unreached(code, said)
    ended = ENDED.fullmatch(said.marks[-1])
    certain = cut_off(said, ended is not None)
    if certain or not ended:  # without both the connection is gone; the agent need not be
        return certain
    return how_it_ended(host, python, int(ended[1]), said, remedy)


def how_it_ended(host: str, python: str, code: int, said: Said, remedy: str) -> str:
    """What an agent's exit code means, as a shell gives it, and its last lines."""
    if code in NOT_FOUND:
        return f"{host} has no Python at {python} ({said.last()}): {remedy}"
    if code and any("No module named" in line and "flowchan" in line for line in said.lines):
        return f"the Python at {python} on {host} has no flowchan: {remedy}"
    end = f"the agent {host} {exit_text(128 - code if code > 128 else code)}"
    return f"{end} ({said.last()})" if code == RAISED else end
