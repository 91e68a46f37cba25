"""The training run's settings: one frozen, cross-checked object, the same class on a laptop and in the pod.

Loaded from train.json (`load_train_json`); a deployment file's `train:` section is the same schema.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Config(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(Config):
    """Llama 3.1's frequency scaling (names and meaning as in Hugging Face's `rope_scaling`)."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt

    @model_validator(mode="after")
    def _check_order(self) -> "RopeScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be below high_freq_factor {self.high_freq_factor:g}; "
                "Llama 3.1 has 1 and 4"
            )
        return self


class ModelConfig(Config):
    """A Llama-family decoder; field names as in Hugging Face's LlamaConfig."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, computed from the shapes."""
        kv_width = self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_width
        block = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * block + self.hidden_size

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; choose a hidden_size that is"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; choose num_key_value_heads that divides it"
            )
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd; rotary embeddings rotate pairs, make it even")
        return self


_LLAMA_31_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)

# Shapes of the published checkpoints (config.json of each on the Hugging Face hub).
MODEL_PRESETS: dict[str, ModelConfig] = {
    "debug-3m": ModelConfig(
        vocab_size=257,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_31_ROPE,
    ),
}


class DataConfig(Config):
    """A tokenized corpus written by `python -m training.prepare_data`."""

    path: str = Field(description="directory that holds index.json and the token shards")
    tokenizer: str = Field(
        "bytes", description="what the corpus was tokenized with: `bytes` or a tokenizer.json's name"
    )


class OptimizerConfig(Config):
    """AdamW; matrices decay, norms and biases do not."""

    learning_rate: PositiveFloat = 3e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: PositiveFloat = 1.0


class ScheduleConfig(Config):
    """Linear warm-up, then cosine decay to `min_ratio` of the peak at the last step."""

    warmup_steps: NonNegativeInt = 0
    min_ratio: Fraction = 0.1


class ParallelismConfig(Config):
    """FSDP2 over one data-parallel mesh: `dp_replicate` groups, sharded inside each."""

    dp_replicate: PositiveInt = 1
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: Literal["none", "full"] = "none"


class LocalCheckpointConfig(Config):
    """Copies on each node's own disk: survive the processes, and with a replica any one node."""

    directory: str = Field(description="on the node's NVMe or in /dev/shm; emptied of other runs' copies")
    interval_steps: PositiveInt = Field(description="optimizer steps between two copies; the newest is kept")
    replicas: Annotated[int, Field(ge=0, le=1)] = Field(
        1, description="copies on other nodes; 1 needs an even number of nodes"
    )


class CheckpointConfig(Config):
    """Checkpoints in three tiers: memory, local (optional) and durable, each visible only once it is whole."""

    directory: str = Field(description="on shared storage: the durable tier")
    interval_steps: PositiveInt = Field(description="optimizer steps between two durable checkpoints")
    keep_latest: Annotated[int, Field(ge=1)] = Field(2, description="durable checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        None, description="durable checkpoints at multiples of this step are kept for good; unset keeps none"
    )
    mode: Literal["async", "sync"] = Field("async", description="sync stops training until each save is committed")
    when_behind: Literal["wait", "skip"] = Field(
        "wait", description="a save that is due while the one before is still being written: wait for it, or skip it"
    )
    commit_within_steps: PositiveInt | None = Field(
        None,
        description="wait for a save that is not committed this many steps after it began; 1 bounds the steps lost "
        "to interval_steps, unset lets a slow storage lengthen the loss instead of the step",
    )
    memory: bool = Field(True, description="in-process restarts restore from the staged copy in host memory")
    memory_interval_steps: PositiveInt | None = Field(
        None, description="steps between two copies in memory; unset takes only those that the other tiers save"
    )
    local: LocalCheckpointConfig | None = Field(None, description="copies on the nodes' own disks; unset makes none")
    verify: bool = Field(True, description="compare every file with its checksum while it is loaded")
    save_timeout_seconds: PositiveFloat = Field(
        600.0, description="a durable save that takes longer has failed, and its writer is replaced"
    )
    max_failed_saves: PositiveInt = Field(3, description="this many failed durable saves in a row end the run")


