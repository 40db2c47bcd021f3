"""Test ``Sequential`` with the cases from torch 2.13's tests of ``torch.distributed.pipelining``.

One ``Sequential`` with its ``trainer(schedule=…)`` corresponds to ``pipeline`` with its split points,
``PipelineStage`` and a ``Schedule``. Each test has the name of the original test but none of its code.

The following cases differ from the originals:

``test_grad_with_manual``, ``test_manual``
    Modules that were split by hand are the layers of an ``nn.Sequential``.
``test_tracer_kwargs``, ``test_kwargs_with_tracer``, ``test_zero_bubble_with_model_kwargs``
    A trainer's step takes one value; a loss computed from ``pipe(x, y=y)`` takes several.
``test_forward_only``, ``test_eval_inference_mode``
    They use ``pipe(x)`` without a graph, or ``training.evaluate(x)``.
``test_merge_bw``
    A schedule contains ``B`` where both halves are adjacent.
``test_send_recv``
    The schedule determines the transfers, and the simulator finds impossible ones.
``test_csv``, ``test_action_parse``
    A schedule is read and written as lines of steps.
``test_shape_prop_mismatch``
    Batches may have any shape that the layers accept; errors name the part and the micro-batch.
``test_composability.py``
    Wrappers are put around the pipe: ``tests/sequential/test_wrappers.py``.

The following cases are left out:

``test_unshard_reshard``, ``test_reduce_grad``
    A trainer rejects sharded parameters.
``test_custom_dw_with_fb_schedule``, ``test_custom_dw_errors``, ``test_schedule_with_weight_update_mlp_e2e``
    The two halves of a backward step come from autograd's graph rather than from user functions.
``test_zero_bubble_schedule_errors_with_compile``
    Compiled pipes are tested in ``tests/sequential/test_module.py``.
``test_split_block_mask``
    Batches are tensors in tuples, lists and dictionaries.
``test_csv_compare``
    ``tests/sequential/test_schedule.py`` compares the schedules with those in their papers.
``test_output_chunks_memory_usage``, ``test_unflatten``, ``test_ir``
    They test internals of torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from flowchan import StageError
from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.engine.schedule import SCHEDULES, Step, parse, plan, text
from flowchan.pipelines.sequential.simulate import simulate

pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"),
]

WIDTH = 8


class Block(nn.Module):
    """A layer of the original model."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(x).relu()).relu()  # type: ignore[no-any-return]


def blocks(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number)))


class Example(nn.Module):
    """A module with its own ``forward``, and a skip connection across the split point."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        skip = x
        x = self.first(x.relu())
        return self.second(x + skip)  # type: ignore[no-any-return]


class WithKwargs(Example):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        x = x @ self.weight
        skip = x
        x = self.first((x + y).relu())
        return self.second(x + skip)  # type: ignore[no-any-return]


class BlockWithKwargs(Block):
    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


def batch(size: int = 16) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(size, WIDTH, generator=chance), torch.randn(size, WIDTH, generator=chance)


def assert_same_gradients(module: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def assert_trained(module: nn.Sequential, parts: int, steps: int = 1, **options: Any) -> None:
    """Check that training with a schedule gives the plain module's loss and accumulated gradients."""
    twin, (x, target) = copy.deepcopy(module), batch()
    chunks = options.pop("chunks", 4)
    with Sequential(module, parts, chunks=chunks).trainer(loss=mse_loss, **options) as training:
        for _ in range(steps):
            loss = training.step(x, target)
            expected = mse_loss(twin(x), target)
            expected.backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(module, twin)


# --- test_schedule.py: ScheduleTest ---

ALONE = [name for name in SCHEDULES if name not in ("zbv", "dualpipev")]


