"""Test that group calls reject invalid arguments before anything is sent.

The error names the argument, its value and the allowed values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.group_members import free_address, in_threads, raised

from flowchan import collective

OPS = "'sum', 'mean', 'prod', 'min', 'max', 'and', 'or', 'xor'"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.allreduce(1, op=3), TypeError,
         f"allreduce: op must be one of {OPS} or a function that takes two arguments, got 3 (int)"),
        (lambda g: g.allreduce(np.ones(2), op=3), TypeError, "allreduce: op must be one of"),
        (lambda g: g.reduce(1, op=3), TypeError, "reduce: op must be one of"),
        (lambda g: g.reduce(np.ones(2), op="add"), ValueError,
         "or a function that takes two arguments, got 'add'"),
        (lambda g: g.allreduce_with(1, 3), TypeError,
         "fn must be a function that takes two arguments, got 3 (int)"),
        (lambda g: next(g.join("sum")), TypeError,
         "fn must be a function that takes two arguments, got 'sum' (str)"),
        (lambda g: g.scatter(5, g.rank), TypeError,
         "scatter: xs must be a list with one part for each of the 2 members, got 5 (int)"),
        (lambda g: g.scatter(None, g.rank), TypeError, "scatter: xs must be a list"),
        (lambda g: g.scatter([1], g.rank), ValueError,
         "scatter: xs must have one part for each of the 2 members, got 1"),
        (lambda g: g.alltoall(5), TypeError, "alltoall: xs must be a list with one part for each"),
        (lambda g: g.alltoall(iter([1, 2])), TypeError, "alltoall: xs must be a list with one part for each"),
        (lambda g: g.alltoall([1, 2], out=5), TypeError, "alltoall: out must be a list with one part"),
        (lambda g: g.alltoall([np.ones(1), 2], out=[np.ones(1), np.ones(1)]), TypeError,
         "each of xs must be an array or a tensor, got 2 (int)"),
        (lambda g: g.allreduce(np.ones(2), out=5), TypeError,
         "allreduce: out must be an array or a tensor, got 5 (int)"),
        (lambda g: g.allreduce(1, out=5), TypeError, "allreduce: out must be an array or a tensor, got 5"),
        (lambda g: g.reduce(np.ones(2), g.rank, out=5), TypeError,
         "reduce: out must be an array or a tensor"),
        (lambda g: g.reduce_scatter(np.ones(2), out=5), TypeError, "reduce_scatter: out must be an array"),
        (lambda g: g.reduce_scatter(3), TypeError, "reduce_scatter: x must be an array or a tensor"),
        (lambda g: g.allgather(np.ones(2), out=5), TypeError, "must be an array or a tensor, got 5 (int)"),
        (lambda g: g.allgather(np.ones(2), out=[5, 5]), TypeError,
         "must be an array or a tensor, got 5 (int)"),
        (lambda g: g.allgather(5, out=np.ones(2)), TypeError, "x must be an array or a tensor, got 5 (int)"),
        (lambda g: g.receive(1 - g.rank, out=5), TypeError, "receive: out must be an array or a tensor"),
        (lambda g: g.broadcast(np.ones(2), "a"), ValueError, "root must be a rank of the group, from 0 to 1"),
        (lambda g: g.broadcast(np.ones(2), 0.5), ValueError, "root must be a rank of the group, from 0 to 1"),
        (lambda g: g.broadcast(np.ones(2), 1 << 70), ValueError, "root must be a rank of the group"),
        (lambda g: g.reduce(1, 0.5), ValueError, "root must be a rank of the group, from 0 to 1, got 0.5"),
        (lambda g: g.barrier(timeout="soon"), ValueError, "timeout must be None or at least 0 seconds"),
        (
            lambda g: g.allreduce(np.ones(2, np.longdouble)),
            TypeError,
            "convert them first, for example to float64",
        ),
        (lambda g: g.allreduce(np.ones(2, "G")), TypeError, "convert them first, for example to complex128"),
        (lambda g: g.allreduce(np.ones(2, ">f8")), TypeError,
         "type >f8 cannot be combined by sum; convert them first, for example with .astype("),
        (lambda g: g.allreduce(np.array([b"a"])), TypeError,
         "type |S1 cannot be combined by sum; only numbers, booleans, dates and time spans can be combined"),
        (lambda g: g.allreduce(np.ones(2, [("a", "i4")]), op="max"), TypeError,
         "elements of type [('a', '<i4')] cannot be combined by max; only numbers"),
        (lambda g: g.allreduce(np.ones(2, "F"), op="max"), TypeError,
         "elements of type complex64 cannot be combined by max; use sum, mean, prod"),
        (lambda g: g.allreduce(np.ma.ones(2)), TypeError, "without a mask, got the masked float64[2]"),
        (lambda g: g.broadcast(np.ma.ones(2)), TypeError, "without a mask, got the masked float64[2]"),
        (lambda g: g.allgather(np.ma.ones(2)), TypeError, "without a mask, got the masked float64[2]"),
        (lambda g: g.allreduce(np.ones(2), out=np.ma.ones(2)), TypeError, "must be an array without a mask"),
        (lambda g: g.allreduce(np.ones(1 + 2 * g.rank, object)), ValueError,
         "arrays must have the same shape, got (1,) and (3,)"),
    ],
)  # fmt: skip
def test_invalid_argument_error_names_value_and_allowed_values(
    call: Any, error: type[Exception], message: str
) -> None:
    """The group stays usable after the error."""

    def body(g: Any) -> Any:
        with pytest.raises(error) as info:
            call(g)
        return str(info.value), g.allreduce(1)

    for text, total in raised(in_threads(2, body)):
        assert message in text
        assert total == 2


GIVEN: dict[str, Any] = {"rank": 1, "size": 2, "at": "127.0.0.1:9", "secret": b"only members know it"}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"secret": b"x"}, ValueError, "group: secret must have at least 16 bytes, got 1"),
        ({"secret": b""}, ValueError, "group: secret must have at least 16 bytes, got 0"),
        ({"secret": "only members know it"}, TypeError,
         "group: secret must be a bytes object of length 16 or more, got str"),
        ({"secret": 3}, TypeError, "group: secret must be a bytes object of length 16 or more, got int"),
        ({"rank": 0.5}, TypeError, "group: rank must be an int of at least 0, got 0.5 (float)"),
        ({"rank": "a"}, TypeError, "group: rank must be an int of at least 0, got 'a' (str)"),
        ({"rank": 2}, ValueError, "group: rank must be at most 1, got 2"),
        ({"size": 0}, ValueError, "group: size must be at least 1, got 0"),
        ({"size": "2"}, TypeError, "group: size must be an int of at least 1, got '2' (str)"),
        ({"at": 4711}, TypeError, "group: at must be a string, got 4711 (int)"),
        ({"timeout": "soon"}, TypeError, "group: timeout must be a number of seconds, got 'soon' (str)"),
        ({"timeout": None}, TypeError, "group: timeout must be a number of seconds, got None"),
        ({"timeout": -1}, ValueError, "group: timeout must be a finite, non-negative number of seconds"),
    ],
)  # fmt: skip
def test_group_checks_arguments_before_it_connects(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as info:
        collective.group(**GIVEN | given)
    assert message in str(info.value)
    assert "only members" not in str(info.value)  # the error hides the secret


def test_short_secret_in_environment_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "FLOWCHAN_AT": "127.0.0.1:9",
        "FLOWCHAN_SECRET": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="FLOWCHAN_SECRET: secret must have at least 16 bytes, got 1"):
        collective.group()


def test_group_times_out_without_rank_0() -> None:
    with pytest.raises(TimeoutError, match="rank 1 of 2 timed out: rank 0"):
        collective.group(**GIVEN | {"at": free_address(), "timeout": 0.1})


def test_members_rejects_an_invalid_size() -> None:
    with pytest.raises(TypeError, match=r"members: size must be an int of at least 1, got 'two' \(str\)"):
        collective.members("two")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="members: size must be at most 1,024, got 2000"):
        collective.members(2000)
