"""What a checkpoint holds: the live tensors of model and optimizer by name."""

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
