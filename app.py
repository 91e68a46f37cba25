"""CDK entry: reads the context, loads one deployment file and declares its stacks."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk

from config.check import check
from config.cluster import ClusterConfig
from config.deployment import DeploymentConfig, load
from config.document import read
from config.template_rules import refuse
from stacks.cluster import ClusterStack
from stacks.image import ImageStack
from stacks.network import NetworkStack
from stacks.observability import ObservabilityStack
from stacks.storage import StorageStack

# CloudFormation's limits for one template (CloudFormation user guide, "Quotas").
MAX_RESOURCES = 500
MAX_TEMPLATE_KIB = 1024

DEPLOYMENTS = Path(__file__).parent / "deployments"


@dataclass(frozen=True)
class Stacks:
    """The stacks of one deployment, in the order in which CloudFormation builds them."""

    network: NetworkStack
    storage: StorageStack
    image: ImageStack
    cluster: ClusterStack
    observability: ObservabilityStack


def build(app: cdk.App, deployment: DeploymentConfig) -> Stacks:
    """Declare every stack of `deployment` in `app`.

    Raises:
        ValueError: the deployment has no cluster section.
    """
    config = _buildable(deployment)
    # The region is fixed and the account is not: zones are named in the file, and whoever deploys owns the account.
    env = cdk.Environment(region=config.region)
    cdk.Tags.of(app).add("deployment", deployment.name)
    network = NetworkStack(app, "Network", config=config, env=env, stack_name=f"{deployment.name}-network")
    storage = StorageStack(
        app, "Storage", config=config.storage, network=network, env=env, stack_name=f"{deployment.name}-storage"
    )
    image = ImageStack(app, "Image", config=config.storage, env=env, stack_name=f"{deployment.name}-image")
    cluster = ClusterStack(
        app,
        "Cluster",
        config=config,
        job=deployment.job,
        network=network,
        storage=storage,
        env=env,
        stack_name=f"{deployment.name}-cluster",
    )
    observability = ObservabilityStack(
        app,
        "Observability",
        config=config,
        job=deployment.job,
        file_system=storage.file_system,
        cluster=cluster.cluster,
        gpu_nodegroup=cluster.gpu_nodegroup,
        subnets=network.private_subnets,
        env=env,
        stack_name=f"{deployment.name}-observability",
    )
    return Stacks(network, storage, image, cluster, observability)


def _buildable(deployment: DeploymentConfig) -> ClusterConfig:
    config = deployment.cluster
    if config is None:
        raise ValueError(
            f"deployment {deployment.name} has no cluster section, so there is nothing to build on AWS; "
            "add one (see deployments/p5-2node.yaml) or choose another deployment with -c deployment=NAME"
        )
    return config


def main() -> None:
    """Synthesize the deployment that the context names; a bad one is a line on stderr and exit code 2."""
    app = cdk.App(
        analytics_reporting=False,
        # Stack traces of constructs name jsii's temporary directory and no line of ours, and a slow synth leaves its
        # timings in the assembly: without both it repeats byte for byte. Not in cdk.json, whose reader reserves keys
        # that begin with aws:.
        context={"aws:cdk:disable-creation-stack-traces": True},
        performance_reporting=False,
        # aws-cdk-lib's own template validator takes two thirds of a synth, and finds less than the tests' cfn-lint and
        # the rules below (docs/decisions.md).
        builtin_cloud_formation_validation=False,
    )
    try:
        build(app, _load(_deployment_path(app.node.try_get_context("deployment"))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    stacks = app.synth().stacks
    texts = {stack.id: Path(stack.template_full_path).read_text() for stack in stacks}
    templates = {id_: json.loads(text) for id_, text in texts.items()}
    _check_templates(templates)
    for stack in stacks:
        count, kib = len(templates[stack.id]["Resources"]), len(texts[stack.id]) // 1024
        print(f"{stack.stack_name}: {count} of {MAX_RESOURCES} resources, {kib} of {MAX_TEMPLATE_KIB} KiB")


def _load(path: Path) -> DeploymentConfig:
    """The deployment; or a ValueError with a line for everything that is wrong with it (config/check.py)."""
    findings = check(read(path), path.stem)
    if findings:
        raise ValueError(
            "\n".join(f"{path}: {one.path}: {one.value or 'empty'}: {one.rule}; {one.fix}" for one in findings)
        )
    return load(path)


def _check_templates(templates: dict[str, Any]) -> None:
    """Exit with code 2 and every finding if AWS would refuse the templates (config/template_rules.py)."""
    try:
        refuse(templates)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _deployment_path(named: str | None) -> Path:
    """A file as given, or a name in deployments/."""
    if not named:
        raise ValueError("no deployment named; pass -c deployment=NAME, a file in deployments/ or a path")
    path = Path(named)
    return path if path.suffix in (".yaml", ".yml") else DEPLOYMENTS / f"{named}.yaml"


if __name__ == "__main__":
    main()
