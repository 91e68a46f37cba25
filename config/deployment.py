"""One deployment file, parsed once into a frozen object: cluster, job and training run, checked across sections."""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import Field, ValidationError, model_validator

from config import names
from config.cluster import ClusterConfig
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
        if self.cluster is not None and self.job.instance is None:
            raise ValueError("job.instance_type is needed when there is a cluster section; name the GPU nodes' type")
        if self.cluster is not None:
            self.cluster.check_job(self.job.pod_count)
        try:
            self.train.check_world_size(self.job.world_size)
        except ValueError as error:
            raise ValueError(f"train: {error}") from error
        for field, path in (
            ("train.data.path", self.train.data.path),
            ("train.run_directory", self.train.run_directory),
            ("train.checkpoint.directory", self.train.checkpoint.directory),
        ):
            if Path(names.FSX_MOUNT) not in Path(path).parents:
                raise ValueError(f"{field} {path} must lie under {names.FSX_MOUNT}, the shared volume; move it there")
        for problem in self._pod_problems():
            raise ValueError(problem)
        return self

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
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); see deployments/ for the shipped ones") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must be a mapping with the keys job, train and optionally cluster")
    try:
        return DeploymentConfig.model_validate({"name": path.stem, **document})
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in describe_errors(error).splitlines())) from error
