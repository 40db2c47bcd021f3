"""Test that copies between nodes have the source's values at the time of the call, and never deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.optional_packages import optional
from support.waiting import wait_until

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

WAIT_S = 60
ROW = 1 << 18
"""Number of float32 elements in 1 MB."""


@pytest.fixture(scope="module")
def three_nodes(two_nodes: Any) -> Iterator[Any]:
    """Provide three nodes on this machine, from two ``RemoteNodes`` objects."""
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(1) as third:
        yield NodesOfTwoStarts(two_nodes, third)


class NodesOfTwoStarts(list[Any]):
    def __init__(self, *starts: Any) -> None:
        super().__init__(node for nodes in starts for node in nodes)
        self.starts = starts

    def sync(self) -> None:
        for nodes in self.starts:
            nodes.sync(WAIT_S)

    def stats(self) -> list[Any]:
        return [one for nodes in self.starts for one in nodes.stats()]


def numbers(size: int, start: int = 0) -> Any:
    return torch.arange(start, start + size, dtype=torch.float32)


def test_copy_has_the_values_from_before_later_changes(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    source = numbers(ROW).to(a)
    copies = []
    for step in range(8):
        copies.append((step, source.to(b, non_blocking=step % 2 == 0)))
        source.add_(1)
    for step, copied in copies:
        assert copied.device == b
        assert torch.equal(copied.cpu(), numbers(ROW, step))
    assert torch.equal(source.cpu(), numbers(ROW, 8))


def test_change_of_the_copy_does_not_change_the_source(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    source = numbers(1000).to(a)
    copied = source.to(b)
    copied.zero_()
    assert torch.equal(source.cpu(), numbers(1000))
    assert not copied.cpu().any()


@pytest.mark.parametrize("megabytes", [1, pytest.param(16), pytest.param(256, marks=pytest.mark.long)])
def test_simultaneous_copies_in_both_directions_complete(three_nodes: Any, megabytes: int) -> None:
    a, b, _ = three_nodes
    size, rounds = megabytes * ROW, 40 // megabytes + 2
    there, back = torch.full((size,), 1.0, device=a), torch.full((size,), 2.0, device=b)
    for _ in range(rounds):
        there, back = back.to(a) + 1, there.to(b) + 1
    expected = [1.0, 2.0] if rounds % 2 == 0 else [2.0, 1.0]
    found = [(float(one.min()), float(one.max())) for one in (there, back)]
    assert found == [(value + rounds,) * 2 for value in expected]


def test_many_unread_copies_in_both_directions_do_not_block(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    here, there = numbers(ROW).to(a), numbers(ROW, 5).to(b)
    made = [(here.to(b), there.to(a)) for _ in range(40)]
    assert all(torch.equal(one.cpu(), numbers(ROW)) for one, _ in made[::13])
    assert all(torch.equal(one.cpu(), numbers(ROW, 5)) for _, one in made[::13])


def test_full_inboxes_in_both_directions_do_not_block(
    three_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node reads its inbox before both nodes have sent everything, as if many threads copied tensors."""
    from flowchan.pipelines.remote_tensors.node_client import NodeClient
    from flowchan.pipelines.remote_tensors.node_copies import WAITING

    a, b, _ = three_nodes
    here, there = numbers(ROW).to(a), numbers(ROW, 5).to(b)
    inboxes = [one._m.client.place.inbox for one in (here, there)]
    late: list[Any] = []
    send = NodeClient.send

    def without_receive(client: NodeClient, *message: Any, **options: Any) -> int:
        if message[0] == "receive":
            late.append((client, message))
            return 0
        return send(client, *message, **options)

    with monkeypatch.context() as patch:
        patch.setattr(NodeClient, "send", without_receive)
        made = [(here.to(b), there.to(a)) for _ in range(2 * WAITING)]
        here.add_(1)
        there.add_(1)
    wait_until(lambda: all(inbox.stats().inside == WAITING for inbox in inboxes))
    for client, message in late:
        client.send(*message)
    assert all(torch.equal(one.cpu(), numbers(ROW)) for one, _ in made[::13])
    assert all(torch.equal(one.cpu(), numbers(ROW, 5)) for _, one in made[::13])


