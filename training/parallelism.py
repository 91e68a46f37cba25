"""FSDP2 over a DeviceMesh: process group, sharding, and parameters that are the same at every world size."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from training.config import ParallelismConfig, TrainConfig
from training.model import Llama, full_initial_value

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def init_process_group(
    store: dist.Store, *, rank: int, world_size: int, device: torch.device, timeout: datetime.timedelta
) -> None:
    """Create the default process group: NCCL for GPU tensors, gloo for CPU tensors.

    gloo is there on GPU hosts too: the checkpoint's small agreements go over it and never wait for the GPU stream.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def build_mesh(config: ParallelismConfig, *, world_size: int, device: torch.device) -> DeviceMesh:
    """One mesh dimension to shard over; with `dp_replicate` > 1 (HSDP) a replicated one around it."""
    if config.dp_replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    shape = (config.dp_replicate, world_size // config.dp_replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def build_sharded_model(config: TrainConfig, *, mesh: DeviceMesh, device: torch.device) -> Llama:
    """Build the model on the meta device, shard it, then fill each shard with its part of the initial value.

    Order matters: activation checkpointing wraps a block before it is sharded, and every block is sharded before
    the root, whose group takes what is left (embedding, final norm, head).
    """
    with torch.device("meta"):
        model = Llama(config.model)
    policy = _mixed_precision(config.parallelism)
    for index, block in enumerate(model.model.layers):
        if config.parallelism.activation_checkpointing == "full":
            block = checkpoint_wrapper(block)  # noqa: PLW2901
            model.model.layers[index] = block
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    _initialise(model, config)
    return model


def _mixed_precision(config: ParallelismConfig) -> MixedPrecisionPolicy:
    # Parameters stay fp32: the shards that the optimizer updates are the master state.
    param_dtype = None if config.param_dtype == "float32" else _DTYPES[config.param_dtype]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_DTYPES[config.reduce_dtype])


@torch.no_grad()
def _initialise(model: nn.Module, config: TrainConfig) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        value = full_initial_value(
            canonical_name(name), parameter.shape, config=config.model, seed=config.seed, device=parameter.device
        )
        # src_data_rank=None: every rank computed the same value and cuts out its own shard, nothing is sent.
        parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))


def canonical_name(name: str) -> str:
    """The Hugging Face name of a parameter, without the wrapper that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")
