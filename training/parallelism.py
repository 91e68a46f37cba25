"""FSDP2 over a DeviceMesh: process group, sharding, and parameters that are the same at every world size."""

import datetime
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from training import device as devices
from training.config import ParallelismConfig, TrainConfig
from training.model import Llama, full_initial_value

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What selective activation checkpointing keeps: nearly all of a block's work. Norms, rotations and SwiGLU's product,
# cheap but large, are computed again. Names, since not every build of torch has every kernel.
_KEPT_OPERATIONS = (
    "mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def init_process_group(
    store: dist.Store, *, rank: int, world_size: int, device: torch.device, timeout: datetime.timedelta
) -> None:
    """Create the default process group."""
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout)


def build_mesh(config: ParallelismConfig, *, world_size: int, device: torch.device) -> DeviceMesh:
    """One mesh dimension to shard over; with `dp_replicate` > 1 (HSDP) a replicated one around it."""
    if config.dp_replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    shape = (config.dp_replicate, world_size // config.dp_replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def build_sharded_model(config: TrainConfig, *, mesh: DeviceMesh, device: torch.device) -> Llama:
    """Build the model on the meta device, shard it, then fill each shard with its part of the initial value.

    No rank ever holds more of it than its shards and one whole parameter.
    """
    model = shard_model(meta_model(config), config.parallelism, mesh=mesh, device=device)
    model.to_empty(device=device)
    _initialise(model, config)
    return model


def meta_model(config: TrainConfig) -> Llama:
    """The model without storage."""
    with torch.device("meta"):
        return Llama(config.model, loss_chunk_tokens=config.parallelism.loss_chunk_tokens)


def shard_model(model: Llama, config: ParallelismConfig, *, mesh: DeviceMesh, device: torch.device) -> Llama:
    """Prepare each block, then shard it, then the root. In place; the model may still be on the meta device.

    Order matters. float8 replaces a block's linear layers, so it comes first. Activation checkpointing wraps the block,
    and compile takes the wrapped one, so that the compiler sees what is recomputed. fully_shard comes last: its hooks,
    which gather and free parameters, run around the compiled code. Every block is sharded before the root, whose
    group takes what is left (embedding, final norm, head).
    """
    check_device(config, device)
    policy = _mixed_precision(config)
    for index, block in enumerate(model.model.layers):
        if config.float8 is not None:
            _convert_to_float8(block, config.float8)
        block = _checkpointed(block, config)  # noqa: PLW2901
        model.model.layers[index] = block
        if config.compile is not None:
            block.compile(backend=config.compile)  # in place: names of parameters stay as they are
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def check_device(config: ParallelismConfig, device: torch.device) -> None:
    """Raise ValueError for settings that this device, or what is installed here, can't serve."""
    if config.float8 is not None:
        devices.check_float8(device)
    if config.compile == "inductor":
        devices.check_compiler(device)


def _mixed_precision(config: ParallelismConfig) -> MixedPrecisionPolicy:
    # Parameters stay fp32: the shards that the optimizer updates are the master state. Inputs are not cast: token ids
    # are integers, the embedding's result has param_dtype already, and the rotary tables must stay fp32.
    param_dtype = None if config.param_dtype == "float32" else _DTYPES[config.param_dtype]
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=_DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )


def _checkpointed(block: nn.Module, config: ParallelismConfig) -> nn.Module:
    match config.activation_checkpointing:
        case "none":
            return block
        case "full":
            return checkpoint_wrapper(block)
        case "selective":
            kept = [getattr(torch.ops.aten, name).default for name in _KEPT_OPERATIONS if hasattr(torch.ops.aten, name)]
            return checkpoint_wrapper(block, context_fn=partial(create_selective_checkpoint_contexts, kept))


def _convert_to_float8(block: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))


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
