"""Run parts of a module on a CUDA device. The other tests of ``devices=`` need no device."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from support.waiting import WAIT_LIMIT_S
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from trained import batches, perceptron

from flowchan.pipelines.sequential import Sequential

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run the tests on a machine that has one"
)

places = pytest.mark.parametrize(
    "devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]], ids=" then ".join
)


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Replace the check for leftovers: once CUDA has been used, it keeps threads and descriptors."""


@places
def test_output_matches_the_plain_module(devices: list[str]) -> None:
    module = perceptron().eval()
    x, _ = next(batches([64]))
    with torch.no_grad():
        expected = module(x)
        found = Sequential(copy.deepcopy(module), 2, devices=devices, chunks=4)(x)
    assert str(found.device) == devices[-1]
    close(found.cpu(), expected)


@places
def test_gradients_match_the_plain_module(devices: list[str]) -> None:
    module, (x, target) = perceptron(), next(batches([64]))
    pipe = Sequential(copy.deepcopy(module), 2, devices=devices, chunks=4)
    cross_entropy(module(x), target).backward()
    output = pipe(x)
    cross_entropy(output, target.to(output.device)).backward()
    for found, expected in zip(pipe.parameters(), module.parameters(), strict=True):
        close(found.grad.cpu(), expected.grad)


@places
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbh1"])
def test_training_matches_the_plain_module(devices: list[str], schedule: Any) -> None:
    module = perceptron()
    plain, optimizer = copy.deepcopy(module), partial(SGD, lr=0.1, momentum=0.9)
    made, data = optimizer(plain.parameters()), list(batches([32] * 5))
    for x, target in data:
        made.zero_grad()
        cross_entropy(plain(x), target).backward()
        made.step()
    pipe = Sequential(module, 2, devices=devices, chunks=4)
    with pipe.trainer(loss=cross_entropy, optimizer=optimizer, schedule=schedule) as training:
        for x, target in data:
            training.step(x, target.to(devices[-1]))
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        close(found.cpu(), expected)


@places
def test_stream_yields_outputs_on_the_last_device(devices: list[str]) -> None:
    module = perceptron().eval()
    inputs = [x for x, _ in batches([16, 5, 16])]
    outputs = list(Sequential(copy.deepcopy(module), 2, devices=devices).stream(inputs))
    with torch.no_grad():
        for found, x in zip(outputs, inputs, strict=True):
            assert str(found.device) == devices[-1]
            close(found.cpu(), module(x))


A_WHILE = 500_000_000  # cycles that keep a device's stream busy for a few tenths of a second


def test_call_under_another_stream_waits_for_inputs_and_gradients() -> None:
    module = perceptron().cuda()
    pipe = Sequential(copy.deepcopy(module), 2, devices=["cuda:0", "cuda:0"], chunks=4)
    x = torch.randn(64, 6, device="cuda")
    module(x).square().sum().backward()
    pipe(x).sum().backward()  # starts the workers
    pipe.zero_grad()
    torch.cuda.synchronize()
    late, factor = torch.zeros_like(x), torch.zeros((), device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(A_WHILE)
        late.copy_(x)
        output = pipe(late)
        torch.cuda._sleep(A_WHILE)
        factor.fill_(1)
        (output.square().sum() * factor).backward()
        found = [parameter.grad.clone() for parameter in pipe.parameters()]
        output = output.clone()
    torch.cuda.synchronize()
    close(output, module(x))
    for gradient, parameter in zip(found, module.parameters(), strict=True):
        close(gradient, parameter.grad, rtol=1e-3)


def test_reentrant_checkpoint_around_a_pipe_raises_instead_of_blocking() -> None:
    pipe = Sequential(perceptron(), 2, devices=["cuda:0", "cuda:0"], chunks=4)
    x = torch.randn(64, 6, device="cuda", requires_grad=True)
    output = checkpoint(pipe, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        output.sum().backward()
    output = checkpoint(pipe, x, use_reentrant=False)
    output.sum().backward()
    assert x.grad is not None


IN_PROCESSES = """
import copy, multiprocessing, torch
from functools import partial
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from flowchan.pipelines import Sequential

def main():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    plain = copy.deepcopy(module).cuda()
    x, target = torch.randn(64, 6, device="cuda"), torch.randint(4, (64,), device="cuda")
    optimizer = SGD(plain.parameters(), lr=0.1)
    pipe = Sequential(module, 2, on="process", devices=["cuda:0", "cuda:0"], chunks=4)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x).cpu(), plain(x).cpu(), rtol=1e-4, atol=1e-5)
    with pipe.trainer(loss=cross_entropy, optimizer=partial(SGD, lr=0.1)) as training:
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(plain(x), target).backward()
            optimizer.step()
            training.step(x, target)
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)
    print("equal")

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
"""


def test_processes_train_and_infer_on_one_device(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_PROCESSES)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=2 * WAIT_LIMIT_S, check=False
    )
    assert done.stdout.endswith("equal\n"), done.stderr
