"""Test functions, classes and globals from the main script in worker processes, local and on hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run_python, script

PLACES = pytest.mark.parametrize("place", ["fork", "spawn", "forkserver", "hosts"])
METHODS = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


def run_on(place: str, tmp_path: Path, definitions: str, main: str) -> str:
    """Return the output of a script. In the script, ``on`` is the placement of its pools."""
    method, on = ("fork", "hosts.local(1)") if place == "hosts" else (place, "'process'")
    text = (
        "import dataclasses, functools, multiprocessing\n"
        "import flowchan\nfrom flowchan import hosts\nfrom flowchan.pipelines import TaskPool\n"
        f"{definitions}\n"
        f"if __name__ == '__main__':\n    multiprocessing.set_start_method({method!r})\n    on = {on}\n"
    )
    path = tmp_path / "program.py"
    path.write_text(text + "".join(f"    {line}\n" for line in main.splitlines()))
    return run_python(path)


@PLACES
def test_tasks_see_globals_that_initializer_sets(place: str, tmp_path: Path) -> None:
    definitions = """
STATE, COUNT, CACHE, ABSENT = None, 0, {}, object()
def initialize(value):
    global STATE
    STATE = CACHE["value"] = value
def task(default=ABSENT):
    global COUNT
    COUNT += 1
    return STATE, CACHE["value"], COUNT, default is ABSENT
def decorated(function):
    @functools.wraps(function)
    def call():
        return function()
    return call
@decorated
def wrapped():
    return STATE
class Job:
    def state(self):
        return STATE
"""
    main = """
with TaskPool(1, on=on, initializer=initialize, initargs=("M",)) as pool:
    print(*(pool.submit(task).result() for _ in range(2)))
    print(*(pool.submit(one).result() for one in (wrapped, Job().state, lambda: STATE)))
print(STATE, CACHE, COUNT)
"""
    assert run_on(place, tmp_path, definitions, main).splitlines() == [
        "('M', 'M', 1, True) ('M', 'M', 2, True)",
        "M M M",
        "None {} 0",
    ]


@PLACES
def test_worker_gets_definitions_and_values_of_the_program(place: str, tmp_path: Path) -> None:
    """The program defines or changes these values under its main guard, or after the workers have started."""
    definitions = """
CONFIG, factor = {}, 1
def scaled(item):
    return item * factor * CONFIG["by"]
def helper():
    return "old"
def ask_helper():
    return helper()
"""
    main = """
CONFIG["by"] = 10
def guarded():
    return late
late = "set late"
with TaskPool(1, on=on) as pool:
    print(pool.submit(scaled, 1).result(), pool.submit(guarded).result(), pool.submit(ask_helper).result())
    factor = 5
    CONFIG["by"] = 100
    def helper():
        return "new"
    late = "changed"
    print(pool.submit(scaled, 1).result(), pool.submit(guarded).result(), pool.submit(ask_helper).result())
    print(pool.submit(lambda: factor).result())
"""
    assert run_on(place, tmp_path, definitions, main).splitlines() == [
        "10 set late old",
        "500 changed new",
        "5",
    ]


@METHODS
def test_item_keeps_its_class_in_a_process_of_the_program(method: str, tmp_path: Path) -> None:
    definitions = """
@dataclasses.dataclass
class Plain:
    x: int
LIMIT = []
class WithGlobals:
    def __init__(self):
        self.x = 2
    def limit(self):
        return LIMIT
class Outer:
    class Inner:
        pass
def listen(items, answers):
    for item, cls in zip(items, (Plain, WithGlobals, Outer.Inner)):
        assert type(item) is cls, item
        if cls is WithGlobals:
            assert item.limit() is LIMIT
        answers.put(item)
"""
    main = """
items, answers = flowchan.Channel(4, across="processes"), flowchan.Channel(4, across="processes")
process = multiprocessing.Process(target=listen, args=(items, answers))
process.start()
sent = [Plain(1), WithGlobals(), Outer.Inner()]
items.put_many(sent)
print([type(answers.get(timeout=60)) is type(item) for item in sent])
items.close()
process.join()
"""
    assert run_on(method, tmp_path, definitions, main) == "[True, True, True]\n"


@PLACES
def test_changed_class_reaches_the_worker(place: str, tmp_path: Path) -> None:
    definitions = """
class Item:
    made = 0
    def __init__(self):
        Item.made += 1
    def text(self):
        return f"old {self.made}"
def text_of(item):
    return item.text(), isinstance(item, Item), item
"""
    main = """
def text(self):
    return f"new {self.made}"
with TaskPool(1, on=on) as pool:
    print(pool.submit(text_of, Item()).result()[:2], pool.submit(text_of, Item()).result()[:2])
    Item.text = text
    *found, item = pool.submit(text_of, Item()).result()
    print(*found, type(item) is Item)
"""
    assert run_on(place, tmp_path, definitions, main).splitlines() == [
        "('old 1', True) ('old 2', True)",
        "new 3 True True",
    ]


def test_lambdas_from_a_channel_keep_the_values_they_captured(tmp_path: Path) -> None:
    main = """
channel = flowchan.Channel(4, across="processes")
for factor in (2, 3):
    channel.put(lambda: factor)
factor = 4
print(channel.get()(), channel.get()(), factor)
"""
    assert run_on("fork", tmp_path, "", main) == "2 3 4\n"


def test_notebook_cells_share_globals_in_a_pool(tmp_path: Path) -> None:
    """The main module has no file and runs its cells with ``exec``, as a notebook kernel does."""
    program = script(
        tmp_path,
        """
        import sys
        cells = [
            "from flowchan.pipelines import TaskPool\\nSTATE = None",
            "def initialize():\\n    global STATE\\n    STATE = 'M'",
            "pool = TaskPool(1, on='process', initializer=initialize)",
            "def task():\\n    return STATE",
            "print(pool.submit(task).result())",
            "def task():\\n    return STATE, 'again'",
            "print(pool.submit(task).result())\\npool.close()",
        ]
        main = sys.modules["__main__"]
        del main.__file__
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), vars(main))
        """,
    )
    assert run_python(program) == "M\n('M', 'again')\n"
