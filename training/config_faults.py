"""Faults on purpose: their kinds, the moments at which they can strike, and one fault of a schedule."""

from enum import StrEnum

from pydantic import Field, model_validator

from training.config_base import Config, NonNegativeInt, PositiveFloat


class Moment(StrEnum):
    """Where in a rank's life a fault strikes, in the order of that life."""

    IMPORT = "import"
    RENDEZVOUS = "rendezvous"
    PROCESS_GROUP = "process_group"
    MODEL = "model"
    RESTORE = "restore"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STAGING = "staging"
    BACKGROUND_WRITE = "background_write"
    COMMIT = "commit"
    EVALUATION = "evaluation"
    FINAL_SAVE = "final_save"
    EXIT = "exit"


# Moments before the first step: FaultSpec.step counts this rank's earlier starts there, not optimizer steps.
START_MOMENTS = (Moment.IMPORT, Moment.RENDEZVOUS, Moment.PROCESS_GROUP, Moment.MODEL, Moment.RESTORE)


class FaultKind(StrEnum):
    """What happens. NVRx's own list (shared_utils/inject_fault.py) is the yardstick: each of its faults is here."""

    EXCEPTION = "exception"
    ASYNC_EXCEPTION = "async_exception"
    SIGNAL_EXCEPTION = "signal_exception"
    HANG = "hang"
    HANG_GIL = "hang_gil"
    SIGSTOP = "sigstop"
    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGINT = "sigint"
    SEGFAULT = "segfault"
    ABORT = "abort"
    OUT_OF_MEMORY = "out_of_memory"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    SLOW = "slow"
    NAN_GRADIENT = "nan_gradient"
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    WRITER_DEATH = "writer_death"
    STORAGE_STALL = "storage_stall"
    STORAGE_FULL = "storage_full"
    STORAGE_ERROR = "storage_error"
    LAUNCHER_DEATH = "launcher_death"
    NODE_DEATH = "node_death"
    CONTROL_DEATH = "control_death"
    NETWORK_LOSS = "network_loss"
    GPU_ERROR = "gpu_error"
    GPU_HANG = "gpu_hang"


# What only the drill's own cluster can do to a node: a pod may not kill its node or the store.
CLUSTER_KINDS = (FaultKind.NODE_DEATH, FaultKind.CONTROL_DEATH, FaultKind.NETWORK_LOSS)
GPU_KINDS = (FaultKind.GPU_ERROR, FaultKind.GPU_HANG)
STORAGE_KINDS = (FaultKind.STORAGE_STALL, FaultKind.STORAGE_FULL, FaultKind.STORAGE_ERROR)

_STEP_MOMENTS = tuple(moment for moment in Moment if moment not in START_MOMENTS)
# Kinds that make sense at some moments only; every other one can strike anywhere. The first is the default.
_MOMENTS_OF = {
    FaultKind.COLLECTIVE_MISMATCH: (Moment.OPTIMIZER, Moment.DATA, Moment.FORWARD, Moment.BACKWARD, Moment.EVALUATION),
    FaultKind.NAN_GRADIENT: (Moment.OPTIMIZER,),
    FaultKind.CORRUPT_CHECKPOINT: (Moment.BACKWARD, *_STEP_MOMENTS),
    FaultKind.WRITER_DEATH: (Moment.BACKGROUND_WRITE, Moment.STAGING, Moment.BACKWARD, Moment.FINAL_SAVE),
    # They wait for the save that comes next.
    **dict.fromkeys(STORAGE_KINDS, (Moment.OPTIMIZER, Moment.DATA, Moment.FORWARD, Moment.BACKWARD)),
}


class FaultSpec(Config):
    """One fault, struck once in the job's life. As text: `KIND@STEP:rankN[:MOMENT]`."""

    kind: FaultKind = Field(description="what happens")
    step: NonNegativeInt = Field(
        description="the optimizer step in which it strikes; at moments before the first step, how often this rank had "
        "been there before (0: in the job's first start)"
    )
    rank: NonNegativeInt = Field(description="whom it strikes")
    moment: Moment = Field(default=Moment.BACKWARD, description="where in the step or start it strikes")
    seconds: PositiveFloat = Field(default=2.0, description="how long slow and storage_stall last")

    @model_validator(mode="before")
    @classmethod
    def _usual_moment(cls, value: object) -> object:
        if isinstance(value, dict) and "moment" not in value and value.get("kind") in _MOMENTS_OF:
            return {**value, "moment": _MOMENTS_OF[value["kind"]][0]}
        return value

    @model_validator(mode="after")
    def _check_moment(self) -> "FaultSpec":
        allowed = _MOMENTS_OF.get(self.kind, tuple(Moment))
        if self.moment not in allowed:
            raise ValueError(f"{self.kind} can't strike at {self.moment}; choose one of {', '.join(allowed)}")
        if self.moment not in START_MOMENTS and self.step < 1:
            raise ValueError(f"step {self.step} is none; steps count from 1")
        if self.moment is Moment.COMMIT and self.rank != 0:
            raise ValueError(f"rank {self.rank} commits nothing; at moment commit choose rank 0")
        return self

    def __str__(self) -> str:
        usual = _MOMENTS_OF.get(self.kind, (Moment.BACKWARD,))[0]
        return f"{self.kind}@{self.step}:rank{self.rank}" + ("" if self.moment is usual else f":{self.moment}")
