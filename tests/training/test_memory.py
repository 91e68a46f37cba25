"""Memory of one rank: the formula against the shards and states that FSDP and AdamW really make, without storage."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from training.config import TrainConfig
from training.memory import rank_memory_bytes
from training.optimizer import build_optimizer
from training.parallelism import build_mesh, meta_model, shard_model

CPU = torch.device("cpu")


def config(**parallelism) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run_name": "t",
            "model": "llama-3.1-8b",
            "run_directory": "/none",
            "data": {"path": "/none"},
            "total_steps": 10,
            "seq_len": 8192,
            "micro_batch_size": 1,
            "global_batch_size": 16,
            "parallelism": parallelism,
            "checkpoint": {"directory": "/none", "interval_steps": 1},
        }
    )


@pytest.fixture
def world(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)  # sends nothing
    yield request.param
    dist.destroy_process_group()


def local_bytes(tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def made_bytes(settings: TrainConfig, world_size: int) -> int:
    """Bytes of rank 0's shards, gradients and optimizer states, and of the parameters gathered at one time."""
    mesh = build_mesh(settings.parallelism, world_size=world_size, device=CPU)
    with FakeTensorMode():
        model = shard_model(meta_model(settings), settings.parallelism, mesh=mesh, device=CPU)
        model.to_empty(device=CPU)
        optimizer = build_optimizer(model, settings.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameters = list(model.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        sharded = sum(local_bytes(one) for one in (*parameters, *(p.grad for p in parameters), *states))
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
        gathered = sum(p.numel() for p in parameters) - sum(blocks) + sum(blocks[:2])
    return sharded + 2 * gathered


@pytest.mark.parametrize(("world", "parallelism"), [(8, {}), (16, {"dp_replicate": 2})], indirect=["world"])
def test_a_ranks_state_for_8b_over_8_shards_is_what_the_formula_says(world, parallelism):
    settings = config(**parallelism)
    assert made_bytes(settings, world) == pytest.approx(rank_memory_bytes(settings, world), rel=0.1)
    assert rank_memory_bytes(settings, world) / 2**30 == pytest.approx(17.7, abs=0.1)
