"""Test rules, optimizers, row pushes, codes and saved files on a running server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_blocks import bits
from torch import nn, optim

from flowchan.pipelines import ParameterServer, map  # noqa: A004
from flowchan.pipelines.parameter_server import RowOptimizer, gathered

pytestmark = pytest.mark.usefixtures("one_compute_thread")

STEPS = 12


def start() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"weight": torch.randn(50, 30, dtype=torch.float64), "bias": torch.randn(50)}


def gradients(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + step)
    return {name: torch.randn_like(value) for name, value in start().items()}


def plain(make: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    params = {name: nn.Parameter(value) for name, value in start().items()}
    optimizer = make(list(params.values()))
    for step in range(steps):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def same(found: Any, expected: Any) -> bool:
    return {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in expected.items()}


def adam(params: Any) -> optim.Optimizer:
    return optim.Adam(params, lr=0.1)


def momentum(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("on", ["thread", "process"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("make", [adam, momentum])
def test_gradient_pushes_match_plain_torch(on: str, shards: int, make: Any) -> None:
    with ParameterServer(start(), optimizer=make, on=on, shards=shards) as server:
        client = server.client()
        for step in range(STEPS):
            client.push(gradients(step), rule="gradient")
        assert same(client.pull(at_least=STEPS), plain(make))


class Killed(optim.Adam):
    """Adam that kills its process once, right before or after step ``at``."""

    def __init__(self, params: Any, flag: Path, at: int, after: bool) -> None:
        super().__init__(params, lr=0.1)
        self.flag, self.at, self.after = flag, at, after

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]["params"]
        number = int(self.state[group[0]]["step"]) if self.state.get(group[0]) else 0
        if number == self.at and not self.after:
            self.kill_once()
        super().step()
        if number == self.at and self.after:
            self.kill_once()

    def kill_once(self) -> None:
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after the step"])
def test_training_matches_torch_after_a_kill_during_a_step(tmp_path: Path, after: bool) -> None:
    make = lambda params: Killed(params, tmp_path / "killed", 5, after)  # noqa: E731
    with ParameterServer(start(), optimizer=make) as server:
        client = server.client()
        versions = [client.push(gradients(step), rule="gradient").wait() for step in range(STEPS)]
        assert (tmp_path / "killed").exists()
        assert versions == list(range(1, STEPS + 1))
        assert same(client.pull(), plain(adam))


def test_function_runs_on_the_server_once_per_push() -> None:
    with ParameterServer({"x": torch.zeros(3)}) as server:
        client = server.client()
        for value in (3.0, 1.0, 2.0):
            version = client.push(
                {"x": torch.full((3,), value)}, rule=lambda x, y: torch.maximum(x, y) + 1
            ).wait()
        assert client.pull(at_least=version)["x"].tolist() == [6.0] * 3


def test_failed_function_raises_at_the_client_and_changes_nothing() -> None:
    def fails(current: Any, given: Any) -> Any:
        current += 1
        raise ZeroDivisionError("by a rule")

    with ParameterServer({"x": torch.zeros(3)}) as server:
        client = server.client()
        with pytest.raises(ZeroDivisionError, match="by a rule"):
            client.push({"x": torch.ones(3)}, rule=fails).wait()
        version = client.push({"x": torch.ones(3)}).wait()
        assert client.pull(at_least=version)["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("values", "rule", "message"),
    [
        ({"x": torch.ones(3)}, "gradient", "rule must not be 'gradient' without an optimizer"),
        ({"x": torch.ones(3)}, "sum", "rule must be 'zero', 'copy', 'add', 'gradient' or a function"),
        ({"x": torch.ones(4)}, "add", r"values\['x'\] must have the shape \(3,\), got \(4,\)"),
    ],
)
def test_client_checks_a_push_before_sending_it(values: Any, rule: str, message: str) -> None:
    with ParameterServer({"x": torch.zeros(3)}, on="thread") as server:
        client = server.client()
        with pytest.raises(ValueError, match=f"push: {message}"):
            client.push(values, rule=rule)
        assert server.stats().pushes == 0


# --- rows ---


@pytest.mark.parametrize("shards", [1, 2])
def test_row_gradients_match_torch(shards: int) -> None:
    torch.manual_seed(1)
    tables = {"users": torch.randn(50, 3), "items": torch.randn(40, 2)}
    rows = {"users": RowOptimizer.adam(lr=0.1), "items": RowOptimizer.adagrad(lr=0.1)}
    params = {name: nn.Parameter(value.clone()) for name, value in tables.items()}
    optimizers = {
        "users": optim.SparseAdam([params["users"]], lr=0.1),
        "items": optim.Adagrad([params["items"]], lr=0.1),
    }
    with ParameterServer(tables, rows=rows, shards=shards) as server:
        client = server.client()
        for _ in range(10):
            for name, p in params.items():
                ids = torch.randint(0, len(p), (8,))
                values = torch.randn(8, p.shape[1])
                version = client.push_rows(name, ids, values, rule="gradient").wait()
                p.grad = torch.sparse_coo_tensor(ids[None], values, p.shape).coalesce()
                optimizers[name].step()
        assert same(client.pull(at_least=version), {name: p.detach() for name, p in params.items()})
        assert torch.equal(client.pull_rows("users", [7, 7, 0]), params["users"].detach()[[7, 7, 0]])


class KilledInRows(optim.Adagrad):
    """Adagrad that kills its process once, after its fourth step."""

    def __init__(self, params: Any, flag: Path) -> None:
        super().__init__(params, lr=0.1)
        self.flag = flag

    def step(self, closure: Any = None) -> Any:
        super().step()
        if int(self.state[self.param_groups[0]["params"][0]]["step"]) == 4 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_rows_keep_their_state_after_a_kill_during_a_push(tmp_path: Path) -> None:
    """torchrec#481: a server that stores rows with their optimizer state may be replaced."""

    class Killing(RowOptimizer):
        def __call__(self, params: Any) -> optim.Optimizer:
            return KilledInRows(params, tmp_path / "killed")

    table = torch.zeros(20, 2)
    param = nn.Parameter(table.clone())
    optimizer = optim.Adagrad([param], lr=0.1)
    with ParameterServer({"t": table}, rows={"t": Killing.adagrad(lr=0.1)}) as server:
        client = server.client()
        for step in range(8):
            ids, values = torch.tensor([step, step + 1]), torch.ones(2, 2)
            client.push_rows("t", ids, values, rule="gradient").wait()
            param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape).coalesce()
            optimizer.step()
        assert (tmp_path / "killed").exists()
        assert same(client.pull(), {"t": param.detach()})


