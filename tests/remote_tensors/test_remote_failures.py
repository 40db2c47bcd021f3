"""Test failed operations on remote tensors: root causes, dependents, poisoned storages, and errors that were
not fetched."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import failing_operations
import pytest
from support.optional_packages import optional

from flowchan import Closed, FlowchanError
from flowchan.pipelines import NodeDied, RemoteError, RemoteNodes

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


@pytest.fixture
def nodes() -> Iterator[Any]:
    nodes = RemoteNodes(2)
    yield nodes
    with contextlib.suppress(RemoteError):  # the tests of close() have separate nodes
        nodes.close()


def ones(device: Any, *shape: int) -> Any:
    return torch.ones(*(shape or (3,)), device=device)


def fail(x: Any, how: str = "value") -> Any:
    return torch.ops.failing.fail(x, how)


def error_of(x: Any) -> RemoteError:
    """Return the error that fetching ``x`` raises."""
    with pytest.raises(RemoteError) as caught:
        x.cpu()
    return caught.value


# --- root cause ---


def test_failed_operation_raises_both_tracebacks(nodes: Any) -> None:
    x = ones(nodes[1])
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    y = torch.ops.failing.fail(x, "value")
    error = error_of(y)
    assert isinstance(error, FlowchanError)
    assert not isinstance(error, NodeDied)
    assert (type(error.__cause__), str(error.__cause__)) == (ValueError, "a bad value")
    assert "failing::fail" in error.operation
    assert error.node == 1
    text = str(error)
    assert f"issued at {__file__}:{line} in test_failed_operation_raises_both_tracebacks" in text
    assert 'raise ValueError("a bad value")' in text
    assert f'File "{failing_operations.__file__}"' in text
    assert "failing::fail" in text
    assert x.sum().item() == 3


@pytest.mark.parametrize(
    "fetch",
    [
        lambda y: y.cpu(),
        lambda y: y.sum().item(),
        lambda y: bool(y.sum() > 0),
        lambda y: y.tolist(),
        lambda y: print(y),
        lambda y: f"{y}",
        lambda y: y.nonzero(),
        lambda y: y.unbind()[0].item(),
        lambda y: torch.equal(y, y),
        lambda y: torch.zeros(3).copy_(y),
    ],
    ids=["cpu", "item", "bool", "tolist", "print", "format", "nonzero", "unbind", "equal", "copy"],
)
def test_fetch_of_failed_tensor_raises_and_node_continues(nodes: Any, fetch: Any) -> None:
    x = ones(nodes[0])
    y = fail(x)
    with pytest.raises(RemoteError) as caught:
        fetch(y)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "test_remote_failures.py" in str(caught.value)
    assert (x + 1).tolist() == [2, 2, 2]
    nodes.sync()


def test_thousand_dependents_are_skipped_with_the_root_cause(nodes: Any) -> None:
    x = ones(nodes[0])
    before = torch.ops.failing.counted(x).item()
    y = fail(x)
    for _ in range(1000):
        y = torch.ops.failing.count(y)
    error = error_of(y)
    assert isinstance(error.__cause__, ValueError)
    assert "failing::fail" in error.operation
    assert torch.ops.failing.counted(x).item() == before
    nodes.sync()


def test_root_cause_crosses_nodes_and_both_nodes_continue(nodes: Any) -> None:
    a, b = ones(nodes[0]), ones(nodes[1])
    there = fail(a).to(nodes[1])
    back = (there + b).to(nodes[0]) * a
    for broken in (there, back):
        error = error_of(broken)
        assert isinstance(error.__cause__, ValueError)
        assert error.node == 0
        assert f"issued at {__file__}" in str(error)
    assert ((a.to(nodes[1]) + b).to(nodes[0]) + a).tolist() == [3, 3, 3]
    nodes.sync()


def test_torch_errors_on_the_node_keep_their_type(nodes: Any) -> None:
    x = ones(nodes[0], 3, 3)
    error = error_of(x[torch.tensor([0, 7])])
    assert isinstance(error.__cause__, IndexError)
    assert "out of bounds" in str(error)


def test_linalg_check_raises_as_it_does_locally(nodes: Any) -> None:
    """``torch.linalg.cholesky`` checks a flag. If the flag reports a failure, the result is meaningless."""
    x = -torch.eye(3).to(nodes[0])
    with pytest.raises((RemoteError, torch.linalg.LinAlgError), match="positive-definite"):
        torch.linalg.cholesky(x).cpu()
    good = torch.linalg.cholesky(-x)
    assert good.cpu().equal(torch.eye(3))


@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_base_exception_in_a_kernel_fails_only_its_operation(nodes: Any, how: str) -> None:
    x = ones(nodes[0])
    error = error_of(fail(x, how))
    assert isinstance(error.__cause__, SystemExit if how == "exit" else KeyboardInterrupt)
    assert x.tolist() == [1, 1, 1]


def test_unpicklable_exception_becomes_text(nodes: Any) -> None:
    error = error_of(fail(ones(nodes[0]), "unpicklable"))
    assert error.__cause__ is not None
    assert "Unpicklable" in str(error)
    assert "no pickle" in str(error)


def test_operation_unknown_to_the_node_fails_by_name(nodes: Any) -> None:
    x = ones(nodes[0])
    x.cpu()
    failing_operations.register("late(Tensor x) -> Tensor", torch.clone, torch.empty_like)
    error = error_of(torch.ops.failing.late(x))
    assert "failing.late" in str(error) or "failing::late" in str(error)
    assert x.tolist() == [1, 1, 1]


def test_error_prints_its_cause_and_can_be_pickled(nodes: Any) -> None:
    error = error_of(fail(ones(nodes[0])))
    assert "ValueError: a bad value" in "".join(traceback.format_exception(error))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.operation, copy.node) == (
        RemoteError,
        str(error),
        error.operation,
        0,
    )


def test_shape_error_raises_at_the_call(nodes: Any) -> None:
    x = ones(nodes[0], 2, 3)
    with pytest.raises(RuntimeError, match="reduction dim"):
        x @ x
    with pytest.raises(RuntimeError, match=r"(?i)size|broadcast"):
        x + ones(nodes[0], 4, 5)
    nodes.sync()
    assert (x @ x.T).tolist() == [[3, 3], [3, 3]]


# --- poisoned storages ---


def test_in_place_failure_poisons_the_storage_with_its_views(nodes: Any) -> None:
    base = ones(nodes[0], 4, 4)
    before, row, column = base.clone(), base[0], base[:, 1]
    detached, viewed = base.detach(), base.view(16)
    torch.ops.failing.fail_(row, "value")
    for broken in (base, row, column, detached, viewed, base[3], base.T, viewed[8:], column.sum(), base + 1):
        error = error_of(broken)
        assert isinstance(error.__cause__, ValueError)
        assert "failing::fail_" in error.operation
    assert before.sum().item() == 16
    nodes.sync()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, bad: x.add_(bad),
        lambda x, bad: x.copy_(bad),
        lambda x, bad: torch.mul(x, bad, out=x),
        lambda x, bad: x[1:].mul_(bad[1:]),
        lambda x, bad: torch._foreach_add_([x, bad], 1.0),
        lambda x, bad: torch._foreach_add_([x], [bad]),
        lambda x, bad: x.index_put_((torch.tensor([0]),), bad[:1]),
    ],
    ids=["add_", "copy_", "out", "view", "foreach list", "foreach", "index_put_"],
)
def test_in_place_operation_with_failed_input_poisons_its_target(nodes: Any, change: Any) -> None:
    """The target has not received its new value, so reading it must raise."""
    x = ones(nodes[0])
    view = x.view(3, 1)
    bad = fail(ones(nodes[0]))
    change(x, bad)
    for broken in (x, view, x * 2):
        error = error_of(broken)
        assert "failing::fail" in error.operation
        assert isinstance(error.__cause__, ValueError)


def test_foreach_failure_poisons_every_target(nodes: Any) -> None:
    targets = [ones(nodes[0]) for _ in range(3)]
    bad = torch.tensor([0, 9]).to(nodes[0])
    kept = ones(nodes[0])
    targets[1].index_fill_(0, bad, 0.0)
    torch._foreach_mul_(targets, 2.0)
    for target in targets:
        assert isinstance(error_of(target).__cause__, IndexError)
    assert kept.tolist() == [1, 1, 1]


def test_failure_before_a_copy_poisons_the_copy_not_the_receiver(nodes: Any) -> None:
    target = ones(nodes[1])
    target.copy_(fail(ones(nodes[0])))
    assert isinstance(error_of(target).__cause__, ValueError)
    assert ones(nodes[1]).tolist() == [1, 1, 1]


# --- backward ---


class FailsInBackward(torch.autograd.Function if torch else object):  # type: ignore[misc]
    """Identity function whose gradient fails on the node."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return fail(gradient)


