"""AdamW over sharded parameters, and the norm of their gradients."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.config import OptimizerConfig


class NonFiniteGradientError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite; raised by every rank alike."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW that updates all parameters in one fused kernel. Matrices decay, 1-D parameters (norms) do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients down to a global norm of `max_norm`; returns the norm before. Collective.

    The norm is summed over all ranks, so one rank's infinity or NaN is every rank's: all of them see the same number
    and take the same branch after it.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