def test_row_push_sends_only_its_rows() -> None:
    """byteps#139 asks for sparse values, because BytePS sends whole tensors."""
    with ParameterServer({"t": torch.zeros(100_000, 8)}) as server:
        client = server.client()
        client.push_rows("t", [5, 99_999, 5], torch.ones(3, 8)).wait()
        stats = server.stats()
        assert stats.bytes_in == 2 * 8 * 4 + 2 * 8  # two distinct rows and their ids
        assert client.pull_rows("t", [5, 99_999, 0])[:, 0].tolist() == [2.0, 1.0, 0.0]
        assert server.stats().bytes_out - stats.bytes_out == 3 * 8 * 4


def test_row_gradient_without_a_row_optimizer_is_rejected() -> None:
    with (
        ParameterServer({"t": torch.zeros(4, 2)}, on="thread", optimizer=adam) as server,
        pytest.raises(ValueError, match="push_rows: rule must not be 'gradient' without an optimizer"),
    ):
        server.client().push_rows("t", [1], torch.ones(1, 2), rule="gradient")


# --- codes ---


def test_server_decodes_encoded_pushes() -> None:
    x = {name: value.float() for name, value in start().items()}
    with ParameterServer({name: torch.zeros_like(value) for name, value in x.items()}, shards=2) as server:
        client = server.client()
        version = client.push(x, codes="fp16").wait()
        expected = {name: value.half().float() for name, value in x.items()}
        assert same(client.pull(at_least=version), expected)
        assert server.stats().bytes_in < sum(value.nbytes for value in x.values()) * 0.6


