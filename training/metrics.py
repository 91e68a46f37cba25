"""What is measured of each step: speed, share of the device's peak, memory, and where the time went.

FLOPs per token, forward and backward (recomputation does not count, so this is MFU, not HFU):

    6 x (parameters that multiply: all but the embedding table, which is looked up, unless it is tied to the head)
    + 6 x layers x hidden_size x seq_len     attention scores and their sum, causal: half of the full square's 12

MFU is that times tokens/s of a rank, over the device's dense bf16 peak (training.device).
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from training.config import ModelConfig, TrainConfig
from training.device import DeviceLimits

if TYPE_CHECKING:
    from training.step import StepResult


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of forward and backward per token of a sample of `seq_len` tokens."""
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return 6.0 * (model.num_parameters - looked_up) + 6.0 * model.num_hidden_layers * model.hidden_size * seq_len


def mfu(model: ModelConfig, seq_len: int, tokens_per_second_per_rank: float, limits: DeviceLimits) -> float | None:
    """Model FLOP/s as a fraction of the device's peak; None where the peak is not known."""
    if limits.peak_flops is None:
        return None
    return flops_per_token(model, seq_len) * tokens_per_second_per_rank / limits.peak_flops


@dataclass(frozen=True)
class StepMetrics:
    """Measurements of one step on rank 0; seconds, bytes, fractions. `step_seconds` is the sum of its four parts."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    skipped_steps: int
    tokens_per_second: float
    mfu: float | None
    memory_peak_bytes: int
    data_seconds: float
    forward_backward_seconds: float
    optimizer_seconds: float
    checkpoint_stall_seconds: float

    @property
    def step_seconds(self) -> float:
        """All of the step and the stall of the checkpoint after it."""
        return (
            self.data_seconds + self.forward_backward_seconds + self.optimizer_seconds + self.checkpoint_stall_seconds
        )

    def scalars(self) -> dict[str, float]:
        """Name and value of each measurement that there is, but the step's number."""
        values: dict[str, Any] = {**asdict(self), "step_seconds": self.step_seconds}
        return {name: float(value) for name, value in values.items() if name != "step" and value is not None}

    def line(self, total_steps: int) -> str:
        """The human line of one step."""
        shares = " ".join(
            f"{name} {100 * seconds / self.step_seconds:.0f}%"
            for name, seconds in (
                ("data", self.data_seconds),
                ("fwd+bwd", self.forward_backward_seconds),
                ("optimizer", self.optimizer_seconds),
                ("checkpoint", self.checkpoint_stall_seconds),
            )
        )
        parts = [
            f"step {self.step}/{total_steps}",
            f"loss {self.loss:.4f}",
            f"norm {self.grad_norm:.3g}",
            f"lr {self.learning_rate:.2e}",
            f"{self.tokens_per_second:,.0f} tok/s",
            *([] if self.mfu is None else [f"MFU {self.mfu:.1%}"]),
            f"{self.memory_peak_bytes / 2**30:.2f} GiB",
            f"{self.step_seconds:.3f} s ({shares})",
            *([f"skipped {self.skipped_steps}"] if self.skipped_steps else []),
        ]
        return "  ".join(parts)


def step_metrics(
    config: TrainConfig,
    result: "StepResult",
    *,
    step: int,
    world_size: int,
    limits: DeviceLimits,
    skipped_steps: int,
    memory_peak_bytes: int,
    checkpoint_stall_seconds: float,
) -> StepMetrics:
    """Measurements from a `training.step.StepResult` and the stall after it."""
    seconds = (
        result.data_seconds + result.forward_backward_seconds + result.optimizer_seconds + checkpoint_stall_seconds
    )
    tokens_per_second = config.global_batch_size * config.seq_len / seconds
    return StepMetrics(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        skipped_steps=skipped_steps,
        tokens_per_second=tokens_per_second,
        mfu=mfu(config.model, config.seq_len, tokens_per_second / world_size, limits),
        memory_peak_bytes=memory_peak_bytes,
        data_seconds=result.data_seconds,
        forward_backward_seconds=result.forward_backward_seconds,
        optimizer_seconds=result.optimizer_seconds,
        checkpoint_stall_seconds=checkpoint_stall_seconds,
    )
