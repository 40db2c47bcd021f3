"""Define the ``flowchan`` command: run, check and draw graphs in Python files, and launch group members.

Exit codes: 0 for success, 1 if the run failed, 2 if the graph or the command line is wrong. The code is 130
after Ctrl-C, 143 after SIGTERM, and 141 if the reader of standard output closed it (as with SIGPIPE).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from flowchan.cli.conversion import port_option

if TYPE_CHECKING:
    from flowchan.cli.json_lines import JsonLines
    from flowchan.declare.blueprint import Blueprint
    from flowchan.errors import Problem, RunError
    from flowchan.viz.live.terminal import LiveView

DONE, FAILED, WRONG, INTERRUPTED, NO_READER, TERMINATED = 0, 1, 2, 130, 141, 143
REFRESH = 0.25
MOST_FAILURES = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)

P = ParamSpec("P")


@click.group()
@click.version_option(package_name="flowchan", prog_name="flowchan", message="%(prog)s %(version)s")
def main() -> None:
    """Run, check and draw graphs of stages and channels.

    FILE is a Python file that defines a graph: either a Graph object or a function that returns one. The
    function is called with ARGS, converted to the types of its annotated parameters.

    If the file defines several graphs, write FILE:NAME. FILE may also be a module (package.module:NAME), or -
    for standard input.
    """
    # Reports contain stage names and symbols that the terminal's encoding may be unable to represent.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Targeted(click.Command):
    """Command that accepts ``-:NAME`` as FILE, although it looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"./{one}" if one.startswith("-:") else one for one in args])


def _command(function: Callable[P, int]) -> Callable[..., None]:
    """Make a subcommand from a function that returns the exit code.

    The subcommand also accepts FILE, ARGS and --debug, and reports the user's errors in one line.
    """

    @main.command(cls=_Targeted)
    @click.argument("file")
    @click.argument("args", nargs=-1)
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        raise SystemExit(_exit_code(functools.partial(function, *args, **kwargs), bool(kwargs["debug"])))

    return command


def _exit_code(function: Callable[[], int], debug: bool) -> int:
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
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):  # from --metrics
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
            _print_failures(error)
        elif isinstance(error, GraphError):
            _print_problems(error.graph, error.problems, err=True)
        else:
            hint = "" if error.__cause__ is None else " (--debug shows the traceback)"
            click.echo(f"flowchan: {error}{hint}", err=True)
        return FAILED if isinstance(error, RunError) else WRONG


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _output_lost() -> int:
    """Discard the remaining output, which Python would write at exit, and return the exit code."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return NO_READER


def _trace_path(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse a path to which a trace cannot be written."""
    if path is not None and not path.endswith((".json", ".json.gz")):
        raise click.BadParameter(f"{path!r} must end in .json or .json.gz")
    if path is not None and not os.access(Path(path).absolute().parent, os.W_OK):
        raise click.BadParameter(f"the folder that is to contain {path!r} must exist and be writable")
    return path


