"""Test the order of steps in each schedule, and the text format, with neither a model nor torch."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowchan.pipelines.sequential.engine import schedule as module
from flowchan.pipelines.sequential.engine.schedule import IN_A_V, SCHEDULES, Step, parse, plan, steps, text
from flowchan.pipelines.sequential.simulate import simulate

SMALL = st.integers(1, 6)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Any, int, int, int]:
    """Draw a valid combination of schedule, workers, parts and chunks."""
    schedule, workers = draw(st.sampled_from(SCHEDULES)), draw(SMALL)
    most = {"interleaved": 4, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    parts = draw(st.integers(workers, most * workers))
    return schedule, workers, parts, draw(st.integers(1, 20))


# --- order ---


def test_gpipe_runs_all_forward_then_all_backward_passes() -> None:
    assert [text(one) for one in plan("gpipe", 2, 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_alternates_once_the_pipeline_is_full() -> None:
    assert [text(one) for one in plan("1f1b", 3, 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_few_micro_batches_equals_gpipe() -> None:
    assert [text(one) for one in plan("1f1b", 4, 4, 2)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_zbh1_is_1f1b_with_delayed_weight_gradients() -> None:
    assert [text(one) for one in plan("zbh1", 3, 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zbv_matches_its_paper() -> None:
    """Source: figure 6 of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", with 4 workers and
    8 parts."""
    assert text(steps("zbv", 0, 4, 8, 8)).startswith(
        "0:F0 0:F1 0:F2 0:F3 0:F4 0:F5 0:F6 7:F0 7:I0 7:W0 7:F1 7:I1 7:W1 7:F2 7:I2 7:W2 7:F3 7:I3 7:W3"
    )
    assert text(steps("zbv", 3, 4, 8, 8)).startswith(
        "3:F0 4:F0 3:F1 4:F1 3:F2 4:F2 3:F3 4:F3 4:I0 4:W0 3:F4 3:I0 3:W0 4:F4 4:I1 4:W1"
    )


def test_dualpipev_alternates_between_its_two_parts() -> None:
    assert [text(one) for one in plan("dualpipev", 2, 4, 4)] == [
        "0:F0 0:F1 0:F2 3:F0 3:I0 3:W0 3:F1 0:F3 3:B1 3:F2 0:B0 3:B2 3:F3 0:B1 3:B3 0:B2 0:B3",
        "1:F0 2:F0 1:F1 2:F1 1:F2 2:B0 2:F2 1:B0 1:F3 2:B1 2:F3 1:B1 2:B2 1:B2 2:I3 1:I3 2:W3 1:W3",
    ]


@pytest.mark.parametrize("schedule", IN_A_V)
def test_schedules_in_a_v_allow_an_odd_number_of_parts(schedule: Any) -> None:
    found = plan(schedule, 2, 3, 4)
    assert [{step.part for step in steps} for steps in found] == [{0}, {1, 2}]
    simulate(found)


def test_interleaved_sends_groups_through_one_part_after_another() -> None:
    assert [text(one) for one in plan("interleaved", 2, 4, 2)] == [
        "0:F0 0:F1 2:F0 2:F1 2:B0 2:B1 0:B0 0:B1",
        "1:F0 1:F1 3:F0 3:B0 3:F1 3:B1 1:B0 1:B1",
    ]


def test_interleaved_matches_megatron() -> None:
    """Source: figure 4 of Narayanan et al. 2021, with 4 workers, 8 parts and 8 micro-batches.

    The first worker runs 2 * 3 + 4 forward passes before it alternates.
    """
    assert text(steps("interleaved", 0, 4, 8, 8)).startswith(
        "0:F0 0:F1 0:F2 0:F3 4:F0 4:F1 4:F2 4:F3 0:F4 0:F5 0:F6 4:B0 0:F7 4:B1 4:F4 4:B2 4:F5 4:B3 4:F6 0:B0"
    )
    assert text(steps("interleaved", 3, 4, 8, 8)).startswith(
        "3:F0 3:F1 3:F2 3:F3 7:F0 7:B0 7:F1 7:B1 7:F2 7:B2 7:F3 7:B3"
    )


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_interleaved_with_one_part_per_worker_equals_1f1b(chunks: int) -> None:
    assert plan("interleaved", 3, 3, chunks) == plan("1f1b", 3, 3, chunks)


def test_interleaved_allows_numbers_not_divisible_by_workers() -> None:
    assert [text(one) for one in plan("interleaved", 2, 3, 3)] == [
        "0:F0 0:F1 2:F0 2:F1 0:F2 2:B0 2:B1 2:F2 0:B0 0:B1 2:B2 0:B2",
        "F0 F1 F2 B0 B1 B2",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_worker_with_one_micro_batch_runs_two_steps(schedule: Any) -> None:
    assert text(steps(schedule, 0, 1, 1, 1)) == "F0 B0"


@settings(deadline=None)
@given(arguments())
def test_each_step_occurs_once_and_backward_follows_forward(
    one: tuple[Any, int, int, int],
) -> None:
    schedule, workers, parts, chunks = one
    for worker, found in enumerate(plan(schedule, workers, parts, chunks)):
        actual: Any = range(worker, parts, workers)
        if schedule in IN_A_V:
            actual = [part for part in (worker, 2 * workers - 1 - worker) if part < parts]
        whole = [half for step in found for half in halves(step)]
        expected = {
            Step(op, chunk, part) for op in ("F", "I", "W") for chunk in range(chunks) for part in actual
        }
        assert len(whole) == len(expected)
        assert set(whole) == expected
        place = {step: number for number, step in enumerate(whole)}
        assert all(place[Step("F", step.chunk, step.part)] <= place[step] for step in whole)
        weights = [step for step in whole if step.op == "W"]
        assert all(place[Step("I", step.chunk, step.part)] < place[step] for step in weights)


def halves(step: Step) -> list[Step]:
    """Return both halves of a backward pass. For any other step, return the step."""
    return [Step(op, step.chunk, step.part) for op in ("I", "W")] if step.op == "B" else [step]  # type: ignore[arg-type]


@settings(deadline=None)
@given(arguments())
def test_micro_batches_pass_each_part_in_order(one: tuple[Any, int, int, int]) -> None:
    schedule, workers, parts, chunks = one
    for found in plan(schedule, workers, parts, chunks):
        whole = [half for step in found for half in halves(step)]
        for part in {step.part for step in found}:
            for op in ("F", "I", "W"):
                assert [step.chunk for step in whole if (step.op, step.part) == (op, part)] == list(
                    range(chunks)
                )


def test_steps_returns_a_new_generator_for_each_call() -> None:
    once = steps("1f1b", 0, 2, 2, 4)
    assert iter(once) is once
    assert list(once) == list(steps("1f1b", 0, 2, 2, 4))


@pytest.mark.parametrize(
    ("name", "workers", "parts", "chunks"),
    [
        ("gpipe", 3, 3, 4),
        ("1f1b", 3, 3, 4),
        ("interleaved", 2, 4, 4),
        ("zbh1", 3, 3, 4),
        ("zbv", 2, 4, 3),
        ("dualpipev", 2, 4, 3),
    ],
)
def test_drawings_in_the_docstring_match_the_schedules(
    name: Any, workers: int, parts: int, chunks: int
) -> None:
    described = inspect.cleandoc(module.__doc__ or "").split(f"*{name}*: ")[1]
    drawn = re.search(r"::\n\n((?: +\d  .*\n)+)", described)
    assert drawn
    backward = (
        2 if any(step.op in "IW" for steps in plan(name, workers, parts, chunks) for step in steps) else 1
    )
    assert inspect.cleandoc(drawn[1]) == simulate(plan(name, workers, parts, chunks), 1, backward).staircase()


# --- text ---


@pytest.mark.parametrize(
    ("found", "written"),
    [
        ([], ""),
        ([Step("F", 0, 0), Step("B", 0, 0)], "F0 B0"),
        ([Step("F", 12, 3)], "F12"),
        ([Step("F", 0, 1), Step("B", 7, 3)], "1:F0 3:B7"),
    ],
)
def test_text_includes_the_part_if_there_are_several(found: list[Step], written: str) -> None:
    assert text(found) == written


@settings(deadline=None)
@given(
    st.lists(
        st.builds(Step, st.sampled_from(["F", "B", "I", "W"]), st.integers(0, 10**4), st.integers(0, 10**4)),
        max_size=50,
    )
)
def test_parse_inverts_text(found: list[Step]) -> None:
    assert parse(text(found), part=found[0].part if found else 0) == found


@settings(deadline=None)
@given(arguments())
def test_parse_inverts_text_of_every_schedule(one: tuple[Any, int, int, int]) -> None:
    for worker, found in enumerate(plan(*one)):
        assert parse(text(found), part=worker) == found


def test_step_text_includes_its_part() -> None:
    assert str(Step("B", 3, 1)) == "1:B3"
    assert parse("1:B3  F0\nB0", part=2) == [Step("B", 3, 1), Step("F", 0, 2), Step("B", 0, 2)]


@pytest.mark.parametrize("word", ["X0", "F", "0", "f0", "F-1", "F0.1", ":F0", "1:2:F0", "F0,", "F٣"])
def test_parse_rejects_a_word_that_is_not_a_step(word: str) -> None:
    with pytest.raises(
        ValueError, match=f"^parse: a step must look like F0, .* got {re.escape(repr(word))}$"
    ):
        parse(f"F0 {word} B0")


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("zigzag", 0, 2, 2, 4),
            "steps: schedule must be "
            "'gpipe' or '1f1b' or 'interleaved' or 'zbh1' or 'zbv' or 'dualpipev', got 'zigzag'",
        ),
        (
            (None, 0, 2, 2, 4),
            "steps: schedule must be "
            "'gpipe' or '1f1b' or 'interleaved' or 'zbh1' or 'zbv' or 'dualpipev', got None",
        ),
        (("gpipe", 0, 0, 2, 4), "steps: workers must be at least 1, got 0"),
        (("gpipe", -1, 2, 2, 4), "steps: worker must be at least 0, got -1"),
        (("gpipe", 2, 2, 2, 4), "steps: worker must be between 0 and 1 with workers=2, got 2"),
        (("gpipe", 0, 2, 0, 4), "steps: parts must be at least 1, got 0"),
        (("gpipe", 0, 2, 2, 0), "steps: chunks must be at least 1, got 0"),
        (("1f1b", 0, 3, 2, 4), "steps: workers must be at most parts=2, got 3; use fewer workers"),
        (
            ("interleaved", 0, 3, 2, 4),
            "steps: workers must be at most parts=2, got 3; use fewer workers",
        ),
        (
            ("1f1b", 0, 2, 4, 4),
            "steps: schedule='1f1b' requires one part per worker, got parts=4 for workers=2; "
            "use schedule='interleaved', or as many workers as parts",
        ),
        (
            ("zbv", 0, 2, 6, 4),
            "steps: parts must be at most 2 per worker with schedule='zbv', got parts=6 for workers=2; "
            "use workers=3",
        ),
    ],
)
def test_steps_rejects_a_wrong_argument_immediately(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        steps(*arguments)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_steps_rejects_a_number_that_is_not_an_int(place: int, value: Any) -> None:
    arguments: list[Any] = ["gpipe", 0, 2, 2, 4]
    arguments[place] = value
    name = ["schedule", "worker", "workers", "parts", "chunks"][place]
    shown = re.escape(f"{value!r} ({type(value).__name__})")
    with pytest.raises(TypeError, match=f"^steps: {name} must be an int of at least [01], got {shown}$"):
        steps(*arguments)


def test_plan_without_workers_raises() -> None:
    with pytest.raises(ValueError, match=r"^plan: workers must be at least 1, got 0$"):
        plan("gpipe", 0, 1, 1)
