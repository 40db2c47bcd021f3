"""Test that wrong input is rejected before anything starts.

The error names the argument, the value, the allowed values and the remedy.
"""

from __future__ import annotations

import dataclasses
import inspect
import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowchan.declare.placements import PLACEMENTS
from flowchan.hosts import local
from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.checks import checked_devices
from flowchan.pipelines.sequential.pipe_options import SequentialSettings


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def words_in(raised: pytest.ExceptionInfo[BaseException], *words: str) -> bool:
    text = str(raised.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    return text.startswith("Sequential: ")


WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "more parts than layers": (
        {"parts": 4},
        ValueError,
        ["parts must be between 1 and 3", "number of layers", "got 4"],
    ),
    "zero parts": ({"parts": 0}, ValueError, ["parts must be between 1 and 3", "got 0"]),
    "a negative number of parts": ({"parts": -2}, ValueError, ["got -2"]),
    "parts is a bool": ({"parts": True}, TypeError, ["parts must be an int, or a list", "True (bool)"]),
    "parts is a float": ({"parts": 2.5}, TypeError, ["2.5 (float)"]),
    "parts is a text": ({"parts": "2"}, TypeError, ["'2' (str)"]),
    "a list that adds up to less": (
        {"parts": [1, 1]},
        ValueError,
        ["parts=[1, 1] must add up to 3", "got 2"],
    ),
    "a list that adds up to more": ({"parts": (2, 2)}, ValueError, ["must add up to 3", "got 4"]),
    "a list with a zero": ({"parts": [3, 0]}, ValueError, ["parts=[3, 0]", "at least 1", "got 0"]),
    "a list with a text": ({"parts": [2, "1"]}, ValueError, ["ints of at least 1", "got '1'"]),
    "an empty list": ({"parts": []}, ValueError, ["parts=[] must add up to 3"]),
    "an unknown placement": (
        {"on": "gpu"},
        ValueError,
        ['on must be "thread", "process" or a pool', "'gpu'"],
    ),
    "a placement that is not a text": ({"on": None}, ValueError, ['"thread", "process" or a pool', "None"]),
    "zero chunks": (
        {"chunks": 0},
        ValueError,
        ["chunks must be at least 1, got 0", "use 1 to send whole batches"],
    ),
    "chunks is a float": ({"chunks": 2.0}, TypeError, ["chunks must be an int of at least 1", "2.0 (float)"]),
    "an unknown balance": (
        {"balance": "speed", "sample": torch.ones(2, 3)},
        ValueError,
        ['balance must be "time", "memory" or None', "speed"],
    ),
    "a balance without a sample": (
        {"balance": "time"},
        ValueError,
        ["balance='time'", "sample must be a typical batch"],
    ),
    "a sample without a balance": (
        {"sample": torch.ones(2, 3)},
        ValueError,
        ["balance must be", "if sample is passed"],
    ),
    "a balance and a list": (
        {"balance": "time", "sample": torch.ones(2, 3), "parts": [1, 2]},
        ValueError,
        ["got [1, 2]", "use parts=2"],
    ),
    "a sample that is not a tensor": (
        {"balance": "time", "sample": [1]},
        TypeError,
        ["sample[0] must be a tensor", "(int)"],
    ),
    "an unknown device": (
        {"devices": ["cpu", "abacus"]},
        ValueError,
        ["usable devices (cpu", "got 'abacus'"],
    ),
    "a missing device": (
        {"devices": ["cpu", "cuda:99"]},
        ValueError,
        ["got 'cuda:99'", "no such device"],
    ),
    "a device without values": ({"devices": ["meta", "cpu"]}, ValueError, ["got 'meta'"]),
    "a device that is None": ({"devices": ["cpu", None]}, ValueError, ["got None"]),
    "too few devices": (
        {"devices": ["cpu"]},
        ValueError,
        ["devices must have 2 entries, one for each part, got 1"],
    ),
    "a pool with shares of workers": (
        {"on": local(2)[{"local-1": 1}]},
        ValueError,
        ["on must be a pool without shares", "got local-1"],
    ),
    "a pool with assigned hosts": (
        {"on": local(2).assigned(["local-1"])},
        ValueError,
        ["without shares or assigned hosts", "got local(2)"],
    ),
    "devices is a text": ({"devices": "cpu"}, TypeError, ["devices must be a list", "'cpu' (str)"]),
}


