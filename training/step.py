"""One optimizer step: forward, backward, clipping, update; with what it took and what all ranks agreed on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from training.config import TrainConfig
from training.config_faults import Moment
from training.model import Llama
from training.optimizer import NonFiniteGradientError, clip_gradients
from training.schedule import schedule_ratio
from training.stopping import StopReason

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class StepResult:
    """What one step gave, and the seconds that its parts took on this rank.

    `stop` is why training has to end after this step, if it has to; the same on every rank.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    stop: StopReason | None
    data_seconds: float
    forward_backward_seconds: float
    optimizer_seconds: float


class TrainStep:
    """Runs optimizer steps. Every call is collective.

    `skipped_steps` counts those without an update because a gradient was not finite, `skipped_in_a_row` the latest.
    """

    def __init__(
        self, config: TrainConfig, model: Llama, optimizer: torch.optim.Optimizer, *, end_of_document: int
    ) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._end_of_document = end_of_document if config.data.mask_documents else None
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def __call__(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        load: Callable[[Batch], torch.Tensor],
        *,
        at: Callable[[Moment], None] = lambda _: None,
        before_update: Callable[[], None] = lambda: None,
        stop: StopReason | None = None,
    ) -> StepResult:
        """Train on `micro_batches`, each loaded as [micro_batch_size, seq_len + 1] token ids on the model's device.

        Args:
            step: 1-based number of this step; it decides the learning rate.
            micro_batches: at least one.
            load: makes a micro-batch's tokens; timed as data loading.
            at: called at each moment of the last micro-batch (fault injection).
            before_update: called before the parameters change (a checkpoint may still be copying them).
            stop: why this rank wants to end; one rank's wish is every rank's.

        Raises:
            NonFiniteGradientError: more than optimizer.max_skipped_steps in a row had no finite gradient.
        """
        started = time.perf_counter()
        data_seconds, loss = 0.0, torch.zeros(())
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            reached = at if last else _pass_by
            reached(Moment.DATA)
            load_started = time.perf_counter()
            tokens = load(micro_batch)
            data_seconds += time.perf_counter() - load_started
            # FSDP2 reduces gradients on the last micro-batch only; the earlier ones accumulate on each rank.
            cast(FSDPModule, self._model).set_requires_gradient_sync(last)
            reached(Moment.FORWARD)
            micro_loss = self._model(tokens[:, :-1], tokens[:, 1:], end_of_document=self._end_of_document)
            reached(Moment.BACKWARD)
            (micro_loss / len(micro_batches)).backward()
            loss = loss.to(micro_loss.device) + micro_loss.detach() / len(micro_batches)
        at(Moment.OPTIMIZER)
        # Reading the norm waits for the GPU, so the time up to here is that of forward and backward on a GPU too.
        norm = clip_gradients(self._model, self._config.optimizer.max_grad_norm)
        computed = time.perf_counter()
        before_update()
        learning_rate = self._update(step, norm)
        mean_loss, agreed_stop = _agree(loss, stop)
        return StepResult(
            loss=mean_loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            skipped=self.skipped_in_a_row > 0,
            stop=agreed_stop,
            data_seconds=data_seconds,
            forward_backward_seconds=computed - started - data_seconds,
            optimizer_seconds=time.perf_counter() - computed,
        )

    def _update(self, step: int, norm: float) -> float:
        config = self._config
        learning_rate = config.optimizer.learning_rate * schedule_ratio(config.schedule, step, config.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if norm < float("inf"):  # false for NaN too
            self._optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        self._optimizer.zero_grad()
        if self.skipped_in_a_row > config.optimizer.max_skipped_steps:
            raise NonFiniteGradientError(
                f"step {step}: the gradient was not finite {self.skipped_in_a_row} times in a row "
                f"(optimizer.max_skipped_steps {config.optimizer.max_skipped_steps}); "
                "lower optimizer.learning_rate, look at the data of these steps, or raise max_skipped_steps"
            )
        return learning_rate


def _pass_by(_: Moment) -> None:
    pass


def _agree(loss: torch.Tensor, stop: StopReason | None) -> tuple[float, StopReason | None]:
    """The mean loss over ranks, and whether any rank has to stop, in one reduction. Collective."""
    wishes = [float(stop is reason) for reason in StopReason]
    summed = torch.cat([loss[None], torch.tensor(wishes, device=loss.device)])
    dist.all_reduce(summed)
    total, *wished = summed.tolist()
    agreed = next((reason for reason, ranks in zip(StopReason, wished, strict=True) if ranks), None)
    return total / dist.get_world_size(), agreed
