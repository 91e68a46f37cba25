"""One attempt at the training run: build, restore, train to the last step, save, or raise.

Entered again from the top by each in-process restart; what outlives an attempt is in `Process`.
"""

import datetime
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from training import parallelism
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restorer import CheckpointError, Restored
from training.checkpoint.saver import Saver
from training.checkpoint.state import (
    Tensors,
    live_tensors,
    random_state_tensors,
    restore_random_state,
    seed_random_state,
)
from training.config import (
    DONE_MARKER,
    EXIT_NO_RESTART,
    NO_RESTART_MARKER,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from training.data import DataOrder, TokenizedCorpus
from training.events import EventLog
from training.faults import FaultInjector
from training.model import Llama, next_token_loss
from training.resilience import RankMonitor

# A poll of a save in flight takes microseconds; thousands of such lines would hide the stalls.
_STALL_WORTH_SECONDS = 0.001


@dataclass
class Process:
    """What lives as long as this process: identity, connections, staged checkpoints and their writer."""

    rank: int
    world_size: int
    cycle: int
    device: torch.device
    store: dist.Store
    events: EventLog
    monitor: RankMonitor
    saver: Saver
    ranks_per_node: int = 1


class Trainer:
    """State and steps of one attempt."""

    def __init__(self, config: TrainConfig, process: Process, *, ping: Callable[[], None]) -> None:
        self.config = config
        self.process = process
        mesh = parallelism.build_mesh(config.parallelism, world_size=process.world_size, device=process.device)
        self.model = parallelism.build_sharded_model(config, mesh=mesh, device=process.device)
        self.optimizer = _build_optimizer(self.model, config.optimizer)
        self.corpus = TokenizedCorpus(Path(config.data.path))
        self.corpus.check_fits(config.data, config.model)
        self.order = DataOrder(self.corpus.num_samples(config.seq_len), config.global_batch_size, config.seed)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            saver=process.saver,
            live=live_tensors(self.model, self.optimizer),
            moment=self._random_state,
            attempt=f"{process.cycle}-{process.events.iteration}",
            ranks_per_node=process.ranks_per_node,
            ping=ping,
        )
        self.faults = FaultInjector(
            config.faults, run_directory=Path(config.run_directory), rank=process.rank, events=process.events
        )
        self.last_loss: float | None = None

    def restore(self) -> Restored:
        """Bring back the newest step that every rank can restore. Collective."""
        restored = self.checkpointer.restore(lambda manifest: _check_identity(manifest, self.config.identity()))
        if restored.moment is not None:
            prefix = self._random_state_prefix
            restore_random_state({name.removeprefix(prefix): state for name, state in restored.moment.items()})
        self.last_loss = restored.manifest.get("loss")
        return restored

    def save(self, step: int) -> None:
        """Start the saves that are due after `step`; they copy while the next step runs. Collective."""
        manifest = {"loss": self.last_loss, "identity": self.config.identity()}
        self.checkpointer.save(step, manifest, last=step == self.config.total_steps)

    @property
    def _random_state_prefix(self) -> str:
        return f"random.rank{self.process.rank}."

    def _random_state(self) -> Tensors:
        state = random_state_tensors(self.process.device)
        return {self._random_state_prefix + name: tensor for name, tensor in state.items()}

    def train_step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns the fields of its `step` event. Collective."""
        config, process = self.config, self.process
        micro_batches = self.order.rank_sample_ids(step, process.rank, process.world_size, config.micro_batch_size)
        learning_rate = config.optimizer.learning_rate * schedule_ratio(config.schedule, step, config.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = torch.zeros((), device=process.device)
        for index, sample_ids in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            # FSDP2 reduces gradients on the last micro-batch only; the earlier ones accumulate on each rank.
            cast(FSDPModule, self.model).set_requires_gradient_sync(last)
            inputs, labels = self._batch(sample_ids)
            micro_loss = next_token_loss(self.model(inputs), labels) / len(micro_batches)
            if last:
                self.faults.strike(step)
            micro_loss.backward()
            loss += micro_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.max_grad_norm)
        self.checkpointer.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        self.last_loss = loss.item() / process.world_size
        return {
            "loss": self.last_loss,
            "grad_norm": (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
            "learning_rate": learning_rate,
            "sample_ids": [int(sample_id) for sample_ids in micro_batches for sample_id in sample_ids],
        }

    def _batch(self, sample_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.stack([self.corpus.tokens(int(sample_id), self.config.seq_len) for sample_id in sample_ids])
        batch = torch.from_numpy(tokens).to(self.process.device)
        return batch[:, :-1], batch[:, 1:]

    def params_sha256(self) -> str:
        """Hash of all parameters, whole, in the order of their names: equal states have equal hashes. Collective."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(parallelism.canonical_name(name).encode())
            digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def run_attempt(config: TrainConfig, process: Process, call_wrapper: CallWrapper | None) -> None:
    """Train from the newest checkpoint to the last step. The function that in-process restart enters again."""
    events, monitor = process.events, process.monitor
    # Tells the in-process layer's soft timeout that this rank makes progress.
    ping = call_wrapper.ping if call_wrapper is not None else lambda: None
    events.write("enter")
    monitor.connect()
    with monitor.section("setup"):
        try:
            trainer, start = _set_up(config, process, ping=ping)
        except (ValueError, CheckpointError) as error:  # what no restart can mend: settings, corpus, checkpoints
            _give_up(config, process, str(error))
    for step in range(start + 1, config.total_steps + 1):
        with monitor.section("step"):
            started_t = time.time()
            result = trainer.train_step(step)
            events.write("step", step=step, started_t=started_t, **result)
        if process.rank == 0:
            print(f"step {step}/{config.total_steps} loss {result['loss']:.4f}", flush=True)
        ping()
        monitor.heartbeat()
        with monitor.section("checkpointing"):
            try:
                _checkpoint(trainer, step)
            except CheckpointError as error:
                _give_up(config, process, str(error))
    _finish(trainer, already_complete=start == config.total_steps)