@_command
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Random seed for all workers (shown in the report).",
)
@click.option(
    "--hosts",
    metavar="local:2|ssh:a,b|slurm|ray:4",
    help='Hosts for stages declared with on="hosts".',
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False),
    help="File that records finished items; a later run with this file skips them.",
)
@click.option("--page", is_flag=True, help="Serve a live page of the run and print its address.")
@click.option(
    "--metrics",
    callback=port_option,
    metavar="PORT|HOST:PORT",
    help="Port on which to serve the metrics of the run to Prometheus.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the events of the run as JSON lines instead of a report.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, writable=True),
    callback=_trace_path,
    help="Write a trace of the run to this file (.json or .json.gz), for https://ui.perfetto.dev.",
)
def run(
    file: str, args: tuple[str, ...], debug: bool, hosts: str | None, as_json: bool, **options: Any
) -> int:
    r"""Run the graph in FILE and print a report.

    Press Ctrl-C to stop the sources and finish the items in flight; press it again to end the run at once.
    Press Ctrl-\ (SIGQUIT) to see which channel each stage is waiting for.
    """
    from flowchan.cli.json_lines import JsonLines
    from flowchan.cli.loading import LoadError, load
    from flowchan.cli.result_lines import result_lines
    from flowchan.errors import RunError
    from flowchan.run.observe.report import render
    from flowchan.viz.live.terminal import LiveView

    with (
        _Interrupts() as interrupts,
        _logging(),
        JsonLines() if as_json else contextlib.nullcontext() as lines,
    ):
        graph: Any = load(file, args)
        inputs = [stage.name for stage in graph.stages if stage.operator.outside and not stage.service]
        if inputs:
            raise LoadError(
                f"{file}: graph {graph.name!r} has the input {inputs[0]!r}, so only the program that fills "
                f"this input can run the graph; use python {file.partition(':')[0]}"
            )
        if hosts is not None:
            graph._give_hosts(_pool(hosts))
        interrupts.hold = True
        failure: RunError | None = None
        results: Any = {}
        try:
            with (
                LiveView() if lines is None else contextlib.nullcontext(lines) as view,
                graph.start(**options) as running,
                running.subscribe(stats=view.show, every=REFRESH) if lines is None else lines.follow(running),
            ):
                for name in ("page", "metrics"):
                    if address := getattr(running, name):
                        view.print_line(f"{name}: {address}")
                results = _follow(running, view, interrupts, lines)
        except RunError as error:
            failure = error
        if lines is not None:
            lines.end(running.stats(), results, failure)
        else:
            click.echo(render(running.stats(), _width()))
            for line in result_lines(results):
                click.echo(line)
    if failure is not None:
        _print_failures(failure, debug)
    if interrupts.count:
        return TERMINATED if interrupts.first == signal.SIGTERM else INTERRUPTED
    return DONE if failure is None else FAILED


def _width() -> int:
    """Return the width of the terminal, or a very large number if standard output is not a terminal."""
    shown = sys.stdout is not None and sys.stdout.isatty()  # stdout is None if it is closed
    return shutil.get_terminal_size().columns if shown else 10**6


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Show flowchan's warnings about deaths and suspected causes, unless the file configures logging."""
    import logging

    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("flowchan: %(message)s"))
    handler.addFilter(lambda record: not logging.root.handlers)
    logger = logging.getLogger("flowchan")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _pool(hosts: str) -> Any:
    from flowchan.errors import HostError
    from flowchan.hosts.spec import pool_from

    try:
        return pool_from(hosts)
    except (ValueError, HostError) as error:
        raise click.BadParameter(str(error), param_hint="--hosts") from None


@_command
def check(file: str, args: tuple[str, ...], debug: bool) -> int:
    """Check the graph in FILE without running it, and print every problem."""
    from flowchan.check.rules import check as problems_of
    from flowchan.cli.loading import load

    graph = load(file, args)
    problems = problems_of(graph)
    if problems:
        _print_problems(graph.name, problems, err=False)
        return WRONG
    click.echo(f"{graph.name}: all clear: {_counts(graph)}")
    return DONE


@_command
@click.option(
    "-o",
    "output",
    metavar="FILE.svg|png|pdf|dot|mmd",
    help="File to write the picture to. [default: <FILE>.svg]",
)
@click.option("--open", "show", is_flag=True, help="Open the picture in the default viewer.")
@click.option(
    "--timeline",
    "from_trace",
    is_flag=True,
    help="Treat FILE as a trace, and draw the timeline of its run (SVG only).",
)
def viz(
    file: str, args: tuple[str, ...], debug: bool, output: str | None, show: bool, from_trace: bool
) -> int:
    """Draw the graph in FILE without running it. The suffix of the output file selects the format.

    If you pass --timeline, FILE is the trace of a run, and the picture shows the activity of each worker.
    """
    from flowchan.cli.loading import load, load_timeline, picture_name
    from flowchan.viz import FORMATS, draw

    path, formats = Path(output or picture_name(file)), ("svg",) if from_trace else FORMATS
    if path.suffix[1:].lower() not in formats:
        raise click.BadParameter(
            f"{str(path)!r}: the file name must end in one of .{', .'.join(formats)}", param_hint="-o"
        )
    if from_trace:
        write: Callable[[], object] = functools.partial(
            path.write_text, load_timeline(file), encoding="utf-8"
        )
        summary = str(path)
    else:
        graph = load(file, args)
        write, summary = functools.partial(draw, graph, path), f"{path}: {_counts(graph)}"
    try:
        write()
    except OSError as error:
        click.echo(f"flowchan: can't write {path}: {error.strerror or error}", err=True)
        if debug:
            traceback.print_exception(error)
        return WRONG
    click.echo(summary)
    if show and click.launch(str(path)):
        click.echo(f"flowchan: no viewer found for the picture; open {path} yourself", err=True)
    return DONE


