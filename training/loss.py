"""Next-token cross entropy: the mean over all positions, whole or in chunks of the sequence."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats, a scalar in fp32.

    `logits` [batch, seq, vocab]; `labels` [batch, seq] int64, already shifted: `labels[:, t]` is the token that
    follows position t. Every position counts.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def chunked_next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int) -> Tensor:
    """`next_token_loss(hidden @ weight.T, labels)`, with the logits of `chunk_tokens` positions at one time.

    The logits of a Llama 3 sample of 8192 tokens are 4 GiB in fp32, and as much again for their gradient. Here a
    chunk's gradient is taken at once, and its logits are gone before the next chunk's are made.

    Args:
        hidden: [batch, seq, hidden], the input of the last projection.
        weight: [vocab, hidden].
        labels: [batch, seq] int64, already shifted.
        chunk_tokens: positions per chunk; the last one may be shorter.
    """
    arguments = (hidden.flatten(0, 1), weight, labels.flatten(), chunk_tokens)
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(*arguments)
    return token_losses(*arguments).mean()


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Cross entropy of each token [tokens] in fp32, of `hidden` [tokens, hidden] and `labels` [tokens]."""
    size = chunk_tokens or len(labels)
    return torch.cat(
        [
            F.cross_entropy(F.linear(rows, weight).float(), wanted, reduction="none")
            for rows, wanted in zip(hidden.split(size), labels.split(size), strict=True)
        ]
    )


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them. The weight's is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        start = 0
        for rows, wanted in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            log_odds = F.log_softmax(F.linear(rows, weight).float(), dim=-1)
            total -= log_odds.gather(1, wanted[:, None]).sum()
            # d loss / d logits is softmax minus one-hot, over the number of positions.
            logits_grad = log_odds.exp_()
            logits_grad.scatter_add_(1, wanted[:, None], logits_grad.new_full((len(wanted), 1), -1.0))
            logits_grad = (logits_grad / len(labels)).to(weight.dtype)
            torch.mm(logits_grad, weight, out=hidden_grad[start : start + len(rows)])
            weight_grad += logits_grad.T @ rows
            start += len(rows)
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return total / len(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_grad, weight_grad = ctx.saved_tensors
        (scale,) = grad_outputs
        return hidden_grad * scale.to(hidden_grad.dtype), weight_grad * scale.to(weight_grad.dtype), None, None
