"""One attempt at the training run: build, restore, train to the last step, save, or raise.

Entered again from the top by each in-process restart; what outlives an attempt is in `Process`.
"""

import datetime
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper
from torch.distributed.tensor import DTensor

from training import device as devices
from training import parallelism
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restorer import CheckpointError, Restored
from training.checkpoint.saver import Saver
from training.checkpoint.state import Tensors, live_tensors
from training.config import DONE_MARKER, EXIT_NO_RESTART, EXIT_OK, EXIT_SIGTERM, NO_RESTART_MARKER, TrainConfig
from training.config_faults import Moment
from training.data import DataOrder, TokenizedCorpus
from training.evaluation import Evaluation
from training.events import EventLog
from training.faults import FaultInjector, Targets
from training.metric_sinks import MetricSinks
from training.metrics import step_metrics
from training.optimizer import NonFiniteGradientError, build_optimizer
from training.profiling import ProfilerWindow, StragglerDetection
from training.random_state import random_state_tensors, restore_random_state, seed_random_state
from training.resilience import RankMonitor
from training.resume import check_continues, describe_run
from training.step import StepResult, TrainStep
from training.stopping import StopReason, StopRequest

# A poll of a save in flight takes microseconds; thousands of such lines would hide the stalls.
_STALL_WORTH_SECONDS = 0.001


@dataclass
class Process:
    """What lives as long as this process: identity, connections, staged checkpoints, their writer, the wish to stop."""

    rank: int
    world_size: int
    cycle: int
    device: torch.device
    store: dist.Store
    events: EventLog
    monitor: RankMonitor
    faults: FaultInjector
    saver: Saver
    stop: StopRequest
    ranks_per_node: int = 1


def run_attempt(config: TrainConfig, process: Process, call_wrapper: CallWrapper | None) -> int:
    """Train from the newest checkpoint to the last step; returns the exit code. In-process restart enters it again."""
    # Tells the in-process layer's soft timeout that this rank makes progress.
    ping = call_wrapper.ping if call_wrapper is not None else lambda: None
    process.events.write("enter")
    process.monitor.connect()
    with ExitStack() as attempt:  # closes on the way to a restart too: ports and NVRx's detector are one per process
        with process.monitor.section("setup"):
            try:
                trainer, start = _set_up(config, process, attempt, ping=ping)
            except (ValueError, CheckpointError) as error:  # what no restart can mend: settings, corpus, checkpoints
                _give_up(config, process, str(error))
        stop = _train(trainer, start, ping=ping)
    if stop is None:
        _finish(trainer, already_complete=start == config.total_steps)
        return EXIT_OK
    return _leave(trainer, stop)


def _train(trainer: "Trainer", start: int, *, ping: Callable[[], None]) -> StopReason | None:
    """All steps after `start`; returns why it ended early, None at the last step."""
    config, process = trainer.config, trainer.process
    for step in range(start + 1, config.total_steps + 1):
        with process.monitor.section("step"):
            try:
                result = _step(trainer, step)
            except NonFiniteGradientError as error:  # the same data would give the same gradient after a restart
                _give_up(config, process, str(error))
        ping()
        process.monitor.heartbeat()
        stop = result.stop if step < config.total_steps else None
        with process.monitor.section("checkpointing"):
            try:
                stalled = _checkpoint(trainer, step, must_save=stop is not None)
            except CheckpointError as error:
                _give_up(config, process, str(error))
        trainer.report(step, result, checkpoint_stall_seconds=stalled)
        if stop is not None:
            return stop
        if trainer.evaluation_due(step):
            with process.monitor.section("evaluation"):
                trainer.evaluate(step)
            ping()
    return None