def test_get_schedule_class() -> None:
    for name in SCHEDULES:
        assert Sequential(blocks(4), [1, 1, 1, 1]).trainer(loss=mse_loss, schedule=name, workers=None)
    with pytest.raises(ValueError, match="ScheduleThatDoesNotExist"):
        Sequential(blocks(1), [1]).trainer(loss=mse_loss, schedule="ScheduleThatDoesNotExist")


@pytest.mark.parametrize("schedule", ALONE)
def test_schedule_with_single_stage(schedule: Any) -> None:
    assert_trained(blocks(1), 1, steps=2, schedule=schedule, chunks=2)


@pytest.mark.parametrize("schedule", ALONE)
def test_schedule_eval_then_train(schedule: Any) -> None:
    module, (x, target) = blocks(1), batch()
    with Sequential(module, [1], chunks=2).trainer(loss=mse_loss, schedule=schedule) as training:
        for _ in range(2):
            torch.testing.assert_close(training.evaluate(x), module(x).detach())
        assert all(one.grad is None for one in module.parameters())
        for _ in range(2):
            training.step(x, target)


# --- test_schedule.py: TestSchedulePlan ---

SHAPES = [
    (2, 2, 2),
    (2, 4, 4),
    (2, 8, 2),
    (2, 8, 4),
    (4, 4, 4),
    (4, 8, 4),
    (4, 16, 4),
    (4, 16, 16),
    (3, 2, 2),
]
SHAPES += [(3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (2, 15, 4)]
"""Parts of each worker, micro-batches and workers. The numbers need not divide each other."""


@pytest.mark.parametrize(("each", "chunks", "workers"), SHAPES)
def test_pipeline_order_and_flex_and_zero_bubble(each: int, chunks: int, workers: int) -> None:
    found = simulate(plan("interleaved", workers, each * workers, chunks))
    assert found.bubble < 1
    for name in ("gpipe", "1f1b", "zbh1"):
        simulate(plan(name, workers, workers, chunks))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize(("each", "chunks", "workers"), SHAPES)
def test_pipeline_order_for_v_schedules(schedule: Any, each: int, chunks: int, workers: int) -> None:
    """The original requires as many micro-batches as stages."""
    if each != 2:
        with pytest.raises(ValueError, match="parts"):
            plan(schedule, workers, each * workers, chunks)
    else:
        simulate(plan(schedule, workers, each * workers, chunks))


# --- test_schedule.py: TestScheduleLowering ---


@pytest.mark.parametrize(
    ("written", "step"),
    [
        ("1:F0", Step("F", 0, 1)),
        ("2:I1", Step("I", 1, 2)),
        ("0:W3", Step("W", 3, 0)),
        ("0:B3", Step("B", 3, 0)),
    ],
)
def test_action_parse(written: str, step: Step) -> None:
    assert parse(written) == [step]
    assert str(step) == written


def test_merge_bw() -> None:
    merged = ["F0 F1 F2 I0 I1 W0 B2 W1"]
    assert_trained(blocks(2), 1, schedule=merged, chunks=3)


TWO = ["0:F0 0:F1 0:B0 0:B1", "1:F0 1:B0 1:F1 1:B1"]
FOUR = [
    "0:F0 0:F1 3:F0 3:I0 3:F1 3:I1 0:I0 3:W0 0:I1 3:W1 0:W0 0:W1",
    "1:F0 2:F0 1:F1 2:F1 2:I0 1:I0 2:I1 1:I1 2:W0 2:W1 1:W0 1:W1",
]


@pytest.mark.parametrize("schedule", [TWO, FOUR], ids=["simple_2_rank_2_stage", "v_2_rank_4_stage"])
def test_send_recv(schedule: list[str]) -> None:
    parts = 2 if schedule is TWO else 4
    assert_trained(blocks(4), parts, schedule=schedule, chunks=2)
    swapped = [line.replace("F0", "F").replace("F1", "F0").replace("F ", "F1 ") for line in schedule]
    with pytest.raises(ValueError, match="the schedule"):
        Sequential(blocks(4), parts, chunks=2).trainer(
            loss=mse_loss, schedule=[swapped[0].replace("0:F1", "0:B1", 1), *swapped[1:]]
        )


def test_csv() -> None:
    steps = plan("zbv", 2, 4, 8)
    assert [parse(text(line)) for line in steps] == steps


def test_grad_with_v_schedule() -> None:
    """One worker runs both parts, so nothing is sent."""
    assert_trained(blocks(2), 2, steps=2, schedule="zbv", workers=1, chunks=2)


def test_grad_with_split_b_w() -> None:
    assert_trained(blocks(1), 1, steps=2, schedule=["F0 F1 I0 I1 W0 W1"], chunks=2)


@pytest.mark.parametrize("lines", [["F0 B0", "F0 B0"], ["F0 I0 W0", "F0 I0 W0"]])
def test_valid_schedule(lines: list[str]) -> None:
    assert Sequential(blocks(2), [1, 1], chunks=1).trainer(loss=mse_loss, schedule=lines)


@pytest.mark.parametrize("lines", [["F0 B0"], ["F0", "F0"]], ids=["missing_rank", "missing_action"])
def test_invalid_schedule(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="the schedule"):
        Sequential(blocks(2), [1, 1], chunks=1).trainer(loss=mse_loss, schedule=lines)


@pytest.mark.parametrize(
    ("schedule", "workers", "parts", "expected"),
    [
        ("1f1b", 2, 2, [0, 1]),
        ("interleaved", 2, 4, [0, 1, 0, 1]),
        ("interleaved", 4, 8, [0, 1, 2, 3, 0, 1, 2, 3]),
        ("zbv", 2, 4, [0, 1, 1, 0]),
    ],
)
def test_generate_stage_to_rank_mapping(schedule: Any, workers: int, parts: int, expected: list[int]) -> None:
    found = plan(schedule, workers, parts, 4)
    assert [
        next(w for w in range(workers) if any(s.part == p for s in found[w])) for p in range(parts)
    ] == expected


# --- test_schedule_multiproc.py ---


def test_forward_only() -> None:
    module, (x, _) = blocks(2), batch()
    y = x
    with torch.no_grad(), Sequential(module, 2, chunks=4) as pipe:
        for _ in range(5):
            x, y = pipe(x), module(y)
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eval_inference_mode(schedule: Any) -> None:
    module, (x, _) = blocks(4), batch()
    workers = 2 if schedule in ("interleaved", "zbv", "dualpipev") else None
    training = Sequential(module, 4, chunks=4).trainer(loss=mse_loss, schedule=schedule, workers=workers)
    with training, torch.inference_mode():
        torch.testing.assert_close(training.evaluate(x), module(x))
    assert all(one.grad is None for one in module.parameters())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_multi_iter(schedule: Any) -> None:
    assert_trained(blocks(2), 2, steps=20, schedule=schedule)


@pytest.mark.parametrize("cut", [["first"], ["second"]])
def test_kwargs_with_tracer_and_tracer_kwargs(cut: list[str]) -> None:
    module, (x, y) = WithKwargs(), batch()
    twin = copy.deepcopy(module)
    with Sequential(module, cut, chunks=4) as pipe:
        out = pipe(x, y=y)
        out.square().sum().backward()
        assert set(pipe.state_dict()) == set(twin.state_dict())
    expected = twin(x, y=y)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_grad_with_tracer(schedule: Any) -> None:
    module = Example()
    twin, (x, target) = copy.deepcopy(module), batch()
    with Sequential(module, ["second"], chunks=4).trainer(loss=mse_loss, schedule=schedule) as training:
        training.step(x, target)
    mse_loss(twin(x), target).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("on", ["thread", "process"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_grad_with_manual(schedule: Any, on: Any) -> None:
    module = blocks(2)
    twin, (x, target) = copy.deepcopy(module), batch()
    with Sequential(module, 2, on=on, chunks=4).trainer(loss=mse_loss, schedule=schedule) as training:
        for _ in range(2):
            module.zero_grad()
            training.step(x, target)
    mse_loss(twin(x), target).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
def test_grad_with_manual_interleaved(schedule: Any) -> None:
    assert_trained(blocks(4), 4, steps=2, schedule=schedule, workers=2)


def with_weights_late(worker: int, workers: int, parts: int, chunks: int) -> Iterator[Step]:
    for op in "FIW":
        for chunk in range(chunks):
            yield Step(op, chunk, worker)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["zbh1", with_weights_late])
def test_schedule_with_native_zero_bubble(schedule: Any) -> None:
    assert_trained(blocks(2), 2, steps=4, schedule=schedule)


def test_pipeline_schedule_runtime_custom_sched() -> None:
    assert_trained(blocks(2), 2, steps=2, schedule=["F0 F1 B1 B0", "F0 F1 B1 B0"], chunks=2)


@pytest.mark.parametrize(
    "schedule",
    [
        ["0:F0 3:F0 3:B0 0:B0", "1:F0 2:F0 2:B0 1:B0"],
        ["0:F0 1:F0 1:B0 0:B0", "2:F0 3:F0 3:B0 2:B0"],
        "zbv",
    ],
    ids=["VShaped", "Unbalanced", "ZBVZeroBubble"],
)
def test_non_symmetric_stage_ids(schedule: Any) -> None:
    assert_trained(blocks(4), 4, schedule=schedule, chunks=1)


def test_zero_bubble_with_model_kwargs() -> None:
    """The loss is computed from the pipe's output, and its backward pass uses no schedule."""
    module, (x, y) = nn.Sequential(BlockWithKwargs(), Block()), batch()
    twin = copy.deepcopy(module)
    with Sequential(module, [1, 1], chunks=4) as pipe:
        mse_loss(pipe(x, unused=torch.ones(len(x))), y).backward()  # type: ignore[no-untyped-call]
    mse_loss(twin(x), y).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(module, twin)


# --- test_stage.py, test_pipe.py, test_microbatch.py, test_backward.py ---


def test_tracer_and_model_split() -> None:
    module, (x, _) = Example(), batch()
    with Sequential(module, ["second"], chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), module(x))
        assert len(pipe.parts) == 2
        assert set(pipe.state_dict()) == set(module.state_dict())


def test_manual() -> None:
    module, (x, _) = blocks(2), batch()
    with Sequential(list(module), [1, 1], chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), module(x))


