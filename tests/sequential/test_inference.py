"""Test that a pipe returns the outputs of the plain module, in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import Watched, conv, dense, is_same, on_both_placements, plain
from torch import Tensor, nn

from flowchan.pipelines import Sequential


class Both(nn.Module):
    """Layer that turns a dictionary into a tuple."""

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        return x["a"] * 2, [x["b"] + 1, x["a"][:, :1]]


class Turned(nn.Module):
    """Layer that turns a tuple into a dictionary."""

    def forward(self, x: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
        return {"sum": x[0] + x[1][1], "rest": (x[1][0],)}


# --- outputs ---


@pytest.mark.each_pair
@on_both_placements
@pytest.mark.parametrize("make", [dense, conv])
@pytest.mark.parametrize("parts", [1, 2, 3, [1, 1, 3], [4, 1]])
def test_call_matches_the_plain_module(make: Any, parts: Any, on: Any) -> None:
    module = make()
    layers = len(module)
    counts = parts if isinstance(parts, int) else [*parts[:-1], layers - sum(parts[:-1])]
    shape = (1, 8, 8) if make is conv else (6,)
    with Sequential(module, parts=counts, on=on, chunks=8) as pipe:
        for samples in (1, 3, 8, 11, 64):
            x = torch.randn(samples, *shape)
            y = pipe(x)
            assert is_same(y, plain(module, x), on)
            with torch.no_grad():
                assert torch.allclose(y, module(x), atol=1e-6)


@on_both_placements
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 100])
def test_call_handles_uneven_and_small_batches(chunks: int, on: Any) -> None:
    module = dense()
    with Sequential(module, on=on, chunks=chunks) as pipe:
        for samples in (1, 2, 7, 30):
            x = torch.randn(samples, 6)
            assert is_same(pipe(x), plain(module, x, chunks), on)


@on_both_placements
def test_empty_batch_returns_an_empty_output(on: Any) -> None:
    with Sequential(dense(), on=on) as pipe:
        assert pipe(torch.ones(0, 6)).shape == (0, 3)


@on_both_placements
def test_dictionaries_and_tuples_pass_between_parts(on: Any) -> None:
    module = nn.Sequential(Both(), nn.Identity(), Turned())
    x = {"a": torch.randn(11, 3), "b": torch.randn(11, 2, 2)}
    with Sequential(module, parts=3, on=on, chunks=4) as pipe:
        y = pipe(x)
    expected = module(x)
    assert list(y) == ["sum", "rest"]
    assert type(y["rest"]) is tuple
    assert torch.equal(y["sum"], expected["sum"])
    assert torch.equal(y["rest"][0], expected["rest"][0])


@on_both_placements
def test_list_of_layers_works_like_a_module(on: Any) -> None:
    layers = [nn.Linear(3, 3), nn.ReLU()]
    x = torch.randn(4, 3)
    with Sequential(layers, on=on, chunks=8) as pipe, torch.no_grad():
        assert is_same(pipe(x), plain(nn.Sequential(*layers), x), on)


@on_both_placements
def test_call_keeps_the_input_and_returns_a_private_output(on: Any) -> None:
    x = torch.randn(4, 3)
    before = x.clone()
    with Sequential([nn.ReLU(inplace=True), nn.ReLU(inplace=True)], on=on, chunks=1) as pipe:
        y = pipe(x)
        assert torch.equal(x, before)
        y.add_(1)
        assert torch.equal(pipe(x) + 1, y)


@on_both_placements
def test_call_in_inference_mode_matches_the_plain_module(on: Any) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    with torch.inference_mode(), Sequential(module, on=on, chunks=8) as pipe:
        for samples in (5, 30):
            x = torch.randn(samples, 6)  # the in-place layer gets a copy
            assert is_same(pipe(x), plain(module, x.clone()), "process")


@on_both_placements
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_tensors_of_all_dtypes_pass_through_parts(on: Any, kind: torch.dtype) -> None:
    x = (torch.arange(12).reshape(6, 2) % 3).to(kind)
    with Sequential([nn.Identity(), nn.Identity()], on=on, chunks=4) as pipe:
        assert torch.equal(pipe(x), x)
        assert pipe(x.T).dtype == kind
        assert torch.equal(pipe(x.T), x.T)


def test_each_part_has_its_own_process() -> None:
    class Process(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, torch.full((len(x), 1), float(os.getpid()))], dim=1)

    with Sequential([Process(), Process(), Process()], parts=3, on="process") as pipe:
        y = pipe(torch.zeros(16, 0))
        again = pipe(torch.zeros(16, 0))
    assert torch.equal(y, again)
    assert len(set(y[0].tolist())) == 3
    assert os.getpid() not in y[0].tolist()
    assert all(torch.equal(row, y[0]) for row in y)


def test_parts_run_at_the_same_time() -> None:
    both = threading.Barrier(2)
    # waits in all micro-batches except the first
    first = Watched(lambda x: both.wait() if x[0, 0] > 0 else None)
    second = Watched(lambda x: both.wait() if x[0, 0] < 7 else None)  # waits in all except the last
    with Sequential([first, second], chunks=8) as pipe:
        assert torch.equal(pipe(torch.arange(8.0)[:, None]), torch.arange(8.0)[:, None])


def test_each_part_computes_on_its_own_device() -> None:
    module = dense()
    x = torch.randn(5, 6)
    for on in ("thread", "process"):
        with Sequential(module, devices=["cpu", torch.device("cpu")], on=on, chunks=8) as pipe:  # type: ignore[arg-type]
            assert is_same(pipe(x), plain(module, x), on)
            assert all(part.device == torch.device("cpu") for part in pipe.parts)


# --- streams ---


@on_both_placements
def test_stream_yields_outputs_in_order(on: Any) -> None:
    module = dense()
    batches = [torch.randn(samples, 6) for samples in (5, 1, 16, 8, 3, 40, 2, 2, 2, 9) * 3]
    with Sequential(module, parts=3, on=on, chunks=8) as pipe:
        for _ in range(2):
            outputs = list(pipe.stream(iter(batches)))
            assert len(outputs) == len(batches)
            assert all(is_same(y, plain(module, x, 1), on) for x, y in zip(batches, outputs, strict=True))
        assert list(pipe.stream([])) == []


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_stream_requests_batches_while_it_has_room(parts: int) -> None:
    requests = 0

    def batches() -> Iterator[Tensor]:
        nonlocal requests
        for _ in range(60):
            requests += 1
            yield torch.zeros(8, 6)

    most = 2 * parts + 2
    with Sequential(dense(), parts) as pipe:
        stream = pipe.stream(batches())
        assert requests == 0
        for taken, _ in enumerate(stream, 1):
            ahead = requests - taken
            assert ahead <= most
            if requests < 60:
                assert ahead + 1 >= most  # every part has work while the program handles this output
        assert requests == 60


@on_both_placements
def test_stream_does_not_split_batches(on: Any) -> None:
    class Size(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 1), float(len(x)))

    with Sequential([nn.Identity(), Size()], on=on, chunks=4) as pipe:
        assert pipe(torch.zeros(8, 6)).flatten().tolist() == [2.0] * 8
        assert [y.flatten().tolist() for y in pipe.stream([torch.zeros(8, 6), torch.zeros(3, 6)])] == [
            [8.0] * 8,
            [3.0] * 3,
        ]


@on_both_placements
def test_abandoned_stream_ends(on: Any) -> None:
    module = dense()
    ended = []

    def batches() -> Iterator[Tensor]:
        try:
            while True:
                yield torch.randn(8, 6)
        finally:
            ended.append(True)

    with Sequential(module, on=on, chunks=8) as pipe:
        source = batches()
        for taken, _ in enumerate(pipe.stream(source)):
            if taken == 3:
                break
        assert not ended  # the source iterator still belongs to its creator
        source.close()
        x = torch.randn(9, 6)
        assert is_same(pipe(x), plain(module, x), on)
        assert not pipe._inference.run.out


@on_both_placements
def test_exception_in_batches_follows_earlier_outputs(on: Any) -> None:
    module = dense()
    good = [torch.randn(8, 6) for _ in range(2)]

    def batches() -> Iterator[Tensor]:
        yield from good
        raise LookupError("no more")

    with Sequential(module, on=on, chunks=1) as pipe:
        found: list[Tensor] = []
        with pytest.raises(LookupError, match="no more"):
            found.extend(pipe.stream(batches()))
        assert all(is_same(y, plain(module, x, 1), on) for x, y in zip(good, found, strict=True))
        assert is_same(pipe(good[0]), plain(module, good[0], 1), on)


@on_both_placements
def test_invalid_batch_raises_after_earlier_outputs(on: Any) -> None:
    with Sequential(dense(), on=on) as pipe:
        stream = pipe.stream([torch.ones(4, 6), torch.ones(3, 6), None])
        assert [len(next(stream)), len(next(stream))] == [4, 3]
        with pytest.raises(TypeError, match="x must contain at least one tensor, got None"):
            next(stream)


@on_both_placements
def test_streams_and_calls_of_one_thread_can_be_mixed(on: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    one, two = ([torch.randn(5, 6) for _ in range(8)] for _ in range(2))
    with Sequential(module, on=on, chunks=1) as pipe:
        for x, z, y, w in zip(one, two, pipe.stream(one), pipe.stream(two), strict=True):
            assert is_same(y, plain(module, x, 1), on)
            assert is_same(w, plain(module, z, 1), on)
            assert is_same(pipe(x), y, on)
        twice = list(pipe.stream(pipe.stream(one)))
    assert all(is_same(y, plain(module, plain(module, x, 1), 1), on) for x, y in zip(one, twice, strict=True))


@on_both_placements
def test_many_threads_can_use_one_pipe(on: Any) -> None:
    module = dense()
    begin = threading.Barrier(4)
    with Sequential(module, on=on, chunks=1) as pipe, ThreadPoolExecutor(4) as threads:

        def use(number: int) -> bool:
            xs = [torch.full((samples, 6), float(number)) for samples in range(1, 12)]
            begin.wait()
            ys = list(pipe.stream(xs)) if number % 2 else [pipe(x) for x in xs]
            return all(is_same(y, plain(module, x, 1), on) for x, y in zip(xs, ys, strict=True))

        assert list(threads.map(use, range(4))) == [True] * 4


# --- state and mode ---


@on_both_placements
def test_changed_parameters_and_modes_apply_to_the_next_call(on: Any) -> None:
    module = conv()
    x = torch.randn(16, 1, 8, 8)
    with Sequential(module, on=on, chunks=8) as pipe:
        first = pipe(x)
        with torch.no_grad():
            module[6].weight.mul_(2)
        assert is_same(pipe(x), plain(module, x), on)
        assert not torch.equal(pipe(x), first)
        pipe.load_state_dict(conv().state_dict())
        assert is_same(pipe(x), first, on)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        module(x).sum().backward()
        optimiser.step()
        assert is_same(pipe(x), plain(module, x), on)
        module.train()
        assert not torch.equal(pipe(x), pipe(x))  # because of dropout
        module.eval()
        assert torch.equal(pipe(x), pipe(x))


def test_state_dict_matches_the_plain_module() -> None:
    module = conv()
    with Sequential(module, parts=3) as pipe:
        state = pipe.state_dict()
        assert list(state) == list(module.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            pipe.load_state_dict({})
        other = conv()
        other.load_state_dict(state)


@on_both_placements
@pytest.mark.parametrize("gradients", [False, True])
def test_undeferred_statistics_change_with_each_micro_batch(on: Any, gradients: bool) -> None:
    module, other = conv().train(), conv().train()
    x = torch.randn(16, 1, 8, 8)
    with Sequential(nn.Sequential(*module[:2]), on=on, chunks=4, deferred_batch_norm=False) as pipe:
        with torch.set_grad_enabled(gradients):
            y = pipe(x).detach()
        assert is_same(y, plain(nn.Sequential(*other[:2]), x, 4), on)
    torch.testing.assert_close(module[1].running_mean, other[1].running_mean)
    assert module[1].num_batches_tracked == 4


# --- timeline and graph ---


@on_both_placements
def test_timeline_has_an_event_per_part_and_micro_batch(on: Any, tmp_path: Path) -> None:
    with Sequential(dense(), parts=3, on=on, chunks=4) as pipe:
        pipe(torch.randn(8, 6))
        pipe(torch.randn(2, 6))
        timeline = pipe.timeline()
    assert len(timeline.events) == 3 * (4 + 2)
    assert {(event.worker, event.step, event.chunk) for event in timeline.events} == {
        (part, step, chunk)
        for part in range(3)
        for step, chunks in enumerate((4, 2))
        for chunk in range(chunks)
    }
    ends = {(event.part, event.step, event.chunk): event.end for event in timeline.events}
    for event in timeline.events:
        assert event.begin <= event.end
        if event.part:
            assert ends[event.part - 1, event.step, event.chunk] <= event.begin
    assert timeline.save(tmp_path / "run.svg").read_text().startswith("<svg")
    timeline.save(tmp_path / "run.json")


def test_repr_shows_the_parts() -> None:
    pipe = Sequential(dense(), parts=[2, 3], on="process", chunks=4)
    assert (
        repr(pipe)
        == "Sequential: part 0 (layers '0' to '1'), part 1 (layers '2' to '4'); on processes, 4 chunks"
    )
    assert not pipe.graph.check()
    assert [stage.name for stage in pipe.graph.stages if stage.kind == "map"] == ["part 0", "part 1"]