class InProcessRestart(Config):
    """Inner layer: NVRx `inprocess.Wrapper` restarts the training function inside the living processes."""

    enabled: bool = True
    max_restarts: NonNegativeInt = 10
    soft_timeout_seconds: PositiveFloat = 60.0
    hard_timeout_seconds: PositiveFloat = 90.0
    barrier_timeout_seconds: PositiveFloat = 120.0
    heartbeat_timeout_seconds: PositiveFloat = 30.0
    monitor_interval_seconds: PositiveFloat = 1.0
    last_call_wait_seconds: PositiveFloat = 1.0


class InJobRestart(Config):
    """Middle layer: `ft_launcher` replaces the processes; the pods stay."""

    max_restarts: NonNegativeInt = 20
    setup_section_timeout_seconds: PositiveFloat = 1200.0
    step_section_timeout_seconds: PositiveFloat = 600.0
    checkpointing_section_timeout_seconds: PositiveFloat = 900.0
    out_of_section_timeout_seconds: PositiveFloat = 600.0
    initial_heartbeat_timeout_seconds: PositiveFloat = 1500.0
    heartbeat_timeout_seconds: PositiveFloat = 1000.0
    monitor_interval_seconds: PositiveFloat = 0.3
    workers_stop_timeout_seconds: PositiveInt = 30
    term_timeout_seconds: PositiveInt = 150
    max_no_progress_cycles: PositiveInt = 3


class JobRestart(Config):
    """Outer layer: the JobSet recreates every pod as a new generation."""

    max_restarts: NonNegativeInt = 5


class RestartsConfig(Config):
    """The three restart layers from inner to outer, and every timeout that has to nest.

    Order (NVRx usage guide; trainer.md pitfalls 17 and 21): soft < hard < barrier, collective watchdog > hard,
    heartbeat < barrier, and a section's deadline comes after the in-process layer had its chance.
    """

    in_process: InProcessRestart = InProcessRestart()
    in_job: InJobRestart = InJobRestart()
    job: JobRestart = JobRestart()
    collective_timeout_seconds: PositiveFloat = 240.0

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


class FaultSpec(Config):
    """One fault, struck once in the job's life: on `rank`, when it enters `step` (1-based)."""

    kind: Literal["exception", "sigkill"]
    step: PositiveInt
    rank: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:rank{self.rank}"


class TrainConfig(Config):
    """Everything one training run is; `train.json` holds exactly this."""

    run_name: str = Field(min_length=1)
    model: ModelConfig
    data: DataConfig
    run_directory: str = Field(description="events, logs and fault records of this run")
    seed: NonNegativeInt = 0
    total_steps: PositiveInt
    seq_len: PositiveInt
    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig
    restarts: RestartsConfig = RestartsConfig()
    deterministic: bool = False
    faults: tuple[FaultSpec, ...] = ()

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
        if self.schedule.warmup_steps > self.total_steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} exceeds total_steps {self.total_steps}; lower it"
            )
        for fault in self.faults:
            if fault.step > self.total_steps:
                raise ValueError(f"fault {fault} comes after the last step {self.total_steps}; choose an earlier step")
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

    def identity(self) -> dict[str, Any]:
        """What makes this run this run, as JSON: a checkpoint is only continued with an equal identity."""
        fields = ("model", "seed", "total_steps", "seq_len", "global_batch_size", "optimizer", "schedule")
        return self.model_dump(mode="json", include=set(fields)) | {
            "tokenizer": self.data.tokenizer,
            "param_dtype": self.parallelism.param_dtype,
            "reduce_dtype": self.parallelism.reduce_dtype,
        }

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
