"""Compose recurrent layers, dropout and attention for remote tensors in the way of torch's CPU tensors.

torch decomposes these operations differently for each device type. For devices other than the CPU, torch
picks fused cells, which CPU nodes lack. For these devices, torch's dropout and attention kernels also give
results that differ in the last bits. The functions here issue the same operations in the same order as torch
does for CPU tensors. Forward and backward values are therefore equal bit for bit. If a node runs its kernels
on another device, torch decomposes the operations as usual.

Sources: the cell equations come from ``torch.nn.LSTM``, ``torch.nn.GRU`` and ``torch.nn.RNN``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowchan.pipelines.remote_tensors import device_table
from flowchan.pipelines.remote_tensors.templates import Handler, handlers

aten = torch.ops.aten
State = tuple[Tensor, ...]
"""State of one layer in one direction: (h,) or, for an LSTM, (h, c)."""
LSTM_MODE = 2
"""oneDNN's number for an LSTM."""
FLASH = 1
"""torch's number for flash attention."""


class LayerWeights(NamedTuple):
    """Weights of one layer in one direction."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None = None


Step = Callable[[Tensor, State, LayerWeights], State]
Run = Callable[[Tensor, State, LayerWeights, bool], tuple[Tensor, State]]


def _lstm_step(gates: Tensor, state: State, weights: LayerWeights) -> State:
    hx, cx = state
    all_gates = torch.nn.functional.linear(hx, weights.w_hh, weights.b_hh).add_(gates)
    parts = torch.unsafe_chunk(all_gates, 4, 1)
    ingate, forgetgate = parts[0].sigmoid_(), parts[1].sigmoid_()
    cellgate, outgate = parts[2].tanh_(), parts[3].sigmoid_()
    cy = (forgetgate * cx).add_(ingate * cellgate)
    hy = outgate * cy.tanh()
    return (hy if weights.w_hr is None else torch.matmul(hy, weights.w_hr.t()), cy)


def _gru_step(gates: Tensor, state: State, weights: LayerWeights) -> State:
    (hx,) = state
    of_input = torch.unsafe_chunk(gates, 3, 1)
    of_state = torch.unsafe_chunk(torch.nn.functional.linear(hx, weights.w_hh, weights.b_hh), 3, 1)
    reset = of_state[0].add_(of_input[0]).sigmoid_()
    update = of_state[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_state[2].mul_(reset)).tanh_()
    return ((hx - new).mul_(update).add_(new),)


def _tanh_step(gates: Tensor, state: State, weights: LayerWeights) -> State:
    return (torch.nn.functional.linear(state[0], weights.w_hh, weights.b_hh).add_(gates).tanh(),)


def _relu_step(gates: Tensor, state: State, weights: LayerWeights) -> State:
    return (torch.nn.functional.linear(state[0], weights.w_hh, weights.b_hh).add_(gates).relu(),)


def _whole(step: Step) -> Run:
    """Return a function that runs one layer over sequences of equal length."""

    def run(inputs: Tensor, state: State, weights: LayerWeights, backwards: bool) -> tuple[Tensor, State]:
        gates = torch.nn.functional.linear(inputs, weights.w_ih, weights.b_ih).unbind(0)
        if not gates:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        outputs = []
        for one in reversed(gates) if backwards else gates:
            state = step(one, state, weights)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs, 0), state

    return run


def _packed(step: Step, sizes: Sequence[int]) -> Run:
    """Return a function that runs one layer over packed sequences with these batch sizes per step."""

    def forwards(gates: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        ended: list[State] = []
        offset, last = 0, sizes[0]
        for size in sizes:
            one = gates.narrow(0, offset, size)
            offset += size
            if size < last:
                ended.append(tuple(part.narrow(0, size, last - size) for part in state))
                state = tuple(part.narrow(0, 0, size) for part in state)
            last = size
            state = step(one, state, weights)
            outputs.append(state[0])
        ended.append(state)
        return torch.cat(outputs, 0), tuple(torch.cat(parts, 0) for parts in zip(*ended[::-1], strict=True))

    def backwards(gates: Tensor, first: State, weights: LayerWeights) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        offset, last = gates.size(0), sizes[-1]
        state = tuple(part.narrow(0, 0, last) for part in first)
        for size in reversed(sizes):
            if size > last:
                begun = [part.narrow(0, last, size - last) for part in first]
                state = tuple(torch.cat(parts, 0) for parts in zip(state, begun, strict=True))
            offset -= size
            last = size
            state = step(gates.narrow(0, offset, size), state, weights)
            outputs.append(state[0])
        return torch.cat(outputs[::-1], 0), state

    def run(inputs: Tensor, state: State, weights: LayerWeights, reverse: bool) -> tuple[Tensor, State]:
        gates = torch.nn.functional.linear(inputs, weights.w_ih, weights.b_ih)
        return (backwards if reverse else forwards)(gates, state, weights)

    return run


def _one_dnn(like: State, layers: int, biases: bool, both: bool, batch_first: bool) -> Run:
    """Return a function that runs one LSTM layer with oneDNN.

    oneDNN chooses its kernel by the grad mode and ignores the last argument, ``train``. A node does not know
    the program's grad mode. This argument therefore carries it.
    """
    hidden = like[0].size(2)

    def run(inputs: Tensor, state: State, weights: LayerWeights, reverse: bool) -> tuple[Tensor, State]:
        zeros = [torch.zeros_like(weight) for weight in weights[:2]] if not biases else []
        output, hy, cy, _ = aten.mkldnn_rnn_layer(
            inputs, *(weights[:2] if zeros else weights[:4]), *zeros, *state, reverse, [],
            LSTM_MODE, hidden, layers, biases, both, batch_first, torch.is_grad_enabled(),
        )  # fmt: skip
        return output, (hy, cy)

    return run


def _gather(params: Sequence[Tensor], biases: bool, projections: bool) -> list[LayerWeights]:
    """Split torch's flat list of parameters into the weights of each layer and direction."""
    count = 2 + 2 * biases + projections
    if len(params) % count:
        raise RuntimeError("got an incorrect number of RNN parameters")
    groups = [list(params[at : at + count]) for at in range(0, len(params), count)]
    return [
        LayerWeights(
            one[0],
            one[1],
            one[2] if biases else None,
            one[3] if biases else None,
            one[-1] if projections else None,
        )
        for one in groups
    ]


