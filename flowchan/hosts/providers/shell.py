"""Explain the end of an agent that was started with a command such as ``ssh``.

The exit of the command does not show whether the agent has ended. If the connection breaks, the command exits
but the agent continues. ``ssh`` then exits with 255, just as it does if the agent was killed. A small shell
script on the host therefore runs the agent, and prints one line when it starts and another when it ends.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial

from flowchan.hosts.providers.child import Explain
from flowchan.hosts.providers.output import MARK, ProcessOutput
from flowchan.run.crew.process_exit import exit_text

SCRIPT = f'echo "{MARK}started"; "$@"; echo "{MARK}ended $?"'
ENDED = re.compile(r"ended (\d+)")
NOT_FOUND = (126, 127)  # exit codes of a shell for a program that is missing or cannot be executed

RAISED = 1  # Python's exit code after an exception, which the last line shows


def around(python: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for the script that runs the agent."""
    return ("sh", "-c", SCRIPT, "sh", python, *arguments)


def as_text(command: tuple[str, ...]) -> str:
    """Quote a command for the remote shell, which expands a leading ``~``."""
    return " ".join(map(_quoted, command))


def _quoted(word: str) -> str:
    user, slash, rest = word.partition("/")
    if slash and re.fullmatch(r"~[\w-]*", user):
        return user + slash + (shlex.quote(rest) if rest else "")
    return shlex.quote(word)


def explainer(
    host: str,
    python: str,
    remedy: str,
    unreached: Explain,
    cut_off: Callable[[ProcessOutput, bool], str | None] = lambda *_: None,
) -> Explain:
    """Return a function that explains why the agent on ``host`` ended.

    Args:
        host: Name of the host.
        python: Python executable on the host.
        remedy: Advice if Python is missing or lacks flowchan.
        unreached: Explains why the script did not run at all.
        cut_off: Returns the reason if something outside the script has certainly ended the agent, otherwise
            None. The second argument is true if the script reported the agent's end.

    Returns:
        The function.
    """
    return partial(_explain, host, python, remedy, unreached, cut_off)


def _explain(
    host: str,
    python: str,
    remedy: str,
    unreached: Explain,
    cut_off: Callable[[ProcessOutput, bool], str | None],
    code: int,
    output: ProcessOutput,
) -> str | None:
    if not output.marks:
        return unreached(code, output)
    ended = ENDED.fullmatch(output.marks[-1])
    certain = cut_off(output, ended is not None)
    # If the script has not reported the end, the connection was lost, but the agent may still be running.
    if certain or not ended:
        return certain
    return how_it_ended(host, python, int(ended[1]), output, remedy)


def how_it_ended(host: str, python: str, code: int, output: ProcessOutput, remedy: str) -> str:
    """Explain how an agent ended, from the exit code that the shell reports and the last lines of output."""
    if code in NOT_FOUND:
        return f"{host} has no Python at {python} ({output.last()}); {remedy}"
    if code and any("No module named" in line and "flowchan" in line for line in output.lines):
        return f"the Python at {python} on {host} has no flowchan; {remedy}"
    end = f"the agent {host} {exit_text(128 - code if code > 128 else code)}"
    return f"{end} ({output.last()})" if code == RAISED else end
