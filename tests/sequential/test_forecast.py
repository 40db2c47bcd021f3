"""Test forecasts: every schedule is simulated with the measured times of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from flowchan.pipelines import Pop, Sequential, Stash
from flowchan.pipelines.sequential import forecast
from flowchan.pipelines.sequential.engine.schedule import SCHEDULES, plan
from flowchan.pipelines.sequential.forecast import forecasts
from flowchan.pipelines.sequential.simulate import simulate


def layers(number: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(number)))


def with_times(monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float, float]], kept: float) -> None:
    """Replace the layers' measured times with ``times``, and set the overhead to zero."""
    monkeypatch.setattr(forecast, "step_seconds", lambda *_: times)
    monkeypatch.setattr(forecast, "costs", lambda *_, **__: [kept] * len(times))
    monkeypatch.setattr(forecast, "PASSING", {"thread": 0.0, "process": 0.0})


def test_best_schedule_is_first_and_matches_the_simulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_times(monkeypatch, [(1.0, 1.0, 1.0)] * 8, 100.0)
    found = {one.schedule: one for one in forecasts(layers(), torch.randn(16, 8), workers=4)}
    assert list(found)[:2] in (["zbv", "dualpipev"], ["dualpipev", "zbv"])
    assert set(found) == set(SCHEDULES)
    for schedule, one in found.items():
        parts = len(one.parts)
        run = simulate(plan(schedule, 4, parts, 8), 8 / parts, 16 / parts)
        assert (one.workers, one.chunks, one.alone) == (4, 8, 8 * 24)
        assert (one.seconds, one.bubble) == pytest.approx((run.makespan, run.bubble))
        assert one.held == pytest.approx(max(run.peaks) * 100 * 8 / parts)
    assert str(found["zbv"]) == (
        "zbv         parts=[1, 1, 1, 1, 1, 1, 1, 1]: 5.1e+04 ms a step, 3.76 times as fast as one worker, "
        "which waits 6% and holds 0.0008 MB"
    )


def test_parts_are_cut_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, [(3.0, 3.0, 3.0), *[(1.0, 1.0, 1.0)] * 3], 1.0)
    found = {one.schedule: one.parts for one in forecasts(layers(4), torch.randn(4, 8), workers=2)}
    assert found["1f1b"] == [1, 3]
    assert found["zbv"] == [1, 1, 1, 1]


def test_schedules_that_need_more_layers_are_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_times(monkeypatch, [(1.0, 1.0, 1.0)] * 3, 1.0)
    found = {one.schedule for one in forecasts(layers(3), torch.randn(4, 8), workers=2)}
    assert found == {"gpipe", "1f1b", "zbh1"}


class Heavy(nn.Module):
    """Layer in which only the gradient of the weight takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("on", ["thread", "process"])
def test_forecast_does_not_change_the_model(on: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(16, 300), nn.BatchNorm1d(300), Stash("x"), nn.ReLU(inplace=True), Heavy(), Pop("x"), Heavy()
    ).eval()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    found = forecasts(module, torch.randn(64, 16), workers=2, on=on, chunks=4)
    assert {one.schedule for one in found} == set(SCHEDULES)
    assert all(one.seconds > 0 and one.held > 0 and 0 < one.bubble < 1 for one in found)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert not module.training
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())
    assert all(one.grad is None for one in module.parameters())


def test_forecast_parameters_can_be_used_for_training() -> None:
    module = layers()
    x = torch.randn(16, 8)
    best = forecasts(module, x, workers=2)[0]
    pipe = Sequential(module, best.parts, chunks=best.chunks)
    with pipe.trainer(loss=mse_loss, schedule=best.schedule, workers=best.workers) as training:
        torch.testing.assert_close(training.step(x, x), mse_loss(module(x), x).detach())


@pytest.mark.parametrize("workers", [0, 9, True, 2.0])
def test_wrong_number_of_workers_raises(workers: Any) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^forecasts: workers must be between 1 and 8 \(the number of layers\), got {workers!r}$",
    ):
        forecasts(layers(), torch.randn(4, 8), workers)
