"""Settings of the training step (optimizer, schedule, parallelism) and of what is measured and evaluated around it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config_base import Config, Fraction, NonNegativeInt, PositiveFloat, PositiveInt


class OptimizerConfig(Config):
    """AdamW; matrices decay, norms and other 1-D parameters do not."""

    learning_rate: PositiveFloat = Field(default=3e-4, description="peak learning rate; the schedule scales it")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="decay of the mean of gradients, per step"
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, description="decay of the mean of squares, per step"
    )
    eps: PositiveFloat = Field(default=1e-8, description="added to the root of the mean of squares")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="decay per step and unit of learning rate"
    )
    max_grad_norm: PositiveFloat = Field(
        default=1.0, description="global gradient norm above which gradients are scaled down"
    )
    max_skipped_steps: NonNegativeInt = Field(
        default=5,
        description="steps in a row that may be skipped because a gradient was not finite; one more ends the job",
    )


class ScheduleConfig(Config):
    """Learning rate over the steps: linear warm-up, then a decay to `min_ratio` of the peak at the last step."""

    kind: Literal["cosine", "linear", "wsd"] = Field(
        default="cosine", description="shape of the decay; wsd (warm-up, stable, decay) stays at the peak before it"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="steps over which the learning rate rises linearly")
    decay_steps: PositiveInt | None = Field(
        default=None, description="wsd only: last steps, over which it falls linearly"
    )
    min_ratio: Fraction = Field(default=0.1, description="learning rate at the last step, as a fraction of the peak")

    @model_validator(mode="after")
    def _check_decay(self) -> "ScheduleConfig":
        if self.kind == "wsd" and self.decay_steps is None:
            raise ValueError("kind wsd needs decay_steps, the number of last steps over which to decay; set it")
        if self.kind != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps is for kind wsd, kind is {self.kind}; remove it or set kind: wsd")
        return self


class ParallelismConfig(Config):
    """FSDP2 over one data-parallel mesh, and what trades memory for time in the step."""

    dp_replicate: PositiveInt = Field(
        default=1, description="HSDP: groups of ranks that each hold a whole model; sharded inside each"
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of compute and all-gather; the master parameters stay float32"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the gradients' reduction"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what backward recomputes: nothing, all but matrix products and attention, or whole blocks",
    )
    compile: Literal["inductor", "aot_eager", "eager"] | None = Field(
        default=None, description="backend with which torch.compile compiles each block; unset: not compiled"
    )
    float8: Literal["tensorwise", "rowwise"] | None = Field(
        default=None,
        description="scaling of float8 matrix products in the blocks (torchao, H100 or newer); unset: no float8",
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=None, description="tokens whose logits exist at one time; unset: all logits at once"
    )

    @model_validator(mode="after")
    def _check_float8(self) -> "ParallelismConfig":
        if self.float8 is None:
            return self
        if self.param_dtype != "bfloat16":
            raise ValueError(f"float8 needs param_dtype bfloat16, not {self.param_dtype}; change it or unset float8")
        if self.compile != "inductor":
            raise ValueError(
                "float8 without compile: inductor is slower than bfloat16, since its casts are not fused; set it"
            )
        return self


class EvaluationConfig(Config):
    """Validation loss on a corpus that is not trained on."""

    path: str = Field(description="directory of the held-out corpus, as data.path")
    interval_steps: PositiveInt = Field(description="steps between evaluations; the last step has one too")
    sequences: PositiveInt = Field(default=64, description="samples of seq_len tokens, from the corpus's beginning")


class ProfilerConfig(Config):
    """A window in which torch.profiler records; the traces go to RUN_DIRECTORY/profile."""

    start_step: PositiveInt = Field(description="first step recorded")
    steps: PositiveInt = Field(default=3, description="steps recorded")
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1, description="ranks that record")


class MetricsConfig(Config):
    """Where the measurements of each step go, besides the event log, which always has them."""

    line_interval_steps: PositiveInt = Field(default=1, description="steps between the human lines of rank 0")
    tensorboard: bool = Field(
        default=False, description="rank 0 writes TensorBoard scalars to RUN_DIRECTORY/tensorboard"
    )
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="TCP port on which rank 0 serves Prometheus metrics; unset: none"
    )
    profiler: ProfilerConfig | None = Field(default=None, description="record a few steps with torch.profiler")
    straggler_interval_seconds: PositiveFloat | None = Field(
        default=None,
        description="seconds between reports of NVRx's straggler detection (GPU and CUPTI needed); unset: off",
    )
