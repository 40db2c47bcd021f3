"""Define the ``flowchan`` command: run, check and draw graphs in Python files, and launch group members."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from flowchan.cli.conversion import port_option, size_option
from flowchan.cli.exit_codes import DONE, FAILED, WRONG, exit_code, print_problems
from flowchan.cli.run_graph import Interrupts, run_graph, width
from flowchan.items.text import number_of

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

P = ParamSpec("P")


@click.group()
@click.version_option(package_name="flowchan", prog_name="flowchan", message="%(prog)s %(version)s")
def main() -> None:
    """Run, check and draw graphs of stages and channels.

    FILE is a Python file that defines a graph: either a Graph object or a function that returns one. The
    command calls the function with ARGS, converted to the annotated types of its parameters.

    If the file defines several graphs, write FILE:NAME. FILE may also be a module (package.module:NAME), or -
    for standard input.
    """
    # Stage names and symbols in reports may contain characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Targeted(click.Command):
    """Command that accepts ``-:NAME`` as FILE, although ``-:NAME`` looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"./{one}" if one.startswith("-:") else one for one in args])


def _command(*arguments: str) -> Callable[[Callable[P, int]], Callable[..., None]]:
    """Return a decorator that turns a function into a subcommand. The function returns the exit code.

    The subcommand accepts ``arguments`` (the first is FILE), ARGS and --debug. The subcommand reports user
    errors on one line.
    """

    def decorated(function: Callable[P, int]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*args: P.args, **kwargs: P.kwargs) -> None:
            raise SystemExit(exit_code(functools.partial(function, *args, **kwargs), bool(kwargs["debug"])))

        command = click.option("--debug", is_flag=True, help="Show the traceback of an error.")(command)
        command = click.argument("args", nargs=-1)(command)
        for argument in reversed(arguments):
            command = click.argument(argument)(command)
        return main.command(cls=_Targeted)(command)

    return decorated


_seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Random seed for all workers (shown in the report).",
)
_hosts_option = click.option(
    "--hosts",
    metavar="local:2|ssh:a,b|slurm|ray:4",
    help='Hosts for stages declared with on="hosts".',
)


