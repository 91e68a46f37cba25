"""What a checkpoint holds: the live tensors of model and optimizer by name, and every generator's state."""

import math
import random

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

Tensors = dict[str, torch.Tensor]


def live_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Every parameter and optimizer tensor under its checkpoint name; the tensors themselves, not copies.

    Valid for as long as the model lives: FSDP2's shards and AdamW's moments are updated in place. Names are
    `model.<fully qualified name>` and `optimizer.state.<fully qualified name>.<exp_avg | exp_avg_sq | step>`. Learning
    rate and weight decay are no state: the trainer sets them from its settings and the step.
    """
    fresh = not optimizer.state
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if fresh:  # torch fills an empty optimizer by a step without learning rate, which it counts
        for tensors in optimizer.state.values():
            for tensor in tensors.values():
                tensor.zero_()
    named = {
        **{f"model.{name}": value for name, value in model_state.items()},
        **{f"optimizer.{name}": value for name, value in optimizer_state.items()},
    }
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def seed_random_state(seed: int, rank: int) -> None:
    """Seed python's, numpy's and torch's generators, each rank differently."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def random_state_tensors(device: torch.device) -> Tensors:
    """The state of every generator as tensors of fixed shape, so that DCP can load them in place."""
    version, words, gauss = random.getstate()
    assert version == 3, version
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937", name
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(key) for key in keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Tensors) -> None:
    """Put every generator back into the state that `random_state_tensors` took."""
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
