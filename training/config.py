"""The training run's settings: one frozen, cross-checked object, the same class on a laptop and in the pod.

Loaded from train.json (`load_train_json`); a deployment file's `train:` section is the same schema.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from training.config_base import Config, NonNegativeInt, PositiveFloat, PositiveInt
from training.config_faults import START_MOMENTS, FaultSpec
from training.config_model import MODEL_PRESETS, ModelConfig
from training.config_step import (
    EvaluationConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelismConfig,
    ScheduleConfig,
)

# Exit codes: the contract between trainer, launcher, supervisor and manifest. 0 only when training is complete.
EXIT_OK = 0
EXIT_BAD_CONFIG = 2
EXIT_NO_RESTART = 93
EXIT_PREFLIGHT_FAILED = 94  # a node is not fit
EXIT_PREFLIGHT_NOT_RUN = 95  # a node is missing
EXIT_SIGTERM = 143

# Files in the run directory that tell the supervisor how the run ended: ft_launcher's exit code alone does not.
DONE_MARKER = "done"
NO_RESTART_MARKER = "no-restart"


class DataConfig(Config):
    """A tokenized corpus written by `python -m training.prepare_data`."""

    path: str = Field(description="directory that holds index.json and the token shards")
    tokenizer: str = Field(
        default="bytes", description="what the corpus was tokenized with: `bytes` or a tokenizer.json's name"
    )
    mask_documents: bool = Field(
        default=False, description="a token attends to its own document only; off, to all before it in the sample"
    )


class LocalCheckpointConfig(Config):
    """Copies on each node's own disk: survive the processes, and with a replica any one node."""

    directory: str = Field(description="on the node's NVMe or in /dev/shm; emptied of other runs' copies")
    interval_steps: PositiveInt = Field(description="optimizer steps between two copies; the newest is kept")
    replicas: Annotated[int, Field(ge=0, le=1)] = Field(
        default=1, description="copies on other nodes; 1 needs an even number of nodes"
    )


class CheckpointConfig(Config):
    """Checkpoints in three tiers: memory, local (optional) and durable, each visible only once it is whole."""

    directory: str = Field(description="on shared storage: the durable tier")
    interval_steps: PositiveInt = Field(description="optimizer steps between two durable checkpoints")
    keep_latest: Annotated[int, Field(ge=1)] = Field(default=2, description="durable checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="durable checkpoints at multiples of this step are kept for good; unset keeps none"
    )
    mode: Literal["async", "sync"] = Field(
        default="async", description="sync stops training until each save is committed"
    )
    when_behind: Literal["wait", "skip"] = Field(
        default="wait",
        description="a save that is due while the one before is still being written: wait for it, or skip it",
    )
    commit_within_steps: PositiveInt | None = Field(
        default=None,
        description="wait for a save that is not committed this many steps after it began; 1 bounds the steps lost "
        "to interval_steps, unset lets a slow storage lengthen the loss instead of the step",
    )
    memory: bool = Field(default=True, description="in-process restarts restore from the staged copy in host memory")
    memory_interval_steps: PositiveInt | None = Field(
        default=None, description="steps between two copies in memory; unset takes only those that the other tiers save"
    )
    local: LocalCheckpointConfig | None = Field(
        default=None, description="copies on the nodes' own disks; unset makes none"
    )
    verify: bool = Field(default=True, description="compare every file with its checksum while it is loaded")
    save_timeout_seconds: PositiveFloat = Field(
        default=600.0, description="a durable save that takes longer has failed, and its writer is replaced"
    )
    max_failed_saves: PositiveInt = Field(default=3, description="this many failed durable saves in a row end the run")


class InProcessRestart(Config):
    """Inner layer: NVRx `inprocess.Wrapper` restarts the training function inside the living processes."""

    enabled: bool = Field(default=True, description="whether this layer is there at all")
    max_restarts: NonNegativeInt = Field(
        default=10, description="restarts of one process before the next layer takes over"
    )
    soft_timeout_seconds: PositiveFloat = Field(
        default=60.0, description="a rank without progress for this long is interrupted"
    )
    hard_timeout_seconds: PositiveFloat = Field(
        default=90.0, description="a rank without progress for this long is killed"
    )
    barrier_timeout_seconds: PositiveFloat = Field(
        default=120.0, description="how long ranks wait for each other on the way to a restart"
    )
    heartbeat_timeout_seconds: PositiveFloat = Field(
        default=30.0, description="how long a rank's monitor may be silent before the rank counts as lost"
    )
    monitor_interval_seconds: PositiveFloat = Field(default=1.0, description="how often the monitors look")
    last_call_wait_seconds: PositiveFloat = Field(
        default=1.0, description="how long to wait for more ranks that fail at the same time"
    )


