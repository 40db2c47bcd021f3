"""Test that a group's replicas stay equal during training and learn like one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.group_members import in_processes, in_threads, over_hosts

from flowchan import GroupError, Mismatch
from flowchan.collective import array_access

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from flowchan.collective.training.gradients import (  # noqa: E402
    AllReduceSGD,
    ElasticAverage,
    Gradients,
    TopK,
    check_equal,
    synchronize,
)

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def ok(found: list[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16), torch.tensor(found.target)


def model(seed: int = 0, width: int = 32) -> Any:
    made = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8)
    return made


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def batches(digits: tuple[Tensor, Tensor], steps: int) -> Any:
    x, y = digits
    return [(x[64 * i : 64 * (i + 1)], y[64 * i : 64 * (i + 1)]) for i in range(steps)]


def alone(digits: Any, steps: int) -> tuple[list[float], Any]:
    net = model()
    optimizer = sgd(net)
    curve = []
    for x, y in batches(digits, steps):
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve, net


def accuracy(net: Any, digits: Any) -> float:
    x, y = digits
    return float((net(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("run", [in_threads, in_processes], ids=["threads", "processes"])
def test_gradients_of_two_replicas_match_one_module(run: Any, digits: Any) -> None:
    """In float64, the mean of two halves differs from the mean of the whole batch only by rounding."""

    def train(g: Any) -> tuple[list[float], float]:
        net = model(seed=g.rank)
        synchronize(net, g)
        gradients, optimizer = Gradients(net, g), sgd(net)
        curve = []
        for x, y in batches(digits, 25):
            optimizer.zero_grad()
            loss = loss_of(net, x[g.rank :: 2], y[g.rank :: 2])
            loss.backward()
            gradients.wait()
            optimizer.step()
            curve.append(g.allreduce(loss.item(), op="mean"))
        check_equal(net, g)
        return curve, accuracy(net, digits)

    expected, net = alone(digits, 25)
    for curve, reached in ok(run(2, train)):
        torch.testing.assert_close(curve, expected, rtol=1e-9, atol=1e-12)
        assert reached == accuracy(net, digits) > 0.85


@pytest.mark.parametrize("compress", [None, "fp16", "bf16", lambda: TopK(1.0)])
def test_gradients_can_be_summed(compress: Any) -> None:
    def train(g: Any) -> list[list[float]]:
        net = nn.Linear(2, 1)
        gradients, found = Gradients(net, g, op="sum", compress=compress), []
        for factor in (1.0, 2.0):
            net.zero_grad()
            net(factor * torch.tensor([[1.0, g.rank + 2.0]])).sum().backward()
            gradients.wait()
            found.append([*net.weight.grad[0].tolist(), net.bias.grad.item()])  # type: ignore[index,union-attr]
        return found

    assert ok(in_threads(3, train)) == [[[3.0, 9.0, 3.0], [6.0, 18.0, 3.0]]] * 3


def test_unknown_operation_for_gradients_raises() -> None:
    with pytest.raises(ValueError, match=r"Gradients: op must be 'mean' or 'sum', got 'max' \(str\)"):
        Gradients(nn.Linear(2, 1), None, op="max")  # type: ignore[arg-type]


def test_accumulated_gradients_are_averaged_once(digits: Any) -> None:
    def train(g: Any, in_parts: bool) -> list[Tensor]:
        net = model()
        gradients = Gradients(net, g)
        ((x, y),) = batches(digits, 1)
        own_rows = slice(32 * g.rank, 32 * (g.rank + 1))
        x, y = x[own_rows], y[own_rows]
        if in_parts:
            with gradients.accumulate():
                (loss_of(net, x[:16], y[:16]) / 2).backward()
            (loss_of(net, x[16:], y[16:]) / 2).backward()
        else:
            loss_of(net, x, y).backward()
        gradients.wait()
        return [p.grad for p in net.parameters()]

    whole, parts = (ok(in_threads(2, train, in_parts)) for in_parts in (False, True))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0)


def test_accumulate_blocks_can_be_nested() -> None:
    def train(g: Any) -> Any:
        net = nn.Linear(1, 1)
        gradients = Gradients(net, g)
        with gradients.accumulate():
            with gradients.accumulate():
                net(torch.ones(1)).backward()
            net(torch.ones(1)).backward()
            net(torch.ones(1)).backward()
        gradients.wait()
        return net.weight.grad.item()  # type: ignore[union-attr]

    assert ok(in_threads(2, train)) == [3.0, 3.0]


def test_gradient_buffers_start_in_equal_order_on_all_replicas() -> None:
    """An unused parameter counts as having a gradient of zero."""

    def train(g: Any) -> tuple[int, list[float]]:
        net = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])
        gradients = Gradients(net, g)
        used = net[:3] if g.rank == 0 else net[1:]
        sum(layer.bias.sum() for layer in used).backward()  # type: ignore[union-attr]
        gradients.wait()
        return len(gradients._buffers), [float(layer.bias.grad[0]) for layer in net]  # type: ignore[index]

    assert ok(in_threads(2, train)) == [(4, [0.5, 1.0, 1.0, 0.5])] * 2


def test_backward_twice_without_wait_raises() -> None:
    def train(g: Any) -> None:
        net = nn.Linear(2, 1)
        gradients = Gradients(net, g)
        net(torch.ones(2)).backward()
        with pytest.raises(RuntimeError, match=r"call Gradients.wait\(\) after"):
            net(torch.ones(2)).backward()
        gradients.close()
        net(torch.ones(2)).backward()

    ok(in_threads(2, train))


@pytest.mark.parametrize("compress", ["fp16", "bf16", "topk", "qsgd", lambda: TopK(0.2)])
def test_compressed_gradients_train_equal_replicas(compress: Any, digits: Any) -> None:
    def train(g: Any) -> float:
        net = model()
        gradients, optimizer = Gradients(net, g, compress=compress), torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(4):
            for x, y in batches(digits, 25):
                optimizer.zero_grad()
                loss_of(net, x[g.rank :: 2], y[g.rank :: 2]).backward()
                gradients.wait()
                optimizer.step()
        check_equal(net, g)
        return accuracy(net, digits)

    assert min(ok(in_threads(2, train))) > 0.9


def test_user_defined_compression_decodes_values_from_all_members() -> None:
    class Signs:
        def encode(self, x: Tensor) -> bytes:
            return bytes((x > 0).tolist())

        def decode(self, values: list[bytes], out: Tensor) -> None:
            out.copy_(sum(2.0 * torch.tensor(list(value)) - 1 for value in values) / len(values))

    def train(g: Any) -> list[float]:
        net = nn.Linear(2, 1, bias=False)
        gradients = Gradients(net, g, compress=Signs)
        net(torch.tensor([3.0, 5.0 - 10 * g.rank])).backward()
        gradients.wait()
        return net.weight.grad.tolist()[0]  # type: ignore[union-attr]

    assert ok(in_threads(2, train)) == [[1.0, 0.0]] * 2
    with pytest.raises(
        ValueError, match="compress must be None, 'fp16', 'bf16', 'topk', 'qsgd' or a function that"
    ):
        Gradients(nn.Linear(2, 1), None, compress="zip")  # type: ignore[arg-type]


def test_topk_sends_omitted_elements_later() -> None:
    code, total = TopK(0.25), torch.zeros(8)
    x, out = torch.arange(8.0), torch.zeros(8)
    for _ in range(8):
        code.decode([code.encode(x)], out)
        total += out
        assert int((out != 0).sum()) <= 2
    residual = code._residual
    assert residual is not None
    torch.testing.assert_close(total + residual, 8 * x)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_topk_rejects_an_invalid_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction must be above 0 and at most 1"):
        TopK(fraction)


@pytest.mark.parametrize("compress", ["fp16", "bf16"])
def test_compression_of_complex_parameters_raises(compress: str) -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(
        ValueError, match=f"compress must be None for complex parameters, got '{compress}'.*torch.complex64"
    ):
        Gradients(net, None, compress=compress)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [in_threads, over_hosts], ids=["one host", "two hosts"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_replicas_stay_equal_with_unequal_batch_counts(run: Any, size: int, digits: Any) -> None:
    """The replicas match one module bit for bit. Gradients are averaged over the members with a batch."""

    def train(g: Any) -> tuple[list[int], list[Tensor]]:
        net = model()
        optimizer = sgd(net)
        training, counts = AllReduceSGD(net, optimizer, g), []
        for x, y in batches(digits, 2 + 3 * g.rank):
            optimizer.zero_grad()
            loss_of(net, x[g.rank :: size], y[g.rank :: size]).backward()
            counts.append(training.step())
        training.join()
        check_equal(net, g)
        return counts, [p.detach() for p in net.parameters()]

    def sequential() -> list[Tensor]:
        net = model()
        optimizer = sgd(net)
        for step, (x, y) in enumerate(batches(digits, 2 + 3 * (size - 1))):
            optimizer.zero_grad()
            active = [rank for rank in range(size) if step < 2 + 3 * rank]
            losses = [loss_of(net, x[rank::size], y[rank::size]) for rank in active]
            (sum(losses) / len(active)).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    found = ok(run(size, train))
    for rank, (counts, parameters) in enumerate(found):
        assert counts == [sum(step < 2 + 3 * other for other in range(size)) for step in range(2 + 3 * rank)]
        torch.testing.assert_close(parameters, sequential())


def test_mean_gradients_use_one_buffer_per_type() -> None:
    """A parameter may have any type, and its gradient may be missing or sparse.

    Members without a batch have these buffers as well.
    """

    def train(g: Any) -> tuple[int, list[list[float]]]:
        table = nn.Embedding(2, 2, sparse=True)
        net = nn.ModuleList([table, nn.Linear(1, 1).double(), nn.Linear(1, 1), nn.Linear(1, 1)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        synchronize(net, g)
        training = AllReduceSGD(net, optimizer, g)
        for _ in range(2 * g.rank + 1):
            optimizer.zero_grad()
            loss = net[0](torch.tensor([g.rank])).sum() + net[3].bias.sum() * 3  # type: ignore[operator]
            (loss + (net[1].bias * (g.rank + 1)).sum()).backward()  # type: ignore[operator]
            training.step()
        training.join()
        check_equal(net, g)
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return len({one.untyped_storage().data_ptr() for one in grads}), [x.flatten().tolist() for x in grads]

    last = [[0.0, 0.0, 1.0, 1.0], [0.0], [2.0], [0.0], [0.0], [0.0], [3.0]]
    assert ok(in_threads(2, train)) == [(2, last)] * 2


@pytest.mark.parametrize("run", [in_threads, over_hosts], ids=["one host", "two hosts"])
def test_elastic_averages_share_one_centre(run: Any, digits: Any) -> None:
    """The centre is the result of successive averages over all members, even if some have fewer batches."""

    def train(g: Any) -> tuple[float, list[Tensor]]:
        net = model(seed=g.rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        average = ElasticAverage(net, g, every=3)
        for _ in range(3 + g.rank):
            for x, y in batches(digits, 27):
                optimizer.zero_grad()
                loss_of(net, x[g.rank :: 2], y[g.rank :: 2]).backward()
                optimizer.step()
                average.step()
        average.join()
        with pytest.raises(Mismatch, match="has different values on rank 0 and rank 1"):
            check_equal(net, g)
        average.to_centre()
        check_equal(net, g)
        return accuracy(net, digits), [p.detach() for p in net.parameters()]

    for reached, _ in ok(run(2, train)):
        assert reached > 0.85


def pulled(g: Any, to: float) -> tuple[Any, ElasticAverage]:
    """Return a module and its average. The weights were 1 at first and are ``to`` now."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
        average = ElasticAverage(net, g, every=1, strength=0.5)
        net.weight.fill_(to)
    return net, average