def _layers(
    run: Run, inputs: Tensor, hidden: State, weights: list[LayerWeights], dropout: float, both: bool
) -> tuple[Tensor, ...]:
    """Run all layers and return the output and the final states, stacked."""
    states = list(zip(*(part.unbind(0) for part in hidden), strict=True))
    directions = 1 + both
    if len(states) != len(weights):
        raise RuntimeError(f"Expected {len(weights)} hidden states in stacked_rnn, got {len(states)}")
    finals: list[State] = []
    for index in range(0, len(states), directions):
        if index and dropout:
            inputs = torch.dropout(inputs, dropout, True)
        outputs = []
        for direction in range(directions):
            at = index + direction
            output, final = run(inputs, states[at], weights[at], direction == 1)
            outputs.append(output)
            finals.append(final)
        inputs = torch.cat(outputs, -1) if both else outputs[0]
    return inputs, *(torch.stack(parts, 0) for parts in zip(*finals, strict=True))


def lstm(inputs: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Run ``aten::lstm.input``.

    Use oneDNN where torch uses it on a CPU; otherwise, compute each step separately.
    """
    biases, layers, dropout, train, both, batch_first = options
    hidden = (hx[0], hx[1])
    projections = hx[0].size(2) != hx[1].size(2)
    if batch_first:
        inputs = inputs.transpose(0, 1)
    weights = _gather(params, biases, projections)
    one_dnn = (
        torch._C._has_mkldnn
        and torch._C._get_mkldnn_enabled()
        and inputs.dtype is torch.float32
        and inputs.numel()
        and not projections
    )
    if one_dnn:
        run = _one_dnn(hidden, layers, biases, both, batch_first)
        inputs, hidden = inputs.contiguous(), (hx[0].contiguous(), hx[1].contiguous())
    else:
        run = _whole(_lstm_step)
    output, *finals = _layers(run, inputs, hidden, weights, dropout if train else 0.0, both)
    return (output.transpose(0, 1) if batch_first else output, *finals)


def lstm_packed(
    data: Tensor, sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """Run ``aten::lstm.data``."""
    biases, _, dropout, train, both = options
    weights = _gather(params, biases, hx[0].size(2) != hx[1].size(2))
    run = _packed(_lstm_step, sizes.tolist())
    return _layers(run, data, (hx[0], hx[1]), weights, dropout if train else 0.0, both)


def _recurrent(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """Return the implementation of a layer type whose state is one tensor, such as ``aten::gru.input``."""

    def layer(inputs: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
        biases, _, dropout, train, both, batch_first = options
        if batch_first:
            inputs = inputs.transpose(0, 1)
        weights = _gather(params, biases, False)
        output, final = _layers(_whole(step), inputs, (hx,), weights, dropout if train else 0.0, both)
        return (output.transpose(0, 1) if batch_first else output), final

    return layer


def _recurrent_packed(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """Return the implementation of a layer for packed sequences, such as ``aten::gru.data``."""

    def layer(
        data: Tensor, sizes: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any
    ) -> tuple[Tensor, ...]:
        biases, _, dropout, train, both = options
        weights = _gather(params, biases, False)
        return _layers(_packed(step, sizes.tolist()), data, (hx,), weights, dropout if train else 0.0, both)

    return layer


def lstm_cell(
    inputs: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> State:  # fmt: skip
    """Run ``aten::lstm_cell``."""
    weights = LayerWeights(w_ih, w_hh, b_ih, b_hh)
    # Issue the operands of the sum in the same order as torch.
    gates = torch.nn.functional.linear(inputs, w_ih, b_ih)
    return _lstm_step(gates, (hx[0], hx[1]), weights)


def gru_cell(
    inputs: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run ``aten::gru_cell``."""
    gates = torch.nn.functional.linear(inputs, w_ih, b_ih)
    return _gru_step(gates, (hx,), LayerWeights(w_ih, w_hh, b_ih, b_hh))[0]


def dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Run ``aten::dropout`` without the fused kernel, whose scaling rounds differently."""
    if not train or not 0 < p < 1:
        return aten.dropout.default.decompose(inputs, p, train)  # type: ignore[no-any-return]
    return inputs * torch.empty_like(inputs).bernoulli_(1 - p).div_(1 - p)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``aten::scaled_dot_product_attention`` with the kernel that torch chooses for CPU tensors."""
    like = [_cpu_like(one) for one in (query, key, value)]
    mask = None if attn_mask is None else _cpu_like(attn_mask)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if aten._fused_sdp_choice(*like, mask, dropout_p, is_causal, **options) != FLASH:
        return aten.scaled_dot_product_attention.default.decompose(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        hidden = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
    output: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output


def _cpu_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized CPU tensor with the metadata of ``tensor``."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: lstm,
    aten.lstm.data: lstm_packed,
    aten.gru.input: _recurrent(_gru_step),
    aten.gru.data: _recurrent_packed(_gru_step),
    aten.rnn_tanh.input: _recurrent(_tanh_step),
    aten.rnn_tanh.data: _recurrent_packed(_tanh_step),
    aten.rnn_relu.input: _recurrent(_relu_step),
    aten.rnn_relu.data: _recurrent_packed(_relu_step),
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.dropout.default: dropout,
    aten.scaled_dot_product_attention.default: attention,
}
"""Implementation of each operation."""

_libraries: list[Any] = []


def register() -> None:
    """Register the implementations with torch for remote tensors."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for op, function in COMPOSITES.items():
        chosen = _for_cpu_nodes(op, function)
        library.impl(op.name().removeprefix("aten::"), chosen, "AutogradPrivateUse1")
        handlers[op.name()] = _below_autograd(chosen)  # torch calls this handler in inference mode
    for name in CAST:
        library.impl(name, _refuse_autocast, "AutocastPrivateUse1")
    _libraries.append(library)  # torch drops the kernels of a library that is garbage-collected


CAST = ("linear", "matmul", "mm", "addmm", "bmm", "conv1d", "conv2d", "conv3d")
"""Operations that refuse autocast with a short error message. For all others, torch reports a missing
backend."""


def _refuse_autocast(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.autocast: remote tensors do not support autocast; convert the module with .to(dtype)"
    )


def _below_autograd(function: Callable[..., Any]) -> Handler:
    return lambda plan, args, kwargs: function(*args, **kwargs)


def _for_cpu_nodes(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves the operation to torch unless the node's device is a CPU."""

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        if device_table.client_at(first.device).kernels == "cpu":
            return function(first, *args, **kwargs)
        return op.decompose(first, *args, **kwargs)

    return run