class InJobRestart(Config):
    """Middle layer: `ft_launcher` replaces the processes; the pods stay."""

    max_restarts: NonNegativeInt = Field(
        default=20, description="restarts of the job's processes before the next layer takes over"
    )
    setup_section_timeout_seconds: PositiveFloat = Field(
        default=1200.0, description="from entry to the first step: build, load, connect"
    )
    step_section_timeout_seconds: PositiveFloat = Field(default=600.0, description="one optimizer step")
    checkpointing_section_timeout_seconds: PositiveFloat = Field(
        default=900.0, description="what a step waits for its checkpoint"
    )
    out_of_section_timeout_seconds: PositiveFloat = Field(
        default=600.0, description="between sections, evaluation included"
    )
    initial_heartbeat_timeout_seconds: PositiveFloat = Field(default=1500.0, description="until the first heartbeat")
    heartbeat_timeout_seconds: PositiveFloat = Field(default=1000.0, description="between heartbeats, one per step")
    monitor_interval_seconds: PositiveFloat = Field(
        default=0.3, description="how often the launcher looks at its processes"
    )
    workers_stop_timeout_seconds: PositiveInt = Field(
        default=30, description="SIGTERM to SIGKILL when ranks are replaced"
    )
    term_timeout_seconds: PositiveInt = Field(
        default=150, description="SIGTERM to SIGKILL when the pod is stopped: time for the last save"
    )
    max_no_progress_cycles: PositiveInt = Field(
        default=3, description="restarts in a row without a newer checkpoint that end the job"
    )


class JobRestart(Config):
    """Outer layer: the JobSet recreates every pod as a new generation."""

    max_restarts: NonNegativeInt = Field(default=5, description="generations of pods after the first")


class RestartsConfig(Config):
    """The three restart layers from inner to outer, and every timeout that has to nest.

    Order (NVRx usage guide; trainer.md pitfalls 17 and 21): soft < hard < barrier, collective watchdog > hard,
    heartbeat < barrier, and a section's deadline comes after the in-process layer had its chance.
    """

    in_process: InProcessRestart = InProcessRestart()
    in_job: InJobRestart = InJobRestart()
    job: JobRestart = JobRestart()
    collective_timeout_seconds: PositiveFloat = Field(
        default=240.0, description="how long a collective may take before its watchdog ends the process"
    )

    @model_validator(mode="after")
    def _check_nesting(self) -> "RestartsConfig":
        inner, middle = self.in_process, self.in_job
        chain = [
            ("in_process.monitor_interval_seconds", inner.monitor_interval_seconds),
            ("in_process.soft_timeout_seconds", inner.soft_timeout_seconds),
            ("in_process.hard_timeout_seconds", inner.hard_timeout_seconds),
            ("in_process.barrier_timeout_seconds", inner.barrier_timeout_seconds),
        ]
        pairs = list(itertools.pairwise(chain)) if inner.enabled else []
        if inner.enabled:
            hard = chain[2]
            pairs += [
                (hard, ("collective_timeout_seconds", self.collective_timeout_seconds)),
                (hard, ("in_job.step_section_timeout_seconds", middle.step_section_timeout_seconds)),
                (hard, ("in_job.checkpointing_section_timeout_seconds", middle.checkpointing_section_timeout_seconds)),
                (hard, ("in_job.heartbeat_timeout_seconds", middle.heartbeat_timeout_seconds)),
                (("in_process.heartbeat_timeout_seconds", inner.heartbeat_timeout_seconds), chain[3]),
            ]
        pairs.append(
            (
                ("in_job.workers_stop_timeout_seconds", middle.workers_stop_timeout_seconds),
                ("in_job.term_timeout_seconds", middle.term_timeout_seconds),
            )
        )
        for (low_name, low), (high_name, high) in pairs:
            if low >= high:
                raise ValueError(f"{low_name} {low:g} must be below {high_name} {high:g}; raise the second")
        return self

    @property
    def termination_grace_period_seconds(self) -> int:
        """Seconds Kubernetes must leave a pod: the launcher's own term-timeout and 30 s to clean up."""
        return self.in_job.term_timeout_seconds + 30