def test_many_small_copies_around_a_ring_keep_their_order(three_nodes: Any) -> None:
    a, b, c = three_nodes
    total = torch.zeros(3, device=a)
    for _ in range(300):
        total = (((total + 1).to(b) * 2).to(c) - total.to(c)).to(a)
    expected = torch.zeros(3)
    for _ in range(300):
        expected = (expected + 1) * 2 - expected
    assert torch.equal(total.cpu(), expected)


def test_copies_that_arrive_in_another_order_are_not_mixed_up(three_nodes: Any) -> None:
    a, b, c = three_nodes
    rng = random.Random(7)
    tensors = {node: torch.full((4,), float(place), device=node) for place, node in enumerate(three_nodes)}
    values = {node: float(place) for place, node in enumerate(three_nodes)}
    checks = []
    for step in range(200):
        source, target = rng.choice((a, b, c)), rng.choice((a, b, c))
        tensors[source].add_(step)
        values[source] += step
        copied = tensors[source].to(target, copy=True)
        checks.append((copied, values[source]))
        if rng.random() < 0.3:
            tensors[target] = copied.clone()
            values[target] = values[source]
    for copied, value in checks[::7]:
        assert copied.tolist() == [value] * 4


def test_copy_to_the_same_node_behaves_like_torch(three_nodes: Any) -> None:
    a = three_nodes[0]
    source = numbers(4).to(a)
    assert source.to(a) is source
    copied = source.to(a, copy=True)
    source.zero_()
    assert copied.tolist() == [0.0, 1.0, 2.0, 3.0]


DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_keeps_or_converts_the_dtype(three_nodes: Any, dtype: str) -> None:
    a, b, _ = three_nodes
    kind = getattr(torch, dtype)
    local = torch.tensor([[0, 1, 5], [1, 0, 2]]).to(kind)
    copied = local.to(a).to(b)
    assert copied.dtype == kind
    assert torch.equal(copied.cpu(), local)
    wide = torch.complex128 if kind.is_complex else torch.float64
    converted = local.to(a).to(b, wide)
    assert torch.equal(converted.cpu(), local.to(wide))


