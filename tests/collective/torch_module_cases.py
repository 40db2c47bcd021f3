"""Cases of ``torch_cases.py`` that train a module with DDP, FSDP, tensor parallelism or pipelining."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.nn.parallel import DistributedDataParallel
from torch_case_table import CASES, FOLDER, case, random_tensor, random_tensor_of

import flowchan.collective.torch.backend  # noqa: F401


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 5))


def trained(net: Any, steps: int = 4, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(
            net(random_tensor(16, 20, seed=step)), random_tensor(16, 5, seed=step + 50)
        )
        loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@case
def ddp() -> Any:
    return trained(DistributedDataParallel(model()))


@case
def ddp_in_small_buckets() -> Any:
    return trained(DistributedDataParallel(model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True))


@case
def ddp_static_graph() -> Any:
    return trained(DistributedDataParallel(model(), static_graph=True))


@case
def ddp_unused_parameters() -> Any:
    return trained(DistributedDataParallel(model(), find_unused_parameters=True))


@case
def ddp_no_sync() -> Any:
    net = DistributedDataParallel(model())
    with net.no_sync():
        net(random_tensor(16, 20)).sum().backward()
    net(random_tensor(16, 20, seed=1)).sum().backward()
    return [p.grad for p in net.parameters()]


@case
def ddp_join_with_uneven_inputs() -> Any:
    net = DistributedDataParallel(nn.Linear(20, 5))
    with net.join():
        for step in range(3 + rank()):
            net(random_tensor(4, 20, seed=step)).sum().backward()
    return [p.grad for p in net.parameters()]


@case
def ddp_join_divided_by_remaining_ranks() -> Any:
    """The C++ code of DDP waits for work objects that Python has already dropped."""
    net = DistributedDataParallel(nn.Linear(20, 5))
    with net.join(divide_by_initial_world_size=False):
        for step in range(1 + 2 * rank()):
            net.zero_grad()
            net(random_tensor(4, 20, seed=step)).sum().backward()
    return [p.grad for p in net.parameters()]


@case
def ddp_join_with_unused_parameters() -> Any:
    class Choice(nn.ModuleList):
        def forward(self, x: torch.Tensor, which: int) -> Any:
            return self[which](x)

    torch.manual_seed(0)
    net = DistributedDataParallel(Choice(nn.Linear(20, 5) for _ in range(2)), find_unused_parameters=True)
    with net.join():
        for step in range(2 + rank()):
            net(random_tensor(4, 20, seed=step), step % 2).sum().backward()
    return [p.grad for p in net.parameters()]


@case
def ddp_with_zero_redundancy_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    found = trained(net, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=1)
    return found, [
        one["exp_avg"] for one in optimizer.state_dict()["state"].values()
    ] if rank() == 1 else None


@case
def ddp_with_halved_gradients() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained(net)


@case
def ddp_with_power_sgd() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(net)


@case
def fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        net = FullyShardedDataParallel(
            model(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
        )
        trained(net)
        with FullyShardedDataParallel.summon_full_params(net):
            found.append([p.detach().clone() for p in net.parameters()])
    return found


def fsdp2(net: Any = None, **policy: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = net or model()
    fully_shard(net, mesh=init_device_mesh("cpu", (size(),)), **policy)
    return [p.full_tensor() for p in trained(net)]  # type: ignore[attr-defined]


def fsdp2_in_halves() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    return fsdp2(model()[::3], mp_policy=policy)  # FSDP2's gradient norm requires float32


@case
def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    mesh = init_device_mesh("cpu", (size(),))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return [
        net.to(dtype)(random_tensor_of(0, 8, 20).to(dtype)).detach()
        for dtype in (torch.float32, torch.bfloat16)
    ]


@case
def tensor_parallel_of_sequences() -> Any:
    """Train an embedding, norms and a loss that are sharded along sequences and classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 8))
    plan = {
        "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": tp.SequenceParallel(),
        "2": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "3": tp.ColwiseParallel(use_local_output=False),
    }
    tp.parallelize_module(net, init_device_mesh("cpu", (size(),)), plan)
    words = torch.arange(24).reshape(4, 6)
    with tp.loss_parallel():
        loss = nn.functional.cross_entropy(net(words).flatten(0, 1), words.flatten() % 8)
        loss.backward()
    return [loss.full_tensor().detach(), *(p.grad.full_tensor() for p in net.parameters())]


@case
def pipelining() -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    found = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        whole = [nn.Linear(20, 30), nn.Linear(30, 5)]
        part = whole[rank()] if rank() < len(whole) else nn.Identity()
        stage = PipelineStage(part, rank(), size(), torch.device("cpu"))
        steps = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        arguments = (random_tensor_of(0, 8, 20),) if rank() == 0 else ()
        steps.step(*arguments, target=random_tensor_of(1, 8, 5), losses=losses)
        found.append([*(p.grad for p in part.parameters()), *(loss.detach() for loss in losses)])
    return found


@case
def checkpoints() -> Any:
    """Save sharded tensors, synchronously and asynchronously, and load them with a different sharding."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    whole = random_tensor_of(0, 10, 6)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=f"{FOLDER[0]}.now")
    dcp.async_save(state, checkpoint_id=f"{FOLDER[0]}.later").result()
    found = []
    for when, placement in (("now", Shard(1)), ("later", Replicate())):
        empty = {"w": distribute_tensor(torch.zeros(10, 6), mesh, [placement]), "step": torch.tensor(0)}
        dcp.load(empty, checkpoint_id=f"{FOLDER[0]}.{when}")
        assert torch.equal(empty["w"].full_tensor(), whole)
        found.append((empty["w"].to_local(), empty["step"]))
    return found


@case
def state_of_rank_0() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    net = model()
    state = {name: x + 1 for name, x in net.state_dict().items()} if rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state, options=options)
    return list(net.state_dict().values())


@case
def compiled() -> Any:
    """Compile a function whose graph includes collectives."""
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> Any:
        parts = functional.all_gather_tensor(x * 2, 0, group)
        mean = functional.all_reduce(x + 1, "sum", group) / size()
        part = functional.reduce_scatter_tensor(parts, "sum", 0, group)
        swapped = functional.all_to_all_single(parts, None, None, group)
        y = x.clone()
        dist.all_reduce(y)
        return parts.sum(0), mean, part, swapped + 1, y

    return step(random_tensor(6, 3))


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
CASES |= {"fsdp2": fsdp2} if VERSION >= (2, 6) else {}  # earlier versions require CUDA
# earlier versions of gloo compute a sum instead of a mean
CASES |= {"fsdp2_in_halves": fsdp2_in_halves} if VERSION >= (2, 13) else {}
