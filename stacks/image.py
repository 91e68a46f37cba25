"""The trainer image's repository: a stack of its own, so that images can be pushed before any GPU node costs money."""

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ecr as ecr
from constructs import Construct

from config.cluster import StorageConfig
from stacks.storage import removal_policy


class ImageStack(cdk.Stack):
    """One ECR repository. Tags can't move, and the job names its image by digest anyway."""

    def __init__(self, scope: Construct, id_: str, *, config: StorageConfig, **kwargs: Any) -> None:
        super().__init__(
            scope, id_, description="Training: image repository", termination_protection=config.retain_data, **kwargs
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
        cdk.CfnOutput(self, "RepositoryUri", value=self.repository.repository_uri, description="docker push target")