class FetchesInBackward(FailsInBackward):
    """Identity function whose backward pass reads a failed gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        fail(gradient).sum().item()
        return gradient


@pytest.mark.parametrize("crossing", [False, True])
def test_failure_in_backward_reaches_the_gradient(nodes: Any, crossing: bool) -> None:
    x = ones(nodes[0]).requires_grad_()
    y = FailsInBackward.apply(x * 2)
    if crossing:
        y = y.to(nodes[1]) * ones(nodes[1])
    y.sum().backward()
    error = error_of(x.grad)
    assert isinstance(error.__cause__, ValueError)
    assert "test_remote_failures.py" in str(error)


@pytest.mark.parametrize("crossing", [False, True])
def test_fetch_in_backward_raises_from_backward(nodes: Any, crossing: bool) -> None:
    x = ones(nodes[0]).requires_grad_()
    y = FetchesInBackward.apply(x * 2)
    if crossing:
        y = y.to(nodes[1]) * ones(nodes[1])
    with pytest.raises(RemoteError) as caught:
        y.sum().backward()
    assert isinstance(caught.value.__cause__, ValueError)
    z = (x * 3).sum()
    z.backward()
    assert x.grad.tolist() == [3, 3, 3]


# --- unfetched failures ---


def test_sync_raises_an_unfetched_failure_once(nodes: Any) -> None:
    fail(ones(nodes[1]))
    with pytest.raises(RemoteError, match="a bad value"):
        nodes.sync()
    nodes.sync()
    assert ones(nodes[1]).tolist() == [1, 1, 1]


def test_sync_does_not_raise_a_fetched_failure(nodes: Any) -> None:
    y = fail(ones(nodes[0]))
    z = y + 1
    error_of(z)
    nodes.sync()
    error_of(y)  # the tensor itself still contains the failure


def test_sync_raises_failure_of_dropped_tensor(nodes: Any) -> None:
    torch.ops.failing.fail_(ones(nodes[0]), "value")
    with pytest.raises(RemoteError, match=r"failing::fail_"):
        nodes.sync()


def test_close_raises_an_unfetched_failure_once() -> None:
    nodes = RemoteNodes(2)
    fail(ones(nodes[1]))
    with pytest.raises(RemoteError, match="a bad value"):
        nodes.close()
    nodes.close()


def test_close_raises_on_leaving_the_block() -> None:
    with pytest.raises(RemoteError, match="a bad value"), RemoteNodes(1) as nodes:
        fail(ones(nodes[0]))


def test_fetched_failure_is_not_raised_by_close() -> None:
    with RemoteNodes(1) as nodes:
        error_of(fail(ones(nodes[0])))


def test_exception_of_the_block_gets_the_failure_as_a_note() -> None:
    def leave_block() -> None:
        with RemoteNodes(1) as nodes:
            fail(ones(nodes[0]))
            raise KeyError("original")

    with pytest.raises(KeyError, match="original") as caught:
        leave_block()
    (note,) = caught.value.__notes__
    assert "a bad value" in note
    assert "test_remote_failures.py" in note


def test_failure_that_leaves_the_block_is_not_noted_again() -> None:
    with pytest.raises(RemoteError) as caught, RemoteNodes(1) as nodes:
        fail(ones(nodes[0])).cpu()
    assert not getattr(caught.value, "__notes__", [])


def test_use_after_close_raises_with_the_remedy() -> None:
    with RemoteNodes(1) as nodes:
        x = ones(nodes[0])
    with pytest.raises((Closed, RuntimeError), match="closed"):
        x + 1
    with pytest.raises((Closed, RuntimeError), match="closed"):
        x.cpu()
