"""Test R7 (Same everywhere) under fork, forkserver and spawn, in scripts, ``python -c`` and pytest.

The graphs use lambdas, closures, and functions and classes from ``__main__``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import run_python, script, start

from flowchan import Graph, In, Out, RunError

METHODS = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])


class Scaled:
    def __init__(self) -> None:
        self.factor = 10

    def __call__(self, item: int) -> int:
        return self.factor * item


def fail(item: int) -> int:
    raise LookupError(f"item {item}")


EVERYTHING = """
    import dataclasses, multiprocessing, sys
    from flowchan import Graph, In, Out, RunError

    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int

        def moved(self):
            return Point(self.x + STEP)

    class Mine(Exception):
        pass

    class Model:
        def __init__(self):
            self.bias = 100

        def __call__(self, point):
            assert isinstance(point, Point)
            return Point(point.x + self.bias)

    STEP = 1

    def points():
        for x in range(4):
            yield Point(x)

    def move(point):
        assert type(point) is Point, (type(point), id(type(point)), id(Point))
        return point.moved()

    def split(points: In[Point], even: Out[Point], odd: Out[Point]):
        for point in points:
            (odd if point.x % 2 else even).put(point)

    def fail(point):
        raise Mine(point)

    def main():
        seven = 7
        graph = Graph("everything")
        stream = graph.source(points, on="process").map(move, on="process", workers=2)
        stream = stream.map(Model, on="process").map(lambda point: Point(point.x + seven), on="process")
        even, odd = graph.stage(split, stream, on="process")
        evens, odds = even.collect(), odd.collect()
        results = graph.run()
        assert results[evens] == [Point(108), Point(110)], results[evens]
        assert results[odds] == [Point(109), Point(111)], results[odds]
        assert all(type(point) is Point for point in results[evens])

        graph = Graph("failing")
        failing = graph.source([Point(1)]).map(fail, on="process")
        failing.sink(print)
        try:
            graph.run()
        except* Exception as group:
            (error,) = group.exceptions
            assert isinstance(error.__cause__, Mine), error.__cause__
            assert error.__cause__.args == (Point(1),)
            assert type(error.__cause__.args[0]) is Point

        graph = Graph("failed items")
        failing = graph.source([Point(1)]).map(fail, on="process")
        failing.sink(print)
        failed = failing.errors.collect()
        (found,) = graph.run()[failed]
        assert type(found.item) is Point and isinstance(found.error, Mine)
        print("fine")
"""


def program(method: str) -> str:
    return (
        EVERYTHING
        + f"""
    if __name__ == "__main__":
        multiprocessing.set_start_method("{method}")
        main()