@pytest.mark.parametrize(("arguments", "kind", "words"), WRONG.values(), ids=WRONG)
def test_wrong_argument_raises_with_the_allowed_values(
    arguments: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as raised:
        Sequential(model(), **arguments)
    assert words_in(raised, *words)


@pytest.mark.parametrize(
    ("on", "method", "refused"),
    [("process", "fork", True), ("process", "spawn", False), ("thread", "fork", False)],
)
def test_cuda_in_forked_processes_raises_before_any_use(
    monkeypatch: pytest.MonkeyPatch, on: Any, method: str, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: method)
    if refused:
        with pytest.raises(ValueError, match="forked") as raised:
            Sequential(model(), on=on, devices=["cpu", "cuda:0"])
        assert words_in(
            raised, "devices=['cpu', 'cuda:0']", 'multiprocessing.set_start_method("spawn")', 'on="thread"'
        )
    else:
        assert [device.type for device in checked_devices(["cpu", "cuda:0"], 2, PLACEMENTS[on]) or ()] == [
            "cpu",
            "cuda",
        ]


class UnprintableValue:
    """Object with a ``repr`` that fails."""

    def __repr__(self) -> str:
        raise LookupError("no repr")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"parts": UnprintableValue()}, "got <UnprintableValue whose"),
        ({"parts": [2, UnprintableValue()]}, "got <UnprintableValue whose"),
        ({"on": UnprintableValue()}, "got <UnprintableValue whose"),
        ({"chunks": UnprintableValue()}, "got <UnprintableValue whose"),
        ({"balance": UnprintableValue()}, "got <UnprintableValue whose"),
        (
            {"balance": "time", "sample": {UnprintableValue(): 1}},
            "sample[<UnprintableValue whose repr raises LookupError>] must be a tensor",
        ),
        ({"devices": UnprintableValue()}, "got <UnprintableValue whose"),
        ({"devices": ["cpu", UnprintableValue()]}, "got <UnprintableValue whose repr raises LookupError> ("),
        ({"devices": ["cpu", "cpu", UnprintableValue()]}, "got 3: <list whose repr raises LookupError>"),
    ],
)
def test_error_names_the_type_if_repr_fails(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        Sequential(model(), **arguments)
    assert words_in(raised, word)


@pytest.mark.parametrize(
    "argument", ["loss", "optimizer", "schedule", "workers", "recompute", "clip", "autocast"]
)
def test_training_error_names_the_type_if_repr_fails(argument: str) -> None:
    value = r"(<UnprintableValue whose .* LookupError>|UnprintableValue)( \(UnprintableValue\))?"
    with pytest.raises((TypeError, ValueError), match=rf"^training: {argument} must be .*got {value}$"):
        Sequential(model()).trainer(**{"loss": nn.functional.mse_loss, argument: UnprintableValue()})


def test_help_lists_every_option_of_a_pipe_with_its_default() -> None:
    shown = inspect.signature(Sequential).parameters.values()
    options = {one.name: one.default for one in shown if one.kind is one.KEYWORD_ONLY}
    assert options == {setting.name: setting.default for setting in dataclasses.fields(SequentialSettings)}
    assert [one.name for one in shown] == ["module", "parts", *options]


@pytest.mark.parametrize("passed", [(), (nn.Sequential(),)])
def test_misspelt_option_of_a_pipe_raises_with_a_suggestion(passed: tuple[Any, ...]) -> None:
    misspelt: dict[str, Any] = {"chunk": 3}
    with pytest.raises(TypeError, match=r"^Sequential: unknown option 'chunk'; did you mean 'chunks'\?$"):
        Sequential(*passed, **misspelt)
    with pytest.raises(
        TypeError, match=r"^Sequential: unknown option 'x'; the options are module, parts, on, chunks, "
    ):
        Sequential(*passed, **dict.fromkeys("x"))


def test_misspelt_training_option_raises_with_a_suggestion() -> None:
    misspelt: dict[str, Any] = {"optimiser": torch.optim.SGD}
    with pytest.raises(TypeError, match=r"^trainer: unknown option 'optimiser'; did you mean 'optimizer'\?$"):
        Sequential(model()).trainer(loss=nn.functional.mse_loss, **misspelt)


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        (nn.Linear(2, 2), ValueError, ["parts must be between 1 and 1 (the number of layers), got 2"]),
        (5, TypeError, ["nn.Module or a list of layers", "5 (int)"]),
        (None, TypeError, ["None (NoneType)"]),
        ([nn.Linear(2, 2), torch.relu], TypeError, ["layer 1 of module must be an nn.Module"]),
        ([], ValueError, ["module must have at least one layer"]),
        (nn.Sequential(), ValueError, ["module must have at least one layer"]),
        (nn.Sequential(nn.LazyLinear(3), nn.ReLU()), ValueError, ["'0.weight'", "call module(x) once"]),
    ],
)
def test_module_that_is_not_a_sequence_of_layers_raises(
    module: Any, kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as raised:
        Sequential(module)
    assert words_in(raised, *words)


def test_hooks_on_the_sequential_raise_but_hooks_on_layers_work() -> None:
    module = model()
    seen = []
    module[0].register_forward_hook(lambda *_: seen.append("layer"))
    with Sequential(module, chunks=2) as pipe:
        pipe(torch.ones(4, 3))
    assert len(seen) >= 2
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks") as raised:
        Sequential(module)
    assert words_in(raised, "register them on its layers")


# --- pickling ---


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.tools = {"lock": threading.Lock()}

    def forward(self, x: Tensor) -> Tensor:
        with self.tools["lock"]:
            return x


def test_error_for_unpicklable_layer_names_the_attribute() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Locked()))
    with pytest.raises(TypeError) as raised:
        Sequential(module, on="process")
    assert words_in(
        raised,
        "layer '1' (Sequential) of part 1",
        "must be picklable, got 1.1.tools['lock'] of type lock",
        'use on="thread"',
        "create it in forward()",
    )
    with Sequential(module, on="thread") as pipe:
        assert pipe(torch.ones(2, 3)).shape == (2, 3)


