"""The trainer image: its repository, and a build of it, in a stack that costs nothing while no GPU node exists."""

from pathlib import Path
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3_assets as assets
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from config.cluster import StorageConfig
from stacks.storage import removal_policy

TRAINING = Path(__file__).parents[1] / "training"
# The Dockerfile's own base, from a registry without Docker Hub's limit of anonymous pulls, which CodeBuild's addresses
# often meet.
BASE_IMAGE = (
    "public.ecr.aws/docker/library/ubuntu:24.04@sha256:69cecf4bbf72d2d44a9eef1b71fb98c7fb973d78af11399deccef19beb008ad9"
)
# What Triton needs to build a kernel's launcher on the GPU node (training/Dockerfile).
_COMPILER = "gcc libc6-dev python3.12-dev"

_BUILD = """\
set -euo pipefail
aws ecr get-login-password | docker login --username AWS --password-stdin "${REPOSITORY_URI%%/*}"
digest_of_tag() {
  aws ecr describe-images --repository-name "$REPOSITORY_NAME" --image-ids "imageTag=$TAG" \\
    --query 'imageDetails[0].imageDigest' --output text
}
if ! digest=$(digest_of_tag 2>/dev/null); then
  mkdir /tmp/context && cp -r "$CODEBUILD_SRC_DIR" /tmp/context/training
  docker build --platform linux/amd64 --build-arg "BASE=$BASE_IMAGE" \\
    --build-arg "COMPILER_PACKAGES=$COMPILER_PACKAGES" \\
    --file /tmp/context/training/Dockerfile --tag "$REPOSITORY_URI:$TAG" /tmp/context
  docker run --rm "$REPOSITORY_URI:$TAG" python -m training.self_test
  docker push --quiet "$REPOSITORY_URI:$TAG"
  digest=$(digest_of_tag)
fi
aws ssm put-parameter --name "$PARAMETER" --type String --overwrite --value "$REPOSITORY_URI@$digest"
"""


class ImageStack(cdk.Stack):
    """One ECR repository, a CodeBuild project, and the parameter that tells which image came out last.

    With `compiles` the image holds a C compiler, for torch.compile's inductor backend; else no build tools are in it.
    Tags can't move, and the job names its image by digest anyway. The tag is the hash of the training folder: the same
    sources are built once, and a second build only finds the digest again.
    """

    def __init__(
        self, scope: Construct, id_: str, *, config: StorageConfig, compiles: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            id_,
            description="Training: image repository and build",
            termination_protection=config.retain_data,
            **kwargs,
        )
        self.repository = ecr.Repository(
            self,
            "Repository",
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            image_scan_on_push=True,
            removal_policy=removal_policy(config),
            # ECR deletes no repository that still holds images; without this a stack that should go gets stuck.
            empty_on_delete=not config.retain_data,
        )
        # Written by every build; CloudFormation sets it once and then leaves it alone.
        self.parameter = ssm.StringParameter(
            self,
            "ImageParameter",
            parameter_name=f"/{self.stack_name}/image",
            string_value="none",
            description="The newest trainer image, by digest",
        )
        self.project = self._project(compiles=compiles)
        self.repository.grant_pull_push(self.project)
        self.repository.grant_read(self.project)
        self.parameter.grant_write(self.project)
        cdk.CfnOutput(self, "RepositoryUri", value=self.repository.repository_uri, description="docker push target")
        cdk.CfnOutput(self, "ProjectName", value=self.project.project_name, description="what `make image` starts")
        cdk.CfnOutput(self, "ParameterName", value=self.parameter.parameter_name, description="the image it made")

    def _project(self, *, compiles: bool) -> codebuild.Project:
        source = assets.Asset(
            self,
            "Source",
            path=str(TRAINING),
            # A tag must not depend on what Python left lying about.
            exclude=["**/__pycache__", "**/*.pyc"],
            ignore_mode=cdk.IgnoreMode.DOCKER,
        )
        return codebuild.Project(
            self,
            "Project",
            description="Builds training/ and pushes it",
            source=codebuild.Source.s3(bucket=source.bucket, path=source.s3_object_key),
            environment=codebuild.BuildEnvironment(
                build_image=codebuild.LinuxBuildImage.STANDARD_7_0,
                # 128 GB of disk, where the smallest has 64, and eight CPUs to compress a 20 GB image with.
                compute_type=codebuild.ComputeType.LARGE,
                privileged=True,  # for its Docker daemon
            ),
            environment_variables=self._variables(source, compiles=compiles),
            build_spec=codebuild.BuildSpec.from_object(
                {"version": "0.2", "env": {"shell": "bash"}, "phases": {"build": {"commands": [_BUILD]}}}
            ),
            timeout=cdk.Duration.hours(2),
            queued_timeout=cdk.Duration.minutes(30),
            logging=self._logging(),
        )

    def _variables(self, source: assets.Asset, *, compiles: bool) -> dict[str, codebuild.BuildEnvironmentVariable]:
        """What the build's commands read."""
        values = {
            "REPOSITORY_URI": self.repository.repository_uri,
            "REPOSITORY_NAME": self.repository.repository_name,
            "TAG": f"{source.asset_hash}-compiler" if compiles else source.asset_hash,
            "COMPILER_PACKAGES": _COMPILER if compiles else "",
            "BASE_IMAGE": BASE_IMAGE,
            "PARAMETER": self.parameter.parameter_name,
        }
        return {name: codebuild.BuildEnvironmentVariable(value=value) for name, value in values.items()}

    def _logging(self) -> codebuild.LoggingOptions:
        log_group = logs.LogGroup(
            self, "BuildLog", retention=logs.RetentionDays.ONE_MONTH, removal_policy=cdk.RemovalPolicy.DESTROY
        )
        return codebuild.LoggingOptions(cloud_watch=codebuild.CloudWatchLoggingOptions(log_group=log_group))
