"""CDK entry: reads the context, loads one deployment file and declares its stacks."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk

from config.check import check
from config.cluster import ClusterConfig, raise_together
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

ROOT = Path(__file__).parent
DEPLOYMENTS = ROOT / "deployments"


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
    image = ImageStack(
        app,
        "Image",
        config=config.storage,
        compiles=deployment.train.parallelism.compile == "inductor",
        env=env,
        stack_name=f"{deployment.name}-image",
    )
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


def main(argv: list[str] | None = None) -> int:
    """Synthesize the deployment that the context names, or all; returns 2 after a line for everything that is wrong."""
    parser = argparse.ArgumentParser(prog="app.py", description="CDK entry; started by the cdk command line")
    parser.add_argument(
        "--all", type=Path, metavar="DIR", help="every file in deployments/ with a cluster section, each into DIR/NAME"
    )
    directory = parser.parse_args(argv).all
    try:
        if directory is not None:
            _synthesize_all(directory)
        else:
            app = _new_app()
            _synthesize(app, _load(_deployment_path(app.node.try_get_context("deployment"))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _synthesize_all(directory: Path) -> None:
    """In one process, since starting jsii and loading aws-cdk-lib takes longer than a deployment does."""
    # What the cdk command line would pass on, and what it sets itself: the same templates come out.
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    context |= {"aws:cdk:enable-path-metadata": True, "aws:cdk:enable-asset-metadata": True}
    problems: list[str] = []
    for path in sorted(DEPLOYMENTS.glob("*.yaml")):
        try:
            deployment = _load(path)
            if deployment.cluster is not None:
                _synthesize(_new_app(directory / path.stem, context), deployment)
        except ValueError as error:
            problems += str(error).splitlines()
    raise_together(problems)


def _new_app(outdir: Path | None = None, context: dict[str, Any] | None = None) -> cdk.App:
    """An app that the cdk command line gives its output directory and its context, or one with these."""
    return cdk.App(
        analytics_reporting=False,
        outdir=None if outdir is None else str(outdir),
        # Stack traces of constructs name jsii's temporary directory and no line of ours, and a slow synth leaves its
        # timings in the assembly: without both it repeats byte for byte. Not in cdk.json, whose reader reserves keys
        # that begin with aws:.
        context={"aws:cdk:disable-creation-stack-traces": True} | (context or {}),
        performance_reporting=False,
        # aws-cdk-lib's own template validator takes two thirds of a synth, and finds less than the tests' cfn-lint and
        # the rules below (docs/decisions.md).
        builtin_cloud_formation_validation=False,
    )


def _synthesize(app: cdk.App, deployment: DeploymentConfig) -> None:
    """Write the templates, check them (config/template_rules.py) and say how much of the limits they use."""
    build(app, deployment)
    stacks = app.synth().stacks
    texts = {stack.id: Path(stack.template_full_path).read_text() for stack in stacks}
    templates = {id_: json.loads(text) for id_, text in texts.items()}
    refuse(templates)
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


def _deployment_path(named: str | None) -> Path:
    """A file as given, or a name in deployments/."""
    if not named:
        raise ValueError("no deployment named; pass -c deployment=NAME, a file in deployments/ or a path")
    path = Path(named)
    return path if path.suffix in (".yaml", ".yml") else DEPLOYMENTS / f"{named}.yaml"


if __name__ == "__main__":
    sys.exit(main())