class TrainConfig(Config):
    """Everything one training run is; `train.json` holds exactly this."""

    run_name: str = Field(min_length=1, description="name of the run, for people")
    model: ModelConfig
    data: DataConfig
    run_directory: str = Field(description="events, logs and fault records of this run")
    seed: NonNegativeInt = Field(default=0, description="decides the initial parameters and the order of the data")
    total_steps: PositiveInt = Field(description="optimizer steps of the whole run")
    seq_len: PositiveInt = Field(description="tokens per sample")
    micro_batch_size: PositiveInt = Field(description="samples per rank and forward pass")
    global_batch_size: PositiveInt = Field(description="samples per optimizer step, over all ranks")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    evaluation: EvaluationConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig
    restarts: RestartsConfig = RestartsConfig()
    stop_at: AwareDatetime | None = Field(
        default=None,
        description="save and stop so that the checkpoint is there at this time, e.g. 2026-12-01T17:30:00Z: "
        "the end of a Capacity Block",
    )
    stop_margin_seconds: PositiveFloat = Field(
        default=300.0, description="how long before stop_at training ends, for the last step and its save"
    )
    deterministic: bool = Field(default=False, description="the same bits in every run; slower")
    faults: tuple[FaultSpec, ...] = Field(default=(), description="faults to strike on purpose")

    @field_validator("model", mode="before")
    @classmethod
    def _resolve_preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in MODEL_PRESETS:
            raise ValueError(f"unknown model preset {value!r}; known: {', '.join(sorted(MODEL_PRESETS))}")
        return MODEL_PRESETS[value]

    @model_validator(mode="after")
    def _check_lengths(self) -> "TrainConfig":
        if self.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds model.max_position_embeddings "
                f"{self.model.max_position_embeddings}; lower seq_len"
            )
        deadline, section = self.checkpoint.save_timeout_seconds, self.restarts.in_job
        if deadline >= section.checkpointing_section_timeout_seconds:
            raise ValueError(
                f"checkpoint.save_timeout_seconds {deadline:g} must be below "
                "restarts.in_job.checkpointing_section_timeout_seconds "
                f"{section.checkpointing_section_timeout_seconds:g}, which ends the processes; raise the second"
            )
        ramps = self.schedule.warmup_steps + (self.schedule.decay_steps or 0)
        if ramps > self.total_steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} and decay_steps {self.schedule.decay_steps or 0} "
                f"exceed total_steps {self.total_steps}; lower them"
            )
        for fault in self.faults:
            if fault.moment not in START_MOMENTS and fault.step > self.total_steps:
                raise ValueError(f"fault {fault} comes after the last step {self.total_steps}; choose an earlier step")
        profiler = self.metrics.profiler
        if profiler and profiler.start_step + profiler.steps - 1 > self.total_steps:
            raise ValueError(
                f"metrics.profiler records steps {profiler.start_step} to {profiler.start_step + profiler.steps - 1}, "
                f"the last step is {self.total_steps}; choose earlier ones"
            )
        return self

    @model_validator(mode="after")
    def _check_float8(self) -> "TrainConfig":
        for name in ("hidden_size", "intermediate_size"):
            width = getattr(self.model, name)
            if self.parallelism.float8 and width % 16:
                raise ValueError(
                    f"parallelism.float8 multiplies in tiles of 16, model.{name} {width} is no multiple; unset float8"
                )
        return self

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError unless the batch and the mesh divide over `world_size` ranks."""
        per_micro_step = self.micro_batch_size * world_size
        if self.global_batch_size % per_micro_step:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size} x {world_size} ranks; "
                f"choose a multiple of {per_micro_step}"
            )
        if world_size % self.parallelism.dp_replicate:
            raise ValueError(
                f"parallelism.dp_replicate {self.parallelism.dp_replicate} does not divide {world_size} ranks; "
                "choose a divisor"
            )
        for fault in self.faults:
            if fault.rank >= world_size:
                raise ValueError(f"fault {fault} names a rank that does not exist; ranks are 0 to {world_size - 1}")

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Micro-steps per optimizer step at this world size."""
        return self.global_batch_size // (self.micro_batch_size * world_size)


def describe_errors(error: ValidationError) -> str:
    """One line per problem: field path, what is wrong, and the value given."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key; check its spelling against the schema"
        given = item.get("input")
        shown = f" (given {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines += [f"{path}: {line}{shown}" for line in message.splitlines()]
    return "\n".join(lines)


def load_train_json(path: Path) -> TrainConfig:
    """Parse train.json.

    Raises:
        ValueError: the file is missing, is no JSON, or breaks a rule; the text says where and how to fix it.
    """
    try:
        return TrainConfig.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); pass --config a train.json") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); regenerate it with `make manifests`") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {describe_errors(error)}") from error
