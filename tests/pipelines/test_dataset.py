"""Test a graph as the data of a training loop: epochs, seeds, early exits, failures, and torch's
DataLoader."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from support.optional_packages import optional
from support.waiting import wait_until

from flowchan import Graph, RunError, worker
from flowchan.pipelines import dataset

torch = optional("torch")
torch_data = optional("torch.utils.data")


def shuffled(n: int) -> Iterator[int]:
    return iter(random.Random(worker().seed).sample(range(n), n))


def tensor(number: int) -> torch.Tensor:
    return torch.full((3,), float(number))


def squares(n: int = 6, **options: Any) -> Any:
    return dataset(Graph("squares").source(range(n)).map(lambda number: number * number), **options)


def test_each_iteration_is_an_epoch() -> None:
    data = squares()
    assert [list(data) for _ in range(3)] == [[0, 1, 4, 9, 16, 25]] * 3
    assert data.epoch == 3


def test_epoch_left_early_ends_its_run_before_the_next() -> None:
    graph = Graph("endless")
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from count()
        finally:
            ended.append(True)

    data = dataset(graph.source(numbers))
    for epoch in range(1, 4):
        for number in data:
            if number == 5:
                break
        wait_until(lambda epoch=epoch: len(ended) == epoch)


def pid(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_same_workers_serve_all_epochs_in_a_block() -> None:
    numbers = [1, 2, 3]
    data = dataset(Graph("lasting").source(lambda: map(checked, numbers)).map(pid, on="process"), seed=1)
    with data:
        ((_, first), *_) = whole = list(data)
        assert [number for number, _ in whole] == numbers
        for item in data:
            assert item == (1, first)
            break
        numbers[2] = 0
        with pytest.raises(RunError):
            list(data)
        numbers[2] = 3
        assert list(data) == whole
        assert data.epoch == 4
        with pytest.raises(RuntimeError, match="must not be nested"), data:
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert [number for number, _ in data] == numbers


def checked(number: int) -> int:
    assert number
    return number


def test_same_seed_repeats_the_same_sequence_of_epochs() -> None:
    first, again, other = (dataset(Graph("g").source(shuffled, 50), seed=seed) for seed in (1, 1, 2))
    epochs = [list(first), list(first)]
    assert [list(again), list(again)] == epochs
    assert epochs[0] != epochs[1]
    assert list(other) not in epochs
    resumed = dataset(Graph("g").source(shuffled, 50), seed=1)
    resumed.epoch = 1
    assert list(resumed) == epochs[1]


def test_seed_comes_from_torchs_generator_if_none_is_given() -> None:
    data = dataset(Graph("g").source(shuffled, 50))
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append([list(data), list(data)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_torchs_dataloader_accepts_the_dataset() -> None:
    data = dataset(Graph("tensors").source(range(10)).map(tensor, on="process", workers=2))
    assert isinstance(data, torch_data.IterableDataset)
    whole = list(torch_data.DataLoader(data, batch_size=None))
    assert torch.equal(torch.stack(whole), torch.arange(10.0)[:, None].expand(10, 3))
    assert [len(batch) for batch in torch_data.DataLoader(data, batch_size=4)] == [4, 4, 2]


def test_dataloader_workers_raise_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="use num_workers=0"):
        list(torch_data.DataLoader(squares(), batch_size=None, num_workers=1))


def test_failure_raises_in_the_loop_and_next_epoch_runs() -> None:
    divisors = [1, 0]
    graph = Graph("halves")
    data = dataset(graph.source(lambda: divisors).map(lambda divisor: 8 // divisor))
    with pytest.raises(RunError):
        list(data)
    divisors[1] = 2
    assert list(data) == [8, 4]


def test_unfinished_epoch_ends_with_the_block() -> None:
    graph = Graph("counted")
    with dataset(graph.source(count).map(abs, on="process")) as data:
        items = iter(data)
        assert next(items) == 0
    with pytest.raises(ValueError, match=r"port of .* was closed"):
        next(items)


def test_tensors_are_pinned_by_a_thread_if_a_gpu_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self + 100)
    data = dataset(Graph("pinned").source([{"x": tensor(1)}]), pin_memory=True)
    assert next(iter(data))["x"].tolist() == [101, 101, 101]


def test_tensors_are_not_pinned_without_gpu() -> None:
    graph = Graph("plain")
    dataset(graph.source([tensor(1)]), pin_memory=not torch.cuda.is_available())
    assert [stage.name for stage in graph.stages] == ["source", "dataset"]


def test_dataset_error_names_the_wrong_argument() -> None:
    with pytest.raises(TypeError, match=r"stream must be a stream of a graph, got \[1\]"):
        dataset([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed must be an int or None, got 'x'"):
        squares(seed="x")
    with pytest.raises(TypeError, match="pin_memory must be True or False, got 'cuda'"):
        squares(pin_memory="cuda")