def _give_up(config: TrainConfig, process: Process, reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    process.events.write("refused", reason=reason)
    (Path(config.run_directory) / NO_RESTART_MARKER).write_text(reason + "\n")
    process.monitor.stop_job(reason)
    # Not an Exception: the in-process layer must not try again.
    raise SystemExit(EXIT_NO_RESTART)


def _set_up(config: TrainConfig, process: Process, *, ping: Callable[[], None]) -> tuple[Trainer, int]:
    events = process.events
    seed_random_state(config.seed, process.rank)
    parallelism.init_process_group(
        # A prefix of its own for each attempt: keys that a broken-off attempt left behind must not be read.
        dist.PrefixStore(f"attempt-{events.iteration}", process.store),
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        timeout=datetime.timedelta(seconds=config.restarts.collective_timeout_seconds),
    )
    events.write("process_group_ready")
    trainer = Trainer(config, process, ping=ping)
    events.write("model_ready")
    events.write("restore_start")
    restored = trainer.restore()
    events.write("restored", step=restored.step, tier=restored.tier or "none", damaged=restored.damaged)
    trainer.checkpointer.get_ready(restored)
    return trainer, restored.step


def _checkpoint(trainer: Trainer, step: int) -> None:
    """Take note of what became of the saves in flight, and start those that are due."""
    config, checkpointer = trainer.config.checkpoint, trainer.checkpointer
    last = step == trainer.config.total_steps
    saving = checkpointer.saving
    if saving is not None:
        overdue = config.commit_within_steps is not None and step - saving.step >= config.commit_within_steps
        with _stall(trainer, step, "finalize"):
            checkpointer.wait() if overdue else checkpointer.poll()
    else:
        checkpointer.poll()
    with _stall(trainer, step, "save"):
        trainer.save(step)
    if last:
        with _stall(trainer, step, "final_save"):
            checkpointer.wait()
    _record(trainer)


@contextmanager
def _stall(trainer: Trainer, step: int, phase: str) -> Iterator[None]:
    """Time that training waits for checkpoints; told when it is worth it."""
    started_t = time.time()
    yield
    if time.time() - started_t > _STALL_WORTH_SECONDS:
        trainer.process.events.write("stall", step=step, started_t=started_t, phase=phase)


def _record(trainer: Trainer) -> None:
    outcome, events = trainer.checkpointer.drain(), trainer.process.events
    if trainer.process.rank != 0:
        return
    for committed in outcome.committed:
        events.write("checkpoint_committed", **committed)
    for step in outcome.replicated:
        events.write("checkpoint_replicated", step=step)
    for failed in outcome.failed:
        events.write("save_failed", **failed)
        print(f"warning: checkpoint of step {failed['step']}: {failed['reason']}", file=sys.stderr, flush=True)


def _finish(trainer: Trainer, *, already_complete: bool) -> None:
    config, process = trainer.config, trainer.process
    if already_complete and process.rank == 0:
        print(f"step {config.total_steps} is the last one and is done already: nothing to train", flush=True)
    # Whole parameters pass through every rank here: affordable for the small models of a drill.
    digest = trainer.params_sha256() if config.deterministic else None
    process.events.write("complete", step=config.total_steps, loss=trainer.last_loss, params_sha256=digest)
    process.monitor.close()
    dist.barrier()
    if process.rank == 0:  # only now, with every rank through, may the supervisor report success
        (Path(config.run_directory) / DONE_MARKER).touch()
    dist.destroy_process_group()


def _build_optimizer(model: Llama, config: OptimizerConfig) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps)


def schedule_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate at 1-based `step` as a fraction of its peak: linear warm-up, then cosine to `min_ratio`.

    A pure function of the step, so there is no scheduler state to save or to lose.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def _check_identity(manifest: dict[str, Any], present: dict[str, Any]) -> None:
    saved = manifest["identity"]
    changed = [
        f"{key} (saved {saved.get(key)!r}, now {value!r})" for key, value in present.items() if saved.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"the checkpoint was made with other settings: {'; '.join(changed)}; "
            "restore them, or choose another checkpoint.directory"
        )
