"""What torch's FSDP shards. Around a pipe, or around a model that holds one, it gathers the parameters for a
whole call and reduces their gradients once: that works where the parts are threads, which compute with the
module's own parameters. Within a pipe it would do so for each micro-batch, on threads of its own choice, and
gradients would be wrong.
"""

from __future__ import annotations

import sys

from torch import nn

MODULE = "torch.distributed.fsdp"


def refuse_sharded_layers(module: nn.Module) -> None:
    """``TypeError`` for layers that are sharded by themselves."""
    fsdp = sys.modules.get(MODULE)
    kinds = tuple(
        kind
        for kind in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None))
        if kind is not None
    )
    if not kinds:
        return
    if "_flat_param" in module._parameters:
        raise TypeError(
            "Sequential: FSDP has taken the parameters out of the layers, so a pipe does not see them; make "
            "it with use_orig_params=True"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, kinds):
            what = f"layer {name!r}" if name else "module"
            raise TypeError(
                f"Sequential: {what} is sharded by FSDP, which would gather its parameters and reduce their "
                "gradients for each micro-batch; shard the pipe as a whole: fully_shard(pipe)"
            )


def refuse_sharded(module: nn.Module, pipe: str, remedy: str) -> None:
    """``TypeError`` for parameters that FSDP around the pipe shards, where ``pipe`` can't have that."""
    if MODULE not in sys.modules:
        return
    for name, layer in module.named_modules():
        if _is_sharded(layer):
            whose = f"layer {name!r}" if name else "module"
            raise TypeError(
                f"Sequential: the parameters of {whose} are sharded by FSDP around the pipe, which {pipe} "
                f"does not see; {remedy}"
            )


def _is_sharded(layer: nn.Module) -> bool:
    """Whether FSDP of either version has the layer's parameters, gathered at this moment or not."""
    hooks = layer._state_dict_pre_hooks.values()
    return any(getattr(hook, "__module__", "").startswith(MODULE) for hook in hooks) or any(
        hasattr(tensor, "_local_tensor") or getattr(tensor._base, "_fsdp_flattened", False)
        for tensor in layer._parameters.values()
        if tensor is not None
    )