def test_elastic_average_follows_its_formula() -> None:
    def train(g: Any) -> list[float]:
        net, average = pulled(g, to=5.0 if g.rank == 0 else 9.0)
        average.step()
        own_rows = net.weight.item()
        average.to_centre()
        return [own_rows, net.weight.item()]

    assert ok(in_threads(2, train)) == [[4.0, 4.0], [7.0, 4.0]]  # moved from 5 and 9 towards the centre
    with pytest.raises(ValueError, match="strength must be between 0 and 1"):
        ElasticAverage(nn.Linear(1, 1), None, every=1, strength=1.5)  # type: ignore[arg-type]


def test_elastic_average_keeps_parameters_if_the_group_has_ended() -> None:
    def train(g: Any) -> list[float]:
        net, average = pulled(g, to=5.0)
        g.close()
        with pytest.raises(GroupError):
            average.step()
        own_rows = net.weight.item()
        average.to_centre()
        return [own_rows, net.weight.item()]

    assert ok(in_threads(2, train)) == [[5.0, 1.0]] * 2


def other_values(net: Any, rank: int) -> None:
    if rank == 2:
        with torch.no_grad():
            net[2].bias[3] += 1e-9


CHANGES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "values": (other_values, r"'2.bias' \(float64\[10\]\) has different values on rank 0 and rank 2"),
    "shape": (
        lambda net, rank: rank == 1 and net.__setitem__(2, nn.Linear(32, 9).double()),
        r"'2.weight' \(float64\[10, 32\]\) on rank 0 corresponds to '2.weight' \(float64\[9, 32\]\) on ",
    ),
    "more": (
        lambda net, rank: rank == 1 and net.append(nn.Linear(10, 2).double()),
        "rank 0 has 4 parameters and buffers, but the module on rank 1 has 6",
    ),
}