VIEWS: dict[str, Any] = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "row": lambda x: x[2],
    "expanded": lambda x: x[0].expand(4, 6),
    "overlapping": lambda x: x.as_strided((3, 3), (1, 1), 2),
    "zero-dimensional": lambda x: x[1, 1],
    "empty": lambda x: x[:, :0],
    "permuted": lambda x: x.reshape(2, 2, 6).permute(2, 0, 1),
    "flipped": lambda x: x.flip(0),
    "channels last": lambda x: x.reshape(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
def test_copy_of_a_view_has_torchs_strides_and_values(three_nodes: Any, view: str) -> None:
    a, b, _ = three_nodes
    local = numbers(24).reshape(4, 6)
    of_local, copied = VIEWS[view](local), VIEWS[view](local.to(a)).to(b)
    plain = torch.empty_like(of_local)  # a copy to another device has these strides
    assert copied.stride() == plain.stride()
    assert torch.equal(copied.cpu(), of_local)
    assert torch.equal((copied + 1).cpu(), of_local + 1)


def test_copy_of_a_conjugated_view_has_conjugated_values(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    local = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(local.to(a).conj().to(b).cpu(), local.conj())
    assert torch.equal((local.to(a).conj().to(b) * 1j).cpu(), local.conj() * 1j)


def test_copy_into_a_tensor_fills_views_converts_and_broadcasts(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    target = torch.zeros(3, 4, device=b)
    alias = target.view(12)
    returned = target[1].copy_(torch.arange(4, device=a))
    target[:, 0].copy_(torch.tensor(7.0, device=a))
    expected = torch.zeros(3, 4)
    expected[1].copy_(torch.arange(4))
    expected[:, 0] = 7
    assert returned.device == b
    assert torch.equal(target.cpu(), expected)
    assert torch.equal(alias.cpu(), expected.view(12))


def test_copy_into_another_node_keeps_values_despite_later_changes(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    source, target = numbers(ROW).to(a), torch.zeros(ROW, device=b)
    sums = []
    for _ in range(5):
        target.copy_(source, non_blocking=True)
        sums.append(target[:10].clone())
        source.mul_(2)
    for step, found in enumerate(sums):
        assert torch.equal(found.cpu(), numbers(10) * 2**step)


def test_copy_into_refuses_a_shape_that_does_not_broadcast(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    with pytest.raises(RuntimeError, match=r"size|shape|broadcast"):
        torch.zeros(3, device=b).copy_(torch.zeros(4, device=a))


def test_operation_on_two_nodes_is_refused(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    with pytest.raises(RuntimeError, match=r"remote:\d+"):
        torch.ones(2, device=a) + torch.ones(2, device=b)


def test_gradient_flows_back_over_copies(three_nodes: Any) -> None:
    a, b, c = three_nodes
    torch.manual_seed(0)
    x, w, v = torch.randn(5, 4), torch.randn(4, 3), torch.randn(3, 2)
    found = []
    for places in (("cpu",) * 3, (a, b, c)):
        leaves = [
            one.clone().to(place).requires_grad_() for one, place in zip((x, w, v), places, strict=True)
        ]
        hidden = (leaves[0].to(places[1]) @ leaves[1]).relu()
        loss = ((hidden.to(places[2]) @ leaves[2]) ** 2).mean().to(places[0])
        loss.backward()
        for leaf in leaves:
            assert leaf.grad.device == leaf.device
        found.append([loss.detach().cpu(), *[leaf.grad.cpu() for leaf in leaves]])
    assert all(map(torch.equal, *found))


def test_gradients_accumulate_over_copies_to_several_nodes(three_nodes: Any) -> None:
    a, b, c = three_nodes
    found = []
    for places in (("cpu",) * 3, (a, b, c)):
        w = numbers(6).to(places[0]).requires_grad_()
        for step in range(3):
            parts = [((w * step).to(place) ** 2).sum().to(places[0]) for place in places]
            torch.stack(parts).sum().backward()
        found.append(w.grad.cpu())
    assert torch.equal(*found)


def test_gradient_flows_through_a_copy_into_another_node(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    x = numbers(3).to(a).requires_grad_()
    target = torch.zeros(2, 3, device=b)
    target[1].copy_(x * 2)
    (target * numbers(6).reshape(2, 3).to(b)).sum().backward()
    assert x.grad.device == a
    assert x.grad.tolist() == [6.0, 8.0, 10.0]


def test_failed_source_fails_only_its_copy(three_nodes: Any) -> None:
    from flowchan.pipelines import RemoteError

    a, b, _ = three_nodes
    failed = torch.ones(3, 3, device=a)[torch.tensor([9, 9, 9], device=a)]
    copied, target, good = failed.to(b), torch.zeros(3, 3, device=b), torch.ones(3, device=a).to(b)
    target.copy_(failed)
    for one in (copied, copied + 1, target, target.view(9)):
        with pytest.raises(RemoteError, match="out of bounds") as caught:
            one.cpu()
        assert isinstance(caught.value.__cause__, IndexError)
    assert good.tolist() == [1.0] * 3
    assert torch.zeros(2, device=b).tolist() == [0.0, 0.0]


def test_copies_do_not_pass_through_the_program(three_nodes: Any) -> None:
    """The bytes that the program sends and receives do not grow with the size of the copies."""
    a, b, c = three_nodes
    source = torch.ones(4 * ROW, device=a)
    three_nodes.sync()
    before = traffic(three_nodes)
    copied = source
    for target in (b, c, a, b):
        copied = copied.to(target)
    assert copied.sum().item() == 4 * ROW
    assert traffic(three_nodes) - before < 100_000
    copied.cpu()
    assert traffic(three_nodes) - before >= 16 * ROW


def traffic(nodes: Any) -> int:
    """Return the number of bytes between the program and its nodes."""
    return sum(one.uploaded + one.downloaded for one in nodes.stats())


def test_copied_tensors_are_freed_on_both_nodes(three_nodes: Any) -> None:
    a, b, _ = three_nodes
    source = torch.ones(10, device=a)
    three_nodes.sync()
    before = [one.tensors for one in three_nodes.stats()]
    for _ in range(200):
        source.to(b).add_(1).to(a)
    three_nodes.sync()
    assert [one.tensors for one in three_nodes.stats()] == before