def test_layer_with_a_lambda_is_sent_to_a_process() -> None:
    class Apply(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.function(x)
            return result

    with Sequential([Apply(lambda x: x + 1), Apply(lambda x: x * 2)], on="process") as pipe:
        assert torch.equal(pipe(torch.ones(3)), torch.full((3,), 4.0))


# --- batch dimension ---


class Fold(nn.Module):
    """Layer that reshapes (n, 4) to (2 n, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2)


class Unfold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 4)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Fixed(nn.Module):
    """Layer that returns two rows for any input."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:2]


class WithNumber(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, 7


def started(pipe: Sequential) -> bool:
    return pipe._inference.run.started


CHANGES: dict[str, tuple[list[nn.Module], str, tuple[int, ...]]] = {
    "folds": ([nn.Linear(4, 4), Fold(), nn.ReLU()], "layer '1' (Fold)", (16, 2)),
    "flattens all": ([nn.Linear(4, 4), nn.Flatten(0)], "layer '1' (Flatten)", (32,)),
    "sums": ([nn.Linear(4, 4), Total()], "layer '1' (Total)", ()),
    "keeps two rows": ([Fixed(), nn.ReLU()], "layer '0' (Fixed)", (2, 4)),
}


@pytest.mark.parametrize("on", ["thread", "process"])
@pytest.mark.parametrize(("layers", "culprit", "shape"), CHANGES.values(), ids=CHANGES)
def test_layer_that_changes_the_batch_dimension_raises_before_start(
    layers: list[nn.Module], culprit: str, shape: tuple[int, ...], on: Any
) -> None:
    chunks = 8 if culprit == "layer '0' (Fixed)" else 1
    with Sequential(layers, on=on, chunks=chunks) as pipe:
        x = torch.randn(16 if chunks == 8 else 8, 4)
        with pytest.raises(ValueError, match="must keep the batch dimension") as raised:
            pipe(x)
        assert words_in(raised, culprit, str(shape), "apply it to the joined output")
        assert not started(pipe)


def test_batch_dimension_may_change_between_layers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Fold(), nn.Linear(2, 2), Unfold())
    x = torch.randn(10, 4)
    with Sequential(module, parts=[2, 2]) as pipe, torch.no_grad():
        assert torch.allclose(pipe(x), module(x))


def test_output_other_than_a_tensor_raises_with_its_path() -> None:
    with Sequential([nn.Linear(4, 4), WithNumber()]) as pipe:
        with pytest.raises(TypeError) as raised:
            pipe(torch.randn(8, 4))
        assert words_in(raised, "the output[1] must be a tensor, got 7 (int)", "layer '1' (WithNumber)")
        assert not started(pipe)


def test_lstm_output_with_hidden_state_raises() -> None:
    with Sequential([nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)]) as pipe:
        with pytest.raises(ValueError, match="must keep the batch dimension") as raised:
            pipe(torch.randn(8, 5, 4))
        assert words_in(raised, "layer '1' (LSTM)", "the output[1][0]", "(1, 2, 3)")


def test_layers_without_meta_kernels_are_checked_at_run_time() -> None:
    class Numbers(nn.Module):
        """Layer that reads values and therefore cannot run on the device ``meta``."""

        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > float(x.min())] if x.shape[0] > 1 else x

    with Sequential([nn.Identity(), Numbers()], chunks=2) as pipe:
        with pytest.raises(
            ValueError, match="micro-batch 0 of batch 0 must have 3 samples like its input, got 2"
        ):
            pipe(torch.arange(6.0).reshape(6, 1))
        assert started(pipe)
        assert pipe(torch.arange(2.0).reshape(2, 1)).shape == (2, 1)


def test_check_changes_neither_buffers_nor_generator() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Total()).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    with Sequential(module) as pipe, pytest.raises(ValueError, match="batch dimension"):
        pipe(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert module[1].weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("x", "kind", "word"),
    [
        ("text", TypeError, "x must be a tensor"),
        ({"a": torch.ones(2, 3), "b": 1}, TypeError, "x['b'] must be a tensor"),
        ((torch.ones(2, 3), torch.ones(3, 3)), ValueError, "x[1] must have the same batch size as x[0] (2)"),
        (torch.tensor(1.0), ValueError, "must have a batch dimension"),
    ],
)
def test_input_that_cannot_be_split_raises_before_start(x: Any, kind: type[Exception], word: str) -> None:
    with Sequential(model()) as pipe:
        with pytest.raises(kind) as raised:
            pipe(x)
        assert word in str(raised.value)
        assert not started(pipe)