def test_server_decodes_the_values_of_all_workers_together() -> None:
    """In pytorch_ps_mpi, every worker encodes, and ``decode`` receives the encoded values of all workers."""

    class Majority:
        def encode(self, x: torch.Tensor) -> bytes:
            return bytes((x > 0).tolist())

        def decode(self, codes: list[bytes], out: torch.Tensor) -> None:
            votes = sum(2.0 * torch.tensor(list(code)) - 1 for code in codes)
            out.copy_(torch.sign(votes))  # type: ignore[arg-type]

    def encoded(client: Any, worker: int) -> Any:
        return client.encode({"x": torch.tensor([float(worker), 2.0 - worker, -1.0])}, Majority)

    with ParameterServer({"x": torch.zeros(3)}) as server:
        client = server.client()
        version = client.push(gathered(map(3, encoded, client, on="process").join()), scale=0.5).wait()
        assert client.pull(at_least=version)["x"].tolist() == [0.5, -0.5, -0.5]


# --- files ---


@pytest.mark.parametrize("shards", [1, 2])
def test_loaded_server_continues_like_the_saved_one(tmp_path: Path, shards: int) -> None:
    path = tmp_path / "server.safetensors"
    with ParameterServer(start(), optimizer=adam) as server:
        client = server.client()
        for step in range(5):
            client.push(gradients(step), rule="gradient").wait()
        server.save(path)
        client.push(gradients(99), rule="gradient").wait()
    with ParameterServer.load(path, optimizer=adam, shards=shards) as server:
        client = server.client()
        client.pull()
        assert client.version == 5
        for step in range(5, STEPS):
            client.push(gradients(step), rule="gradient").wait()
        assert same(client.pull(), plain(adam))


def test_load_without_the_saved_optimizer_is_rejected(tmp_path: Path) -> None:
    with ParameterServer(start(), optimizer=adam, on="thread") as server:
        server.save(tmp_path / "a")
    with pytest.raises(ValueError, match="optimizer and rows must be those of the saved server"):
        ParameterServer.load(tmp_path / "a", on="thread")


def test_single_array_is_loaded_as_a_single_array(tmp_path: Path) -> None:
    with ParameterServer(np.arange(3.0), on="thread") as server:
        server.save(tmp_path / "a")
    with ParameterServer.load(tmp_path / "a", on="thread") as server:
        assert server.client().pull().tolist() == [0.0, 1.0, 2.0]


def test_object_cannot_be_saved(tmp_path: Path) -> None:
    with (
        ParameterServer([1, 2], on="thread") as server,
        pytest.raises(TypeError, match=r"save requires tensors"),
    ):
        server.save(tmp_path / "a")


# --- issues reported for other systems ---


def test_readers_never_see_a_step_in_progress() -> None:
    """torchtitan#3795: a direct read returns tensors that the optimizer is still updating."""

    def reads(client: Any, worker: int) -> int:
        versions = set()
        while len(versions) < 30:
            found = client.pull()
            steps = {float(-x.min()) for x in found.values()} | {float(-x.max()) for x in found.values()}
            assert steps == {float(client.version)}
            versions.add(client.version)
        return len(versions)

    tensors = {str(number): torch.zeros(20_000) for number in range(4)}
    with ParameterServer(tensors, shards=2, optimizer=lambda params: optim.SGD(params, lr=1.0)) as server:
        readers = map(2, reads, server.client(), on="process")
        client = server.client()
        ones = {name: torch.ones(20_000) for name in tensors}
        while True:
            client.push(ones, rule="gradient").wait()
            with contextlib.suppress(TimeoutError):
                readers.join(timeout=0.001)
                break


def test_push_of_many_tensors_sends_one_message_per_shard() -> None:
    """OpenRLHF#533: broadcasting 200 tensors one by one takes 200 calls."""
    tensors = {f"layer {number}": torch.ones(10) for number in range(200)}
    with ParameterServer(tensors) as server:
        client = server.client()
        before = server._inbox.stats().items_in
        client.push(tensors).wait()
        assert server._inbox.stats().items_in == before + 1