def _step(trainer: "Trainer", step: int) -> StepResult:
    started_t = time.time()
    trainer.profiler.begin(step)
    with trainer.stragglers.section():
        result, sample_ids = trainer.train_step(step)
    trainer.process.events.write(
        "step",
        step=step,
        started_t=started_t,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        skipped=result.skipped,
        data_s=result.data_seconds,
        forward_backward_s=result.forward_backward_seconds,
        optimizer_s=result.optimizer_seconds,
        sample_ids=sample_ids,
    )
    trainer.profiler.end(step)
    return result


class Trainer:
    """State and steps of one attempt."""

    def __init__(self, config: TrainConfig, process: Process, *, ping: Callable[[], None]) -> None:
        self.config = config
        self.process = process
        self.mesh = parallelism.build_mesh(config.parallelism, world_size=process.world_size, device=process.device)
        self.model = parallelism.build_sharded_model(config, mesh=self.mesh, device=process.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.corpus = TokenizedCorpus(Path(config.data.path))
        self.corpus.check_fits(config.data, config.model)
        self.order = DataOrder(self.corpus.num_samples(config.seq_len), config.global_batch_size, config.seed)
        self.step = TrainStep(config, self.model, self.optimizer, end_of_document=self.corpus.index.end_of_document)
        self.evaluation = None if config.evaluation is None else Evaluation(config, config.evaluation)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            saver=process.saver,
            live=live_tensors(self.model, self.optimizer),
            moment=self._random_state,
            attempt=f"{process.cycle}-{process.events.iteration}",
            ranks_per_node=process.ranks_per_node,
            ping=ping,
            on_commit=lambda step: process.faults.at(Moment.COMMIT, step),
        )
        self.faults = process.faults
        self.faults.targets = Targets(self.model, process.saver, Path(config.checkpoint.directory))
        self.profiler = ProfilerWindow(
            config.metrics.profiler, run_directory=Path(config.run_directory), rank=process.rank
        )
        self.limits = devices.limits(process.device)
        self.last_step = 0
        self.last_loss: float | None = None

    def open_reports(self, start_step: int, attempt: ExitStack) -> None:
        """Open what must be closed when the attempt ends."""
        config, process = self.config, self.process
        self.sinks = attempt.enter_context(MetricSinks(config, rank=process.rank, start_step=start_step))
        self.stragglers = attempt.enter_context(
            StragglerDetection(config.metrics.straggler_interval_seconds, device=process.device)
        )

    def restore(self) -> Restored:
        """Bring back the newest step that every rank can restore. Collective."""
        changes: list[str] = []

        def check(manifest: dict[str, Any]) -> None:
            changes[:] = check_continues(manifest, self.config, corpus=self.corpus.fingerprint)

        restored = self.checkpointer.restore(check)
        if restored.moment is not None:
            prefix = self._random_state_prefix
            restore_random_state({name.removeprefix(prefix): state for name, state in restored.moment.items()})
        manifest = restored.manifest
        if manifest:
            self.last_step, self.last_loss = restored.step, manifest["loss"]
            self.step.skipped_steps = manifest["skipped_steps"]
            self.step.skipped_in_a_row = manifest["skipped_in_a_row"]
            if manifest["world_size"] != self.process.world_size:
                changes.append(f"world size: {manifest['world_size']} in the checkpoint, now {self.process.world_size}")
            self._tell_changes(changes)
        return restored

    def _tell_changes(self, changes: list[str]) -> None:
        if changes and self.process.rank == 0:
            self.process.events.write("settings_changed", changes=changes)
            for change in changes:
                print(f"resumed with another {change}", flush=True)

    def save(self, step: int, *, last: bool) -> None:
        """Start the saves that are due after `step`; they copy while the next step runs. Collective."""
        manifest = {
            "loss": self.last_loss,
            "mesh_shape": list(self.mesh.shape),
            "skipped_steps": self.step.skipped_steps,
            "skipped_in_a_row": self.step.skipped_in_a_row,
            **describe_run(self.config, corpus=self.corpus.fingerprint),
        }
        self.checkpointer.save(step, manifest, last=last)

    @property
    def _random_state_prefix(self) -> str:
        return f"random.rank{self.process.rank}."

    def _random_state(self) -> Tensors:
        state = random_state_tensors(self.process.device)
        return {self._random_state_prefix + name: tensor for name, tensor in state.items()}

    def train_step(self, step: int) -> tuple[StepResult, list[int]]:
        """One optimizer step; returns its result and this rank's sample ids. Collective."""
        config, process = self.config, self.process
        micro_batches = self.order.rank_sample_ids(step, process.rank, process.world_size, config.micro_batch_size)
        result = self.step(
            step,
            micro_batches,
            self._load,
            at=lambda moment: self.faults.at(moment, step),
            before_update=self.checkpointer.before_update,
            stop=process.stop.reason,
        )
        self.last_step, self.last_loss = step, result.loss
        return result, [int(sample_id) for sample_ids in micro_batches for sample_id in sample_ids]

    def _load(self, sample_ids: Any) -> torch.Tensor:
        tokens = np.stack([self.corpus.tokens(int(sample_id), self.config.seq_len) for sample_id in sample_ids])
        return torch.from_numpy(tokens).to(self.process.device)

    def report(self, step: int, result: StepResult, *, checkpoint_stall_seconds: float) -> None:
        """Hand the measurements of `step` to the sinks, and look for stragglers when it is time. Collective."""
        slow = self.stragglers.report()
        if slow is not None and self.process.rank == 0:
            self.process.events.write("stragglers", step=step, ranks=slow)
        if self.process.rank != 0:
            return
        metrics = step_metrics(
            self.config,
            result,
            step=step,
            world_size=self.process.world_size,
            limits=self.limits,
            skipped_steps=self.step.skipped_steps,
            memory_peak_bytes=devices.memory_peak_bytes(self.process.device),
            checkpoint_stall_seconds=checkpoint_stall_seconds,
        )
        self.sinks.write_step(metrics)

    def evaluation_due(self, step: int) -> bool:
        """Whether validation follows `step`."""
        settings = self.config.evaluation
        return settings is not None and (step % settings.interval_steps == 0 or step == self.config.total_steps)

    def evaluate(self, step: int) -> None:
        """Measure the validation loss. Collective."""
        assert self.evaluation is not None
        started_t = time.time()
        self.faults.at(Moment.EVALUATION, step)
        loss = self.evaluation.loss(self.model, device=self.process.device)
        self.process.events.write("evaluation", step=step, started_t=started_t, loss=loss)
        self.sinks.write_evaluation(loss, step)

    def params_sha256(self) -> str:
        """Hash of all parameters, whole, in the order of their names: equal states have equal hashes. Collective."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(parallelism.canonical_name(name).encode())
            digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _give_up(config: TrainConfig, process: Process, reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    process.events.write("refused", reason=reason)
    (Path(config.run_directory) / NO_RESTART_MARKER).write_text(reason + "\n")
    process.monitor.stop_job(reason)
    # Not an Exception: the in-process layer must not try again.
    raise SystemExit(EXIT_NO_RESTART)


def _set_up(
    config: TrainConfig, process: Process, attempt: ExitStack, *, ping: Callable[[], None]
) -> tuple[Trainer, int]:
    events = process.events
    seed_random_state(config.seed, process.rank)
    process.faults.at(Moment.PROCESS_GROUP)
    parallelism.init_process_group(
        # A prefix of its own for each attempt: keys that a broken-off attempt left behind must not be read.
        dist.PrefixStore(f"attempt-{events.iteration}", process.store),
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        timeout=datetime.timedelta(seconds=config.restarts.collective_timeout_seconds),
    )
    events.write("process_group_ready")
    _check_deadline(config, process)
    process.faults.at(Moment.MODEL)
    trainer = Trainer(config, process, ping=ping)
    events.write("model_ready")
    events.write("restore_start")
    process.faults.at(Moment.RESTORE)
    restored = trainer.restore()
    events.write("restored", step=restored.step, tier=restored.tier or "none", damaged=restored.damaged)
    trainer.open_reports(restored.step, attempt)
    # A finished run saves nothing any more, unless its last step is in memory only.
    if restored.step < config.total_steps or restored.tier == "memory":
        trainer.checkpointer.get_ready(restored, last=restored.step == config.total_steps)
    return trainer, restored.step


def _check_deadline(config: TrainConfig, process: Process) -> None:
    answer = [process.stop.past_deadline]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))  # one clock decides for all
    if answer[0]:
        raise ValueError(
            f"stop_at {config.stop_at} is past or less than stop_margin_seconds {config.stop_margin_seconds:g} away; "
            "set a later one to go on"
        )


def _checkpoint(trainer: Trainer, step: int, *, must_save: bool) -> float:
    """Take note of saves in flight, start those that are due; returns the seconds for which training waited."""
    config, checkpointer, began = trainer.config.checkpoint, trainer.checkpointer, time.perf_counter()
    last = step == trainer.config.total_steps or must_save
    saving = checkpointer.saving
    if saving is not None:
        overdue = config.commit_within_steps is not None and step - saving.step >= config.commit_within_steps
        with _stall(trainer, step, "finalize"):
            checkpointer.wait() if overdue else checkpointer.poll()
    else:
        checkpointer.poll()
    with _stall(trainer, step, "save"):
        trainer.save(step, last=last)
    _strike_while_saving(trainer, step)
    if last:
        trainer.faults.at(Moment.FINAL_SAVE, step)
        with _stall(trainer, step, "final_save"):
            checkpointer.wait()
    _record(trainer)
    return time.perf_counter() - began


def _strike_while_saving(trainer: Trainer, step: int) -> None:
    """The moments of a save, if it has one: the copy runs; the copy is done and the worker writes."""
    trainer.faults.at(Moment.STAGING, step)
    if trainer.faults.due(Moment.BACKGROUND_WRITE, step):
        trainer.checkpointer.before_update()
        trainer.faults.at(Moment.BACKGROUND_WRITE, step)


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
    if trainer.checkpointer.saving is not None:  # a last step that an in-process restart found in memory only
        trainer.checkpointer.wait()
        _record(trainer)
    # Whole parameters pass through every rank here: affordable for the small models of a drill.
    digest = trainer.params_sha256() if config.deterministic else None
    process.faults.at(Moment.EXIT, config.total_steps)
    process.events.write("complete", step=config.total_steps, loss=trainer.last_loss, params_sha256=digest)
    process.monitor.close()
    dist.barrier()
    if process.rank == 0:  # only now, with every rank through, may the supervisor report success
        (Path(config.run_directory) / DONE_MARKER).touch()
    dist.destroy_process_group()


def _leave(trainer: Trainer, reason: StopReason) -> int:
    """End with a committed checkpoint, before the last step; returns the exit code of this rank.

    0 where the pod is to end: the supervisor makes 143 or 93 of it. Where only another pod was told to stop, a code
    that has the launcher start its ranks again, together with a spare's or a replacement's. With 0 it would sit in
    torch's exit barrier instead, for five minutes.
    """
    config, process = trainer.config, trainer.process
    process.events.write("stopped", step=trainer.last_step, reason=reason.name.lower())
    text = f"{reason.value}: saved step {trainer.last_step} of {config.total_steps}"
    if process.rank == 0:
        print(text, flush=True)
        if reason is StopReason.DEADLINE:
            (Path(config.run_directory) / NO_RESTART_MARKER).write_text(f"{text}; set a later stop_at to go on\n")
    process.monitor.close()
    dist.barrier()
    dist.destroy_process_group()
    return EXIT_OK if reason is StopReason.DEADLINE or process.stop.told else EXIT_SIGTERM
