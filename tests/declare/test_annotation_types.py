"""Test which item types and ports follow from annotations, and how messages name types."""

from __future__ import annotations

import collections.abc
import functools
import typing
from collections.abc import AsyncIterator, Generator, ItemsView, Iterable, Iterator, Mapping
from typing import Annotated, Any, Generic, NewType, TypeVar

import pytest

from flowchan import In, Out
from flowchan.collective import Group
from flowchan.declare.annotations import (
    Port,
    call_signature,
    element_type,
    group_parameter,
    known,
    listed,
    plain_function,
    ports_of,
    returned_type,
    type_name,
)

T = TypeVar("T")
Metres = NewType("Metres", float)


class Box(Generic[T]):
    pass


class Pairs(dict[str, T]):
    pass


@pytest.mark.parametrize(
    ("kind", "element"),
    [
        (str, str), (bytes, int), (bytearray, int), (range, int), (int, None), (list, None), (None, None),
        (list[int], int), (set[str], str), (Iterable[int], int), (Iterator[int], int),
        (AsyncIterator[bytes], bytes), (Generator[int, str, float], int), (dict[str, int], str),
        (Mapping[str, int], str), (ItemsView[str, int], None), (tuple[int, ...], int), (tuple[int, int], int),
        (tuple[int, str], None), (tuple[int, int, str], None), (Box[int], None), (Pairs[int], None),
        (list[Any], None), (int | str, None), (collections.abc.Callable[[int], str], None),
        (list[list[int]], list[int]),
    ],
    ids=str,
)  # fmt: skip
def test_element_type_is_known_for_standard_containers(kind: Any, element: Any) -> None:
    assert element_type(kind) == element


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (None, type(None)), (Any, None), (int, int), (list[int], list[int]), (int | None, int | None),
        (Metres, Metres), (T, None), ("int", None), (3, None),
    ],
    ids=str,
)  # fmt: skip
def test_only_annotations_that_describe_values_are_known(annotation: Any, kind: Any) -> None:
    assert known(annotation) == kind


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (int, "int"), (None, "None"), (type(None), "None"), (list[int], "list[int]"), (Any, "Any"),
        (tuple[int, ...], "tuple[int, ...]"), (int | None, "int | None"),
        (typing.Optional[int], "int | None"),  # noqa: UP045
        (dict[str, list[int]], "dict[str, list[int]]"), (Annotated[list[int], "words"], "list[int]"),
        (collections.abc.Callable[[int, str], bytes], "Callable[[int, str], bytes]"),
        (Box[int], "Box[int]"),
        (type("Local", (), {"__qualname__": "test.<locals>.Local"}), "Local"),
    ],
    ids=str,
)  # fmt: skip
def test_name_of_a_type_is_as_the_user_writes_it(kind: Any, name: str) -> None:
    assert type_name(kind) == name


def test_list_of_unknown_items_is_a_plain_list() -> None:
    assert listed(None) is list
    assert listed(int) == list[int]


def stage(numbers: In[int], texts: In[str], group: Group, limit: int, out: Out[float], rest: Out) -> None: ...


def with_rest(*ins: In[int], out: Out[int], **outs: Out[int]) -> None: ...


class Stage:
    def __call__(self, numbers: In[int], out: Out[str]) -> None: ...


class Made:
    def __init__(self, item: int) -> None: ...


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def test_ports_are_the_annotated_parameters_in_their_order() -> None:
    assert ports_of(stage) == (
        Port("numbers", True, int), Port("texts", True, str), Port("out", False, float),
        Port("rest", False, None),
    )  # fmt: skip
    assert ports_of(with_rest) == (Port("out", False, int),)
    for function in (Stage, Stage()):
        assert ports_of(function) == (Port("numbers", True, int), Port("out", False, str))
    assert ports_of(functools.partial(stage, limit=3)) == ports_of(stage)
    assert ports_of(decorated(stage)) == ports_of(stage)
    assert ports_of(len) == ()


def test_group_parameter_is_the_one_with_a_group_class() -> None:
    assert group_parameter(stage) == ("group", Group)
    assert group_parameter(with_rest) is None
    assert group_parameter(3) is None


def test_type_of_a_call_is_its_annotation_or_class() -> None:
    assert returned_type(Stage()) is type(None)
    assert returned_type(Stage) is type(None)
    assert returned_type(Made) is Made
    assert returned_type(functools.partial(Made, 3)) is Made
    assert returned_type(decorated(returned_type)) is None  # Any
    assert returned_type(lambda item: item) is None
    assert returned_type(int) is int


def test_signature_of_a_callable_class_has_no_self() -> None:
    for function in (Stage, Stage()):
        signature = call_signature(function)
        assert signature is not None
        assert list(signature.parameters) == ["numbers", "out"]
    assert call_signature(3) is None


def test_plain_function_is_behind_every_wrapper() -> None:
    assert plain_function(functools.partial(decorated(stage))) is stage
    assert plain_function(Stage) is plain_function(Stage()) is Stage.__call__
    assert plain_function(Stage().__call__) is Stage.__call__
    assert plain_function(Made) is Made
    assert plain_function(len) is len


def test_name_of_an_enclosing_function_may_be_assigned_later() -> None:
    def user(item: Assigned, other: Inner) -> Inner:
        print(Assigned, Inner)
        return other

    class Inner:
        pass

    assert returned_type(user) is Inner
    Assigned = int  # noqa: N806
    signature = call_signature(user)
    assert signature is not None
    assert signature.parameters["item"].annotation is int
