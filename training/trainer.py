"""One attempt at the training run: build, restore, train to the last step, save, or raise.

Entered again from the top by each in-process restart; what outlives an attempt is in `Process`.
"""

import datetime
import hashlib
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from training import parallelism
from training.checkpoint.durable import CheckpointError, Committed, DurableCheckpointer
from training.checkpoint.writer import BackgroundWriter
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

_STATE_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Process:
    """What lives as long as this process: identity, connections, the checkpoint writer."""

    rank: int
    world_size: int
    cycle: int
    device: torch.device
    store: dist.Store
    events: EventLog
    monitor: RankMonitor
    writer: BackgroundWriter


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
        self.checkpointer = DurableCheckpointer(
            config.checkpoint,
            writer=process.writer,
            attempt=f"{process.cycle}-{process.events.iteration}",
            ping=ping,
        )
        self.faults = FaultInjector(
            config.faults, run_directory=Path(config.run_directory), rank=process.rank, events=process.events
        )
        self.last_loss: float | None = None
        self.saved_step = 0

    def restore(self) -> int:
        """Load the newest committed checkpoint; returns its step, 0 for a fresh start. Collective."""
        manifest = self.checkpointer.newest()
        if manifest is None:
            return 0
        _check_identity(manifest["identity"], self.config.identity())
        state = self._state()
        if manifest["world_size"] != self.process.world_size:
            del state["random"]  # kept per rank: it belongs to a world of that size
        self.checkpointer.load(state, step=manifest["step"])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_STATE_OPTIONS,
        )
        if "random" in state:
            restore_random_state(state["random"][f"rank{self.process.rank}"])
        self.last_loss = manifest["loss"]
        return manifest["step"]

    def save(self, step: int) -> None:
        """Start a durable save of the state after `step`. Collective; blocks for staging only."""
        manifest = {"world_size": self.process.world_size, "loss": self.last_loss, "identity": self.config.identity()}
        self.checkpointer.save(self._state(), step=step, manifest=manifest)
        self.saved_step = step

    def _state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer, options=_STATE_OPTIONS)
        random_state = random_state_tensors(self.process.device)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "random": {f"rank{self.process.rank}": random_state},
        }

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
            _checkpoint(trainer, step)
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
    start = trainer.restore()
    events.write("restored", step=start, tier="durable" if start else "none")
    # Only now: loading the writer's libraries takes seconds of CPU, which the way back to training needs first.
    process.writer.get_ready()
    return trainer, start


def _checkpoint(trainer: Trainer, step: int) -> None:
    config, events = trainer.config, trainer.process.events
    last = step == config.total_steps
    if trainer.checkpointer.saving:
        started_t = time.time()
        overdue = config.checkpoint.commit_within_steps
        must_wait = overdue is not None and step - trainer.saved_step >= overdue
        committed = trainer.checkpointer.wait() if must_wait else trainer.checkpointer.poll()
        events.write("stall", step=step, started_t=started_t, phase="finalize")
        _record(trainer, committed)
    if step % config.checkpoint.interval_steps == 0 or last:
        started_t = time.time()
        _record(trainer, trainer.checkpointer.wait())
        trainer.save(step)
        events.write("stall", step=step, started_t=started_t, phase="save")
    if last:
        started_t = time.time()
        _record(trainer, trainer.checkpointer.wait())
        events.write("stall", step=step, started_t=started_t, phase="final_save")


def _record(trainer: Trainer, committed: Committed | None) -> None:
    if committed is not None and trainer.process.rank == 0:
        trainer.process.events.write("checkpoint_committed", **vars(committed))


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


def _check_identity(saved: dict[str, Any], present: dict[str, Any]) -> None:
    changed = [
        f"{key} (saved {saved.get(key)!r}, now {value!r})" for key, value in present.items() if saved.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"the checkpoint was made with other settings: {'; '.join(changed)}; "
            "restore them, or choose another checkpoint.directory"
        )


def seed_random_state(seed: int, rank: int) -> None:
    """Seed python's, numpy's and torch's generators, each rank differently."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def random_state_tensors(device: torch.device) -> dict[str, torch.Tensor]:
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


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put every generator back into the state that `random_state_tensors` took."""
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
