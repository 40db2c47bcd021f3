"""Test functions and classes sent by value: what the receiver gets, and which pickles the sender keeps."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from flowchan.items.definitions import DIGEST_LIMIT, digest_of, fingerprint
from flowchan.items.main_code import ByValuePickler
from flowchan.items.packed_classes import PackedClasses, UnpackedClasses
from flowchan.items.worker_globals import WorkerGlobals

SOURCE = """
import dataclasses
DATA = []
class Constant:
    limit = 3
    def double(self): return 2 * len(self.text)
class UsesData:
    def data(self): return DATA
@dataclasses.dataclass
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(SOURCE, vars(module))
    return module  # type: ignore[return-value]


def dumped(value: object) -> bytes:
    out = io.BytesIO()
    ByValuePickler(out, protocol=5).dump(value)
    return out.getvalue()


@pytest.mark.parametrize(("name", "kept"), [("Constant", True), ("Point", True), ("UsesData", False)])
def test_pickled_class_is_cached_only_if_its_contents_are_constant(
    name: str, kept: bool, main: ModuleType
) -> None:
    classes, cls = PackedClasses(), getattr(main, name)
    packed = classes.get(cls, ByValuePickler)
    assert (packed is not None) == kept
    assert classes.get(cls, ByValuePickler) is packed


def test_pickled_class_that_changes_is_not_cached(main: ModuleType) -> None:
    classes, cls = PackedClasses(), main.Constant
    assert classes.get(cls, ByValuePickler) is not None
    cls.limit = 1000
    assert classes.get(cls, ByValuePickler) is None


def test_importable_class_is_sent_by_name() -> None:
    assert PackedClasses().get(WorkerGlobals, ByValuePickler) is None


def test_packed_class_is_created_once_while_it_is_referenced(main: ModuleType) -> None:
    packed = PackedClasses().get(main.Constant, ByValuePickler)
    assert packed is not None
    classes = UnpackedClasses()
    assert classes.get(packed) is classes.get(packed) is main.Constant


def test_function_sent_back_to_its_program_is_the_same_object(main: ModuleType) -> None:
    exec("def f(x=1): return DATA, x", vars(main))
    assert pickle.loads(dumped(main.f)) is main.f


def test_function_with_a_changed_definition_keeps_the_sent_definition(main: ModuleType) -> None:
    exec("def f(): return 1", vars(main))
    packed = dumped(main.f)
    exec("def f(): return 2", vars(main))
    assert (pickle.loads(packed)(), main.f()) == (1, 2)


def test_function_with_a_changed_default_keeps_the_sent_default(main: ModuleType) -> None:
    exec("def f(x=1): return x", vars(main))
    packed = dumped(main.f)
    exec("def f(x=2): return x", vars(main))
    assert (pickle.loads(packed)(), main.f()) == (1, 2)


def test_received_lambda_does_not_change_the_programs_globals(main: ModuleType) -> None:
    exec("DATA = ['sent']\nf = lambda: DATA", vars(main))
    packed = dumped(main.f)
    main.DATA = ["kept"]
    assert pickle.loads(packed)() == ["sent"]
    assert main.DATA == ["kept"]


def test_redefined_class_has_a_different_fingerprint(main: ModuleType) -> None:
    before = fingerprint(main.Constant)
    exec(SOURCE, vars(main))
    assert fingerprint(main.Constant) == before
    exec(SOURCE.replace("2 * len", "3 * len"), vars(main))
    assert fingerprint(main.Constant) != before


@pytest.mark.parametrize("value", [1, "text", [1, {"a": (2,)}], {"f": dumped}, WorkerGlobals, sys])
def test_equal_values_have_equal_digests(value: Any) -> None:
    assert digest_of(value) is not None
    assert digest_of(value) == digest_of(value)
    assert digest_of(value) != digest_of([value, 1])


@pytest.mark.parametrize("value", [iter([]), bytearray(DIGEST_LIMIT + 1)], ids=["unpicklable", "large"])
def test_value_that_cannot_be_compared_has_no_digest(value: Any) -> None:
    assert digest_of(value if not hasattr(value, "__next__") else (part for part in value)) is None


def test_worker_keeps_its_value_until_the_programs_value_changes() -> None:
    shared, names = WorkerGlobals(), dict[str, Any]()
    shared.offer(names, {"state": None, "cache": {}})
    names["state"] = "set by the worker"
    names["cache"]["key"] = 1
    shared.offer(names, {"state": None, "cache": {}})
    assert names == {"state": "set by the worker", "cache": {"key": 1}}
    shared.offer(names, {"state": "set by the program", "cache": {}})
    assert names == {"state": "set by the program", "cache": {"key": 1}}


def test_value_without_digest_comes_from_the_program_each_time() -> None:
    shared, names = WorkerGlobals(), {"state": None}
    for _ in range(2):
        value: Any = (part for part in ())
        shared.offer(names, {"state": value})
        assert names["state"] is value
        names["state"] = None