"""
    )


@METHODS
def test_objects_from_main_work_in_a_script(method: str, tmp_path: Path) -> None:
    assert run_python(script(tmp_path, program(method))) == "fine\n"


@METHODS
def test_objects_from_main_work_under_python_dash_m(method: str, tmp_path: Path) -> None:
    script(tmp_path, program(method), "everything.py")
    assert run_python("-m", "everything", cwd=tmp_path) == "fine\n"


@METHODS
def test_objects_from_main_work_under_python_dash_c(method: str, tmp_path: Path) -> None:
    text = script(tmp_path, program(method)).read_text()
    assert run_python("-c", text) == "fine\n"


@METHODS
def test_objects_from_main_work_in_code_run_by_exec(method: str, tmp_path: Path) -> None:
    """Notebook cells run in this way: their functions cannot be imported from a file."""
    text = script(tmp_path, program(method)).read_text()
    assert run_python("-c", f"exec(compile({text!r}, '<cell>', 'exec'), globals())") == "fine\n"


@METHODS
def test_script_without_a_main_guard_ends(method: str, tmp_path: Path) -> None:
    """If the start method is spawn or forkserver, Python itself requires the guard.

    A script without a guard raises one error that names the remedy.
    """
    text = f"""
        import multiprocessing
        from flowchan import Graph
        multiprocessing.set_start_method("{method}", force=True)
        graph = Graph("unguarded")
        total = graph.source(range(3)).map(abs, on="process", workers=3).reduce(int.__add__, 0)
        print(graph.run()[total])
    """
    with start(script(tmp_path, text)) as process:
        out, err = process.communicate()
    if method == "fork":
        assert (process.returncode, out) == (0, "3\n"), err
    else:
        assert process.returncode == 1
        assert err.count("Traceback") == 1, err
        assert "flowchan.GraphError" in err or "Unguarded" in err
        assert 'put this code under `if __name__ == "__main__":`' in err.splitlines()[-1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_script_that_sets_the_start_method_unguarded_gets_the_remedy(method: str, tmp_path: Path) -> None:
    """Python does not allow a second call of ``set_start_method``, so the worker process exits before it runs
    any of flowchan's code."""
    text = f"""
        import multiprocessing
        multiprocessing.set_start_method("{method}")
        from flowchan import Graph
        graph = Graph("unguarded")
        graph.source(range(3)).sink(abs, on="process")
        graph.run()
    """
    with start(script(tmp_path, text)) as process:
        _, err = process.communicate()
    assert process.returncode == 1
    assert err.count("Traceback") == 1, err
    assert 'put this code under `if __name__ == "__main__":`' in err.splitlines()[-1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_script_that_fails_on_import_shows_the_line_and_remedy(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing
        from flowchan import Graph
        graph = Graph("fails")
        graph.source(range(3)).sink(abs, on="process")
        if __name__ != "__main__":
            raise LookupError("only the program may import this")
        multiprocessing.set_start_method("{method}")
        graph.run()
    """
    with start(script(tmp_path, text)) as process:
        _, err = process.communicate()
    assert process.returncode == 1
    assert "LookupError: only the program may import this" in err
    assert f"as the start method '{method}' requires" in err
    assert "put `set_start_method` and all code that only the main program may run under `if" in err


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_process_that_runs_the_graph_on_import_reports_its_end(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing
        from flowchan import Graph
        multiprocessing.set_start_method("{method}", force=True)
        if __name__ == "__main__":
            process = multiprocessing.Process(target=print)
            try:
                process.start()
                process.join()
            except (EOFError, ConnectionError):
                pass
        else:
            graph = Graph("unguarded")
            graph.source(range(3)).sink(abs, on="process")
            graph.run()
    """
    with start(script(tmp_path, text)) as process:
        _, err = process.communicate()
    assert "Traceback" not in err
    assert 'put this code under `if __name__ == "__main__":`' in err


@METHODS
def test_daemonic_process_cannot_start_workers(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing
        from flowchan import Graph, GraphError

        def inside():
            graph = Graph("inner")
            graph.source(range(3)).sink(abs, on="process")
            try:
                graph.run()
            except GraphError as error:
                print(error.problems[0].rule, error.problems[0].message, flush=True)

        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            process = context.Process(target=inside, daemon=True, name="helper")
            process.start()
            process.join()
    """
    message = run_python(script(tmp_path, text))
    assert message.startswith(
        "daemon process 'helper' is daemonic, so it cannot start processes; start it with"
    )


@pytest.mark.usefixtures("_method")
def test_functions_of_an_imported_module_work() -> None:
    graph = Graph("r7")
    scaled = graph.source(range(50), on="process").map(Scaled, on="process", workers=2).collect()
    assert graph.run()[scaled] == [10 * item for item in range(50)]


@pytest.mark.usefixtures("_method")
def test_lambdas_and_closures_work_with_every_start_method() -> None:
    offset = 5

    def plus_offset(item: int) -> int:
        return item + offset

    class Local:
        def __call__(self, item: int) -> list[int]:
            return [item + offset]

    graph = Graph("r7")
    stream = graph.source(lambda: iter(range(4)), on="process").map(lambda item: 2 * item, on="process")
    result = stream.map(plus_offset, on="process").flat_map(Local, on="process").collect()
    assert graph.run()[result] == [10, 12, 14, 16]


@pytest.mark.usefixtures("_method")
def test_general_stages_work_with_every_start_method() -> None:
    def double(items: In[int], out: Out[int], factor: int = 2) -> None:
        for item in items:
            out.put(factor * item)

    graph = Graph("r7")
    result = graph.stage(double, graph.source(range(4)), on="process", factor=3).collect()
    assert graph.run()[result] == [0, 3, 6, 9]


@pytest.mark.usefixtures("_method")
def test_failure_is_reported_with_every_start_method() -> None:
    graph = Graph("r7")
    graph.source([1]).map(fail, on="process").sink(id)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert isinstance(error.__cause__, LookupError)
    assert "in fail" in error.__cause__.__notes__[0]


@pytest.mark.usefixtures("_method")
def test_take_and_run_stop_end_the_run() -> None:
    graph = Graph("r7")
    first = graph.source(range(10**9), on="process").map(abs, on="process", workers=2).take(3).collect()
    assert graph.run()[first] == [0, 1, 2]
    graph = Graph("r7")
    graph.source(range(10**9), on="process").sink(abs, on="process")
    run = graph.start()
    run.stop()
    run.wait()
    assert run.stats().state == "stopped"


@pytest.mark.each_value
@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize(
    "key", [str, lambda item: (str(item), item % 2), lambda item: str(item) if item else None]
)
def test_equal_keys_go_to_one_branch_from_any_process(key: Any) -> None:
    graph = Graph("r7")
    items = graph.source([number % 10 for number in range(100)])
    branches = items.partition(key, 3, on="process", workers=3)
    results = [branch.map(key).collect() for branch in branches]
    found = graph.run()
    one, two, three = (set(map(repr, found[result])) for result in results)
    assert not one & two
    assert not (one | two) & three


@pytest.mark.usefixtures("_method")
def test_recursive_functions_and_module_names_work_in_processes() -> None:
    def factorial(item: int) -> int:
        return 1 if item < 2 else item * factorial(item - 1)

    graph = Graph("r7")
    result = graph.source([5, 6]).map(factorial, on="process").map(lambda _: __name__, on="process").collect()
    assert graph.run()[result] == [__name__] * 2


@METHODS
def test_graph_runs_inside_pytest(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing
        from flowchan import Graph

        class Item:
            pass

        def test_it():
            multiprocessing.set_start_method("{method}", force=True)
            graph = Graph("inner")
            result = graph.source([Item()]).map(lambda item: item, on="process").collect()
            (item,) = graph.run()[result]
            assert type(item) is Item
    """
    script(tmp_path, text, "test_inner.py")
    assert "1 passed" in run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_process_that_returns_during_a_run_ends_the_run(method: str, tmp_path: Path) -> None:
    """A process started by multiprocessing waits for its children at exit, and runs no atexit functions."""
    program = """
        import itertools, multiprocessing, sys
        from flowchan import Graph

        def leave_behind():
            graph = Graph("left")
            graph.source(itertools.count).map(abs, on="process", workers=2).sink(abs)
            run = graph.start()
            while not all(edge.passed for edge in run.stats().edges):
                pass

        if __name__ == "__main__":
            child = multiprocessing.get_context(sys.argv[1]).Process(target=leave_behind)
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """
    run_python(script(tmp_path, program), method)


def test_code_of_operators_is_imported_before_a_worker_is_forked(tmp_path: Path) -> None:
    """An import at the wrong time could hold the import lock while another run forks."""
    program = """
        import os, sys
        from flowchan import Graph

        loaded, needed = [], {"flowchan.run.worker.operator_loops", "hashlib"}
        os.register_at_fork(before=lambda: loaded.append(needed <= sys.modules.keys()))
        graph = Graph("forks")
        graph.source(range(3)).map(abs, on="process", name="work").sink(str)
        assert needed.isdisjoint(sys.modules)
        graph.run()
        print(*loaded)
    """
    assert run_python(script(tmp_path, program)) == "True\n"