def test_shape_prop_mismatch() -> None:
    module, (x, _) = blocks(2), batch()
    with Sequential(module, 2, chunks=4) as pipe:
        pipe(x)
        torch.testing.assert_close(pipe(x[:13]), module(x[:13]))
        for wrong in (x[:, 1:], x.to(torch.int32)):
            with pytest.raises((StageError, RuntimeError), match=r"part 0|layer '0'"):
                pipe(wrong)


def test_split_and_merge_and_chunk_spec() -> None:
    class Swaps(nn.Module):
        def forward(self, values: Any) -> Any:
            return {"y": values[1], "x": (values[0], None)}

    x, y = torch.randn(9, 2), torch.randn(9, 5)
    with Sequential([Swaps()], [1], chunks=4) as pipe:
        found = pipe((x, y))
    assert torch.equal(found["y"], y)
    assert torch.equal(found["x"][0], x)
    assert found["x"][1] is None


def test_stage_backward_and_its_two_halves() -> None:
    """The test combines ``test_stage_backward``, ``_input``, ``_weight`` and ``_weight_multiple_iters``."""
    assert_trained(blocks(1), 1, steps=3, schedule=["F0 F1 I0 W0 I1 W1"], chunks=2)
    assert_trained(blocks(2), 2, steps=3, schedule=["F0 F1 B0 I1 W1", "F0 B0 F1 I1 W1"], chunks=2)