@main.command()
@click.argument("run", required=False, metavar="[PID]")
def top(run: str | None) -> None:
    """Show a live view of a run that one of your other programs has started on this machine.

    PID is the process ID of the program. If the program has several runs, the command lists them; pass
    PID-NUMBER to choose one. Without PID, the command shows the run if your programs have only one, or lists
    all runs.

    The view closes when the run ends. Press Ctrl-C to close the view without stopping the run.
    """
    from flowchan.cli.top import top

    with _Interrupts():
        raise SystemExit(_exit_code(lambda: top(run, _width()), debug=False))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    *("-n", "count"), type=click.IntRange(1, 1024), help="Total number of processes across all hosts."
)
@click.option(
    *("--nproc-per-node", "--nproc_per_node", "each"),
    type=click.IntRange(1, 1024),
    help="Number of processes on each host; use it instead of -n (torchrun has the same option).",
)
@click.option(
    "--hosts",
    "spec",
    metavar="HOSTS",
    help='Hosts on which to run the processes, such as "ssh:a,b", "slurm" or "ray:2".',
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write output to RANK/stdout.log and RANK/stderr.log in this folder instead of the terminal.",
)
@click.option("--pin/--no-pin", default=True, help="Pin each rank to its own cores, if the host has enough.")
@click.option("-m", "--module", is_flag=True, help="Treat SCRIPT as the name of a module, as python -m does.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    count: int | None,
    each: int | None,
    spec: str | None,
    log_dir: Path | None,
    pin: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run N processes of SCRIPT as the members of a group, on this host or on several hosts.

    Every host must have SCRIPT at the same path; a relative path refers to the current folder. Each process
    gets the environment variables that torchrun sets, so flowchan.collective.group() and torch.distributed
    find the other members. Each line of output is prefixed with the rank of its process. If one process
    fails, the others are terminated, and the last line reports the first failure.

    If a host has at least as many cores as ranks, its cores are divided evenly among its ranks.
    """
    if (count is None) == (each is None):
        raise click.UsageError(
            "use either -n (processes in total) or --nproc-per-node (processes on each host)"
        )
    if not module:
        click.Path(exists=True, dir_okay=False)(script, ctx=click.get_current_context())
        # agents on other hosts run in other folders
        script = str(Path(script).absolute()) if spec else script
    command = [*(["-m"] if module else []), script, *args]
    raise SystemExit(_exit_code(lambda: _launch(count, each, spec, log_dir, pin, command), debug=False))


def _launch(
    count: int | None, each: int | None, spec: str | None, log_dir: Path | None, pin: bool, script: list[str]
) -> int:
    from flowchan.cli.launch import Logs, launch, show

    with contextlib.ExitStack() as stack:
        tell = show if log_dir is None else stack.enter_context(Logs(log_dir))
        if spec is not None:
            from flowchan.cli.launch_over import launch_over

            pool = _pool(spec)
            ranks = count or (each or 1) * len(pool.hosts)
            failure, interrupted = launch_over(pool, ranks, script, tell, pin)
        else:
            failure, interrupted = launch(count or each or 1, script, tell, pin)
    if failure and not interrupted:
        click.echo(f"flowchan: {failure}", err=True)
    return INTERRUPTED if interrupted else FAILED if failure else DONE


@main.group()
def hosts() -> None:
    """Check other machines that can run stages."""


@hosts.command("check")
@click.argument("spec", metavar="HOSTS")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def check_hosts(spec: str, debug: bool) -> None:
    """Check HOSTS, for example local:2, ssh:gpu1,user@gpu2, slurm or ray:4.

    For each host, this shows whether an agent starts and can connect to this machine. It also shows the
    versions of Python and flowchan, the round-trip time and bandwidth, the relative speed, and the available
    cores, memory and GPUs.
    """
    from flowchan.cli import hosts

    raise SystemExit(_exit_code(lambda: DONE if hosts.check(spec) else FAILED, debug))


class _Interrupts:
    r"""Handler of Ctrl-C and SIGTERM while the command runs.

    While the file is being loaded, the signals raise ``KeyboardInterrupt``. After ``hold`` is set, they are
    only counted for :func:`_follow`, but the third signal still raises. SIGQUIT (Ctrl-\) requests an
    explanation that names the channel that each stage is waiting for.
    """

    def __init__(self) -> None:
        self.hold = False
        self.count = 0
        self.first = 0  # number of the first signal
        self.stop_requested = False

    def __enter__(self) -> _Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            self.stop_requested = True
            return
        from flowchan.transport.interrupts import Termination

        self.count += 1
        self.first = self.first or number
        if not self.hold or self.count > 2:
            raise Termination if number == signal.SIGTERM else KeyboardInterrupt


def _follow(
    running: Any, view: LiveView | JsonLines, interrupts: _Interrupts, lines: JsonLines | None
) -> Any:
    """Wait until the run ends, pass interrupts on to the run, and return its results."""
    handled = 0
    while True:
        if lines is not None:
            lines.write()
        if interrupts.count > handled:
            handled = interrupts.count
            _interrupt(running, view, handled, interrupts.first)
        if interrupts.stop_requested:
            interrupts.stop_requested = False
            view.print_line(running.explain())
        with contextlib.suppress(TimeoutError):
            return running.wait(timeout=REFRESH)


def _interrupt(running: Any, view: LiveView | JsonLines, times: int, number: int) -> None:
    if times == 1:
        key = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        view.print_line(f"stopping: finishing the items in flight; press {key} again to discard them")
        running.stop()
    else:
        view.print_line("run ended: items in flight were discarded")
        running.abort()


def _print_failures(error: RunError, debug: bool = False) -> None:
    """Print one line for each failure, and the traceback of the first failure.

    If ``debug`` is true, print all tracebacks instead.
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
        click.echo(f"flowchan: and {_number(len(others) - MOST_FAILURES + 1, 'more failure')}", err=True)


def _print_problems(graph: str, problems: Sequence[Problem], err: bool) -> None:
    from flowchan.errors import Where
    from flowchan.viz.labels import relative

    for problem in problems:
        where = Where(relative(problem.where.file), problem.where.line)
        click.echo(str(dataclasses.replace(problem, where=where)), err=err)
    click.echo(f"{graph}: {_number(len(problems), 'problem')}", err=err)


def _counts(graph: Blueprint) -> str:
    workers = sum(stage.workers for stage in graph.stages)
    remote_stages = [stage for stage in graph.stages if stage.placement.is_remote]
    on_hosts = sum(stage.workers for stage in remote_stages)
    own_process = sum(stage.workers for stage in graph.stages if stage.placement.own_process) - on_hosts
    return (
        f"{_number(len(graph.stages), 'stage')}, {_number(len(graph.edges), 'channel')}, "
        f"{_number(workers, 'worker')}"
        + (" at the start" if any(stage.auto for stage in graph.stages) else "")
        + (f", {own_process} of them in processes" if own_process else "")
        + (f", {on_hosts} on hosts" if on_hosts else "")
    )


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
