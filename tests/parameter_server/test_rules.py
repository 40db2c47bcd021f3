"""Compare each rule with plain torch and NumPy, and test the checks that a client makes before a push."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowchan.pipelines.parameter_server.push_rules import apply, apply_to_object, check_rule, check_values

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
]


def pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return (torch.randn(7, 3) * 10).abs().to(dtype), (torch.randn(7, 3) * 10).abs().to(dtype)


def applied(rule: Any, current: Any, given: Any, scale: float = 1.0) -> Any:
    """Apply a rule, check that the rule did not change ``current``, and return the new value."""
    before = current.copy() if isinstance(current, np.ndarray) else current.clone()
    out = np.full_like(current, 77) if isinstance(current, np.ndarray) else torch.full_like(current, 77)
    apply(rule, current, given, scale, out)
    assert (current == before).all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rules_match_plain_torch(dtype: torch.dtype) -> None:
    current, given = pair(dtype)
    assert torch.equal(applied("zero", current, None), torch.zeros_like(current))
    assert torch.equal(applied("copy", current, given), given)
    assert torch.equal(applied("add", current, given), current + given)
    assert torch.equal(applied(lambda x, y: x * 2 + y, current, given), current * 2 + given)
    if dtype.is_floating_point or dtype.is_complex:
        assert torch.equal(applied("copy", current, given, -0.3), given * -0.3)
        assert torch.equal(applied("add", current, given, -0.3), current.add(given, alpha=-0.3))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128", "int32", "uint8"])
def test_rules_match_plain_numpy(dtype: str) -> None:
    current, given = (x.numpy().astype(dtype) for x in pair(torch.float64))
    assert not applied("zero", current, None).any()
    assert (applied("copy", current, given) == given).all()
    assert (applied("add", current, given) == current + given).all()
    assert (applied(np.maximum, current, given) == np.maximum(current, given)).all()
    if np.dtype(dtype).kind in "fc":
        assert (applied("add", current, given, -0.3) == current + given * -0.3).all()


def test_push_keeps_the_type_of_the_stored_value() -> None:
    current, given = pair(torch.float32)
    read_only = given.numpy()
    read_only.flags.writeable = False
    assert torch.equal(applied("add", current, read_only), current + given)
    assert (applied("add", current.numpy(), given) == (current + given).numpy()).all()


def test_function_that_mutates_its_argument_keeps_the_current_block() -> None:
    current, given = pair(torch.float32)
    assert torch.equal(applied(lambda x, y: x.mul_(2).add_(y), current, given), (current * 2).add(given))


def test_function_that_returns_another_shape_raises() -> None:
    current, given = pair(torch.float32)
    with pytest.raises(ValueError, match=r"push: rule must return a value of shape \(7, 3\), got"):
        applied(lambda x, y: x[0], current, given)


def test_rules_apply_to_objects() -> None:
    assert apply_to_object("copy", {"a": 1}, [2], 1.0) == [2]
    assert apply_to_object("add", 5, 3, -2.0) == -1
    assert apply_to_object("zero", 5, None, 1.0) == 0
    assert apply_to_object(lambda x, y: x | y, {"a": 1}, {"b": 2}, 1.0) == {"a": 1, "b": 2}


@pytest.mark.parametrize("rule", ["none", "Add", "", None, 3, lambda: 0, lambda x: x])
def test_client_rejects_an_unknown_rule(rule: Any) -> None:
    """TorchMPI sends even an invalid rule to the server, where a failed assertion ends the server."""
    error = ValueError if isinstance(rule, str) else TypeError
    with pytest.raises(error, match=r"push: rule must be .* a function \(current, given\) -> new, got"):
        check_rule("push", rule)


@pytest.mark.parametrize("rule", ["zero", "copy", "add", "gradient", np.maximum, torch.add, lambda x, y: x])
def test_client_accepts_names_and_functions_of_two_arguments(rule: Any) -> None:
    check_rule("push", rule)


@pytest.mark.parametrize(
    ("values", "rule", "scale", "error", "message"),
    [
        (
            {"x": torch.ones(2)},
            "add",
            1.0,
            KeyError,
            "each key in values must be the name of one of the server's tensors",
        ),
        (
            {"w": torch.ones(3)},
            "add",
            1.0,
            ValueError,
            r"values\['w'\] must have the shape \(2,\), got \(3,\)",
        ),
        ({"w": torch.ones(2, dtype=torch.float64)}, "add", 1.0, TypeError, "must be float32 .* got float64"),
        ({"w": [1.0, 2.0]}, "add", 1.0, TypeError, "must be an array or a tensor, got"),
        ({"n": np.ones(2, np.int64)}, "add", 0.5, ValueError, "scale must be 1 for the int64 tensor 'n'"),
        (
            {"n": np.ones(2, np.int64)},
            "gradient",
            1.0,
            ValueError,
            "rule must not be 'gradient' for the int64",
        ),
    ],
)
def test_client_rejects_values_that_the_server_cannot_use(
    values: Any, rule: str, scale: float, error: type[Exception], message: str
) -> None:
    specs = {"w": torch.zeros(2), "n": np.zeros(2, np.int64)}
    with pytest.raises(error, match=f"push: .*{message}" if "push" not in message else message):
        check_values("push", values, rule, scale, specs)