def test_synchronize_rejects_buffer_with_shared_elements() -> None:
    def train(g: Any) -> None:
        net = nn.Linear(2, 2)
        net.register_buffer("shared", torch.zeros(1).expand(3))
        with pytest.raises(ValueError, match="share memory"):
            synchronize(net, g)
        g.barrier()

    ok(in_threads(2, train))


@pytest.mark.parametrize("change", CHANGES)
def test_check_equal_names_first_difference_and_rank(change: str) -> None:
    """Modules with different structures cause an error before anything is written."""
    function, message = CHANGES[change]

    def build_module(g: Any) -> None:
        net = model()
        check_equal(net, g)
        function(net, g.rank)
        with pytest.raises(Mismatch, match=message):
            check_equal(net, g)
        if change == "values":
            synchronize(net, g, root=2)
            check_equal(net, g)
            return
        with pytest.raises(Mismatch, match=message):
            synchronize(net, g)

    ok(in_threads(3, build_module))


class Nothing:
    """An encoding for a device without memory, which reads and writes nothing."""

    def encode(self, x: Tensor) -> Any:
        return str(x.device), x.numel()

    def decode(self, values: list[Any], out: Tensor) -> None:
        assert values == [self.encode(out)] * 2


def test_gradient_buffers_use_the_device_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer is on one device. The device must finish before other members read the buffer."""
    finished: list[str] = []
    monkeypatch.setattr(array_access, "finish", lambda x: finished.append(str(x.device)))

    def body(g: Any) -> list[str]:
        on_meta, on_cpu = nn.Linear(3, 4, device="meta"), nn.Linear(4, 2)
        gradients = Gradients(nn.ModuleList([on_meta, on_cpu]), g, compress=Nothing)
        on_cpu(torch.ones(1, 4)).sum().backward()
        on_meta(torch.ones(1, 3, device="meta")).sum().backward()
        gradients.wait()
        return [str(p.grad.device) for net in (on_meta, on_cpu) for p in net.parameters()]

    assert ok(in_threads(2, body)) == [["meta", "meta", "cpu", "cpu"]] * 2
    # each of the two members waits for the device twice: before and after the call
    assert finished == ["meta"] * 4
