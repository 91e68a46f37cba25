"""One deployment file, parsed once into a frozen object: cluster, job and training run, checked across sections."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from config import names
from config.cluster import ClusterConfig, raise_together
from config.document import read
from config.job import JobConfig
from config.worker import worker_resources
from training.config import Config, TrainConfig, describe_errors


class DeploymentConfig(Config):
    """Everything one deployment is. No `cluster` section: only manifests and drills, nothing on AWS."""

    name: str = Field(description="the file's name without .yaml")
    cluster: ClusterConfig | None = None
    job: JobConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check_across(self) -> "DeploymentConfig":
        raise_together(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.cluster is not None:
            if not re.fullmatch(r"[A-Za-z][-A-Za-z0-9]{0,99}", self.name):
                yield (
                    f"name {self.name} can't begin a stack's name, which has letters, digits and hyphens, a letter "
                    "first; rename the file"
                )
            if self.job.instance is None:
                yield "job.instance_type is needed when there is a cluster section; name the GPU nodes' type"
            if self.job.storage is not None:
                yield "job.storage is for clusters built elsewhere; remove it, or the cluster section"
            yield from self.cluster.job_problems(self.job.pod_count)
        try:
            self.train.check_world_size(self.job.world_size)
        except ValueError as error:
            yield f"train: {error}"
        evaluation = self.train.evaluation
        for field, path in (
            ("train.data.path", self.train.data.path),
            *([] if evaluation is None else [("train.evaluation.path", evaluation.path)]),
            ("train.run_directory", self.train.run_directory),
            ("train.checkpoint.directory", self.train.checkpoint.directory),
        ):
            if Path(names.FSX_MOUNT) not in Path(path).parents:
                yield f"{field} {path} must lie under {names.FSX_MOUNT}, the shared volume; move it there"
        yield from self._pod_problems()

    def _pod_problems(self) -> Iterator[str]:
        """What a pod could not be made of, or would be killed for."""
        for check in (
            lambda: self.job.grace_period_seconds(self.train.restarts),
            lambda: worker_resources(self.job, self.train),
        ):
            try:
                check()
            except ValueError as error:
                yield str(error)
        preparation = self.job.prepare_data
        if preparation is not None and Path(names.FSX_MOUNT) not in Path(preparation.input_directory).parents:
            yield (
                f"job.prepare_data.input_directory {preparation.input_directory} must lie under {names.FSX_MOUNT}, "
                "the shared volume; move it there"
            )


def load(path: Path) -> DeploymentConfig:
    """Parse a deployment file.

    Raises:
        ValueError: the file is missing, is no YAML mapping, or breaks a rule; one line per problem, with the fix.
    """
    document = read(path)
    try:
        return DeploymentConfig.model_validate({"name": path.stem, **document})
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in describe_errors(error).splitlines())) from error