def _trace_path(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Reject a path to which a trace cannot be written."""
    if path is not None and not path.endswith((".json", ".json.gz")):
        raise click.BadParameter(f"{path!r} must end in .json or .json.gz")
    if path is not None and not os.access(Path(path).absolute().parent, os.W_OK):
        raise click.BadParameter(f"the folder that is to contain {path!r} must exist and be writable")
    return path


@_command("file")
@_seed_option
@_hosts_option
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
    return run_graph(lambda: _loaded(file, args, hosts), as_json, debug, **options)


def _loaded(file: str, args: Sequence[str], hosts: str | None) -> Any:
    """Load the graph and its hosts, and reject a graph that this command cannot run."""
    from flowchan.cli.loading import LoadError, load

    graph: Any = load(file, args)
    inputs = [stage.name for stage in graph.stages if stage.operator.outside and not stage.service]
    if inputs:
        raise LoadError(
            f"{file}: graph {graph.name!r} has the input {inputs[0]!r}, so only the program that fills "
            f"this input can run the graph; use python {file.partition(':')[0]}"
        )
    if hosts is not None:
        graph._give_hosts(_pool(hosts))
    return graph


@_command("file", "channel")
@click.option(
    "-o",
    "output",
    type=click.Path(dir_okay=False),
    default="items.rec",
    show_default=True,
    help="File to write the items to. An existing file is replaced.",
)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    metavar="N",
    default=1_000_000,
    show_default=True,
    help="Maximum number of items in the file.",
)
@click.option(
    "--max-bytes",
    callback=size_option,
    metavar="SIZE",
    default="1GB",
    show_default=True,
    help="Maximum size of the file, such as 500MB.",
)
@_seed_option
@_hosts_option
def record(
    file: str, channel: str, args: tuple[str, ...], debug: bool, hosts: str | None, **options: Any
) -> int:
    """Run the graph in FILE, and write the items of CHANNEL to a file.

    The report of a run lists the names of the channels. If the file reaches a limit, the recording ends and
    the run continues. "flowchan peek" shows the items, and "flowchan replay" feeds them to a stage.

    The file contains pickles, so use it only if you trust it as you trust code.
    """
    from flowchan.cli.loading import LoadError
    from flowchan.cli.recordings import summary

    output = options.pop("output")
    most, max_bytes = options.pop("most"), options.pop("max_bytes")

    def load() -> Any:
        graph = _loaded(file, args, hosts)
        try:
            graph.record(channel, output, most=most, max_bytes=max_bytes)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        return graph

    code = run_graph(load, debug=debug, **options)
    with contextlib.suppress(LoadError):  # the run failed before the file was written
        click.echo(f"\n{summary(output)}")
    return code


@_command("file", "stage", "recording")
@click.option(
    "--item",
    type=click.IntRange(min=0),
    metavar="N",
    help="Feed only the item with this number (counting from 0).",
)
@_seed_option
@_hosts_option
def replay(
    file: str,
    stage: str,
    recording: str,
    args: tuple[str, ...],
    debug: bool,
    hosts: str | None,
    item: int | None,
    **options: Any,
) -> int:
    """Feed the items of RECORDING to one STAGE of the graph in FILE, and print its outputs.

    The other stages of the graph do not run. The stage has the same workers and options as in the graph, so
    a sink repeats its side effects. If an item fails, the command shows the traceback. --item N feeds only
    the failed item; "flowchan peek" shows the numbers of the items.

    Replaying unpickles the items, so RECORDING must be a file that you trust as you trust code.
    """
    from flowchan.cli.loading import load
    from flowchan.cli.recordings import replayed

    def load_stage() -> Any:
        graph = replayed(load(file, args), stage, recording, item)
        if hosts is not None:
            graph._give_hosts(_pool(hosts))
        return graph

    return run_graph(load_stage, debug=debug, **options)


@main.command()
@click.argument("recording", metavar="RECORDING|RUN")
@click.argument("channel", required=False)
@click.option(
    *("-n", "count"),
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of items to show.",
)
def peek(recording: str, channel: str | None, count: int) -> None:
    """Show items of a recording or of a running graph, without taking them.

    RECORDING is a file that "flowchan record" wrote. Showing an item unpickles it, so RECORDING must be a
    file that you trust as you trust code.

    RUN is the process ID of a program on this machine, or a run from the list of "flowchan top". The command
    shows the items in CHANNEL, and then later ones until N are shown, the channel ends or you press Ctrl-C.
    Items that pass through the channel quickly are not shown.
    """
    with Interrupts():
        if channel is None:
            from flowchan.cli.recordings import peek

            code = exit_code(lambda: DONE if peek(recording, count, width()) else FAILED, debug=False)
        else:
            from flowchan.cli.live_items import show_items

            code = exit_code(lambda: show_items(recording, channel, count, width()), debug=False)
    raise SystemExit(code)


def _pool(hosts: str) -> Any:
    from flowchan.errors import HostError
    from flowchan.hosts.spec import pool_from

    try:
        return pool_from(hosts)
    except (ValueError, HostError) as error:
        raise click.BadParameter(str(error), param_hint="--hosts") from None


@_command("file")
def check(file: str, args: tuple[str, ...], debug: bool) -> int:
    """Check the graph in FILE without running it, and print every problem."""
    from flowchan.check.rules import check as problems_of
    from flowchan.cli.loading import load
    from flowchan.cli.parallel_threads import threads_line

    graph = load(file, args)
    if problems := problems_of(graph):
        print_problems(graph.name, problems, err=False)
        return WRONG
    click.echo(f"{graph.name}: all clear: {_counts(graph)}\n{threads_line()}")
    return DONE


@_command("file")
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

    with Interrupts():
        raise SystemExit(exit_code(lambda: top(run, width()), debug=False))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    *("-n", "count"), type=click.IntRange(1, 1024), help="Total number of processes across all hosts."
)
@click.option(
    *("--nproc-per-node", "--nproc_per_node", "each"),
    type=click.IntRange(1, 1024),
    help="Number of processes on each host, as an alternative to -n (as in torchrun).",
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
@click.option(
    *("--shutdown-timeout", "--shutdown_timeout"),
    type=click.IntRange(min=0),
    default=30,  # the default of torchrun and Slurm
    show_default=True,
    metavar="SECONDS",
    help="Time between asking the ranks to exit and killing them (torchrun has the same option).",
)
@click.option("-m", "--module", is_flag=True, help="Treat SCRIPT as the name of a module, as python -m does.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    count: int | None,
    each: int | None,
    spec: str | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    """Run N processes of SCRIPT as the members of a group, on this host or on several hosts.

    Every host must have SCRIPT at the same path; a relative path refers to the current folder. Each process
    gets the environment variables that torchrun sets, so flowchan.collective.group() and torch.distributed
    find the other members. The command prefixes each line of output with the rank of its process. If a
    process fails, the command terminates the others, and its last line reports the first failure.

    If a host has at least as many cores as ranks, each rank gets an equal share of the cores.
    """
    if (count is None) == (each is None):
        raise click.UsageError(
            "use either -n (processes in total) or --nproc-per-node (processes on each host)"
        )
    if not module:
        click.Path(exists=True, dir_okay=False)(script, ctx=click.get_current_context())
        # Agents on other hosts run in other folders, so they need an absolute path.
        script = str(Path(script).absolute()) if spec else script
    command = [*(["-m"] if module else []), script, *args]
    raise SystemExit(exit_code(lambda: _launch(count, each, spec, command, **options), debug=False))


def _launch(
    count: int | None, each: int | None, spec: str | None, script: list[str], log_dir: Any, **options: Any
) -> int:
    from flowchan.cli.launch import Logs, launch, show

    with contextlib.ExitStack() as stack:
        tell = show if log_dir is None else stack.enter_context(Logs(log_dir))
        if spec is not None:
            from flowchan.cli.launch_over import launch_over

            pool = _pool(spec)
            ranks = count or (each or 1) * len(pool.hosts)
            failure, interrupted = launch_over(pool, ranks, script, tell, **options)
        else:
            failure, interrupted = launch(count or each or 1, script, tell, **options)
    if failure and not interrupted:
        click.echo(f"flowchan: {failure}", err=True)
    return 128 + interrupted if interrupted else FAILED if failure else DONE


@main.group()
def hosts() -> None:
    """Check the hosts on which stages are to run."""


@hosts.command("check")
@click.argument("spec", metavar="HOSTS")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def check_hosts(spec: str, debug: bool) -> None:
    """Check HOSTS, for example local:2, ssh:gpu1,user@gpu2, slurm or ray:4.

    For each host, the command shows whether an agent can start and connect to this machine. The command also
    shows the versions of Python and flowchan, the round-trip time and bandwidth, the relative speed, and the
    available cores, memory and GPUs.
    """
    from flowchan.cli import hosts

    raise SystemExit(exit_code(lambda: DONE if hosts.check(spec) else FAILED, debug))


def _counts(graph: Blueprint) -> str:
    workers = sum(stage.workers for stage in graph.stages)
    remote_stages = [stage for stage in graph.stages if stage.placement.is_remote]
    on_hosts = sum(stage.workers for stage in remote_stages)
    own_process = sum(stage.workers for stage in graph.stages if stage.placement.own_process) - on_hosts
    return (
        f"{number_of(len(graph.stages), 'stage')}, {number_of(len(graph.edges), 'channel')}, "
        f"{number_of(workers, 'worker')}"
        + (" at the start" if any(stage.auto for stage in graph.stages) else "")
        + (f", {own_process} of them in processes" if own_process else "")
        + (f", {on_hosts} on hosts" if on_hosts else "")
    )
