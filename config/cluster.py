"""The `cluster:` section: what CloudFormation builds around the job."""

from training.config import Config


class ClusterConfig(Config):
    """One EKS cluster in one region, with its GPU nodes in one availability zone."""

    region: str
    availability_zone: str
