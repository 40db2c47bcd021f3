"""Report errors on standard error, and choose the exit code of the command.

The exit code is 0 for success, 1 if the run failed, and 2 if the graph or the command line is wrong. The code
is 130 after Ctrl-C and 143 after SIGTERM. If the reader of standard output has closed the stream, the code is
141, as after SIGPIPE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from flowchan.items.text import number_of

if TYPE_CHECKING:
    from flowchan.errors import Problem, RunError

DONE, FAILED, WRONG, INTERRUPTED, NO_READER, TERMINATED = 0, 1, 2, 130, 141, 143
MOST_FAILURES = 10
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def exit_code(function: Callable[[], int], debug: bool) -> int:
    """Call ``function`` and return its exit code. Report an error that the user can correct."""
    from flowchan.cli.loading import LoadError
    from flowchan.errors import GraphError, HostError, RunError
    from flowchan.transport.interrupts import Termination
    from flowchan.viz import RenderError

    try:
        return function()
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Termination)
        click.echo("ended by SIGTERM" if terminated else "interrupted", err=True)
        return TERMINATED if terminated else INTERRUPTED
    except BrokenPipeError:
        return _output_lost()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):  # the port of --metrics cannot be opened
            click.echo(f"flowchan: {error.strerror}", err=True)
            return WRONG
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        click.echo(f"flowchan: can't write to standard output: {error.strerror}", err=True)
        _output_lost()
        return FAILED
    except (GraphError, HostError, LoadError, RenderError, RunError) as error:
        if debug:
            traceback.print_exception(error)
        elif isinstance(error, RunError):
            print_failures(error)
        elif isinstance(error, GraphError):
            print_problems(error.graph, error.problems, err=True)
        else:
            hint = "" if error.__cause__ is None else " (--debug shows the traceback)"
            click.echo(f"flowchan: {error}{hint}", err=True)
        return FAILED if isinstance(error, RunError) else WRONG


def _output_lost() -> int:
    """Discard the output that Python has buffered and would write at exit, and return the exit code."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return NO_READER


def print_failures(error: RunError, debug: bool = False) -> None:
    """Print one line for each failure, and the traceback of the first failure.

    If ``debug`` is true, print the tracebacks of all failures instead.
    """
    if debug:
        traceback.print_exception(error)
        return
    first, *others = error.exceptions
    click.echo(f"flowchan: {first}", err=True)
    if first.__cause__ is not None:
        click.echo("".join(traceback.format_exception(first.__cause__)).rstrip(), err=True)
    for other in others[: MOST_FAILURES - 1]:
        click.echo(f"flowchan: {other}", err=True)
    if len(others) >= MOST_FAILURES:
        click.echo(f"flowchan: and {number_of(len(others) - MOST_FAILURES + 1, 'more failure')}", err=True)


def print_problems(graph: str, problems: Sequence[Problem], err: bool) -> None:
    """Print one line for each problem of a graph, then the number of problems."""
    from flowchan.errors import Where
    from flowchan.viz.labels import relative

    for problem in problems:
        where = Where(relative(problem.where.file), problem.where.line)
        click.echo(str(dataclasses.replace(problem, where=where)), err=err)
    click.echo(f"{graph}: {number_of(len(problems), 'problem')}", err=err)
