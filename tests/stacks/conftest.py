"""Templates of the shipped deployment, and of variants of it, each synthesized once per run."""

import json
import os
from pathlib import Path

import aws_cdk as cdk
import pytest
import yaml
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk.assertions import Template

from app import build
from config.deployment import DeploymentConfig
from stacks.gpu_nodegroup import GpuNodegroup
from stacks.network import NetworkStack

ROOT = Path(__file__).parents[2]
# The settings of the real synth, but without copying the kubectl provider's 60 MB of Lambda code each time.
CONTEXT = json.loads((ROOT / "cdk.json").read_text())["context"] | {"aws:cdk:disable-asset-staging": True}


@pytest.fixture(scope="session")
def new_app():
    """new_app(outdir) -> an app like the real synth's; its built-in validator has a test of its own."""

    def make(outdir: Path | None = None, *, validation: bool = False) -> cdk.App:
        return cdk.App(
            context=CONTEXT,
            analytics_reporting=False,
            builtin_cloud_formation_validation=validation,
            outdir=None if outdir is None else str(outdir),
        )

    return make


def merged(base: dict, changes: dict) -> dict:
    """`base` with `changes` on top: a nested mapping is merged, unless it has a `kind`, which makes it another."""
    result = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and "kind" not in value
        result[key] = merged(base[key], value) if nested else value
    return result


@pytest.fixture(scope="session")
def deployment_with():
    """The p5-2node deployment with some settings changed: deployment_with(cluster={...}, job={...})."""
    shipped = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())

    def change(**sections: dict) -> DeploymentConfig:
        return DeploymentConfig.model_validate({"name": "p5-2node", **merged(shipped, sections)})

    return change


@pytest.fixture(scope="session")
def synthesize(deployment_with, new_app, tmp_path_factory):
    """synthesize(**sections) -> {"network": Template, "storage": ..., "image": ..., "cluster": ...}."""
    done: dict[str, dict[str, Template]] = {}

    def run(**sections: dict) -> dict[str, Template]:
        key = json.dumps(sections, sort_keys=True)
        if key not in done:
            stacks = build(new_app(tmp_path_factory.mktemp("cdk")), deployment_with(**sections))
            done[key] = {name: Template.from_stack(stack) for name, stack in vars(stacks).items()}
        return done[key]

    return run


@pytest.fixture(scope="session")
def gpu_template(new_app):
    """gpu_template(deployment) -> Template with the deployment's GPU node group alone: synthesized in a moment."""

    def make(deployment: DeploymentConfig) -> Template:
        assert deployment.cluster is not None
        app = new_app()
        env = cdk.Environment(region=deployment.cluster.region)
        network = NetworkStack(app, "Network", config=deployment.cluster, env=env)
        stack = cdk.Stack(app, "Gpu", env=env)
        cluster = eks.Cluster.from_cluster_attributes(
            stack, "Cluster", cluster_name="cluster", cluster_security_group_id="sg-0123456789abcdef0"
        )
        role = iam.Role(stack, "NodeRole", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        GpuNodegroup(
            stack,
            "GpuNodegroup",
            config=deployment.cluster,
            job=deployment.job,
            cluster=cluster,
            network=network,
            node_role=role,
        )
        return Template.from_stack(stack)

    return make


@pytest.fixture(scope="session")
def templates(synthesize):
    """The shipped p5-2node deployment."""
    return synthesize()


@pytest.fixture(scope="session")
def network(templates):
    return templates["network"]


@pytest.fixture(scope="session")
def storage(templates):
    return templates["storage"]


@pytest.fixture(scope="session")
def cluster(templates):
    return templates["cluster"]


def _only(template: Template, kind: str, prefix: str) -> tuple[str, dict]:
    found = [item for item in template.find_resources(kind).items() if item[0].startswith(prefix)]
    assert len(found) == 1, f"{kind} {prefix}*: {[name for name, _ in found]}"
    return found[0]


@pytest.fixture(scope="session")
def only():
    """only(template, type, prefix) -> (logical id, resource): the one resource whose id begins with the prefix."""
    return _only


@pytest.fixture(scope="session")
def launch_template():
    """launch_template(cluster template) -> the GPU nodes' LaunchTemplateData."""

    def find(template: Template) -> dict:
        return _only(template, "AWS::EC2::LaunchTemplate", "Gpu")[1]["Properties"]["LaunchTemplateData"]

    return find


@pytest.fixture(scope="session")
def nodegroup():
    """nodegroup(cluster template) -> the GPU node group's properties."""

    def find(template: Template) -> dict:
        return _only(template, "AWS::EKS::Nodegroup", "Gpu")[1]["Properties"]

    return find


@pytest.fixture(scope="session")
def offline_environment(tmp_path_factory) -> dict[str, str]:
    """No credentials, no AWS settings, a home of its own, and a proxy that nothing answers on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nowhere = "http://127.0.0.1:9"
    return environment | {
        "HOME": str(tmp_path_factory.mktemp("home")),
        # jsii unpacks its libraries there once; in an empty home that alone takes 8 s per process.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_DISABLE_CLI_TELEMETRY": "true",
    }
