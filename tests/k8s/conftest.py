"""Rendered manifests, shared by the tests: starting jsii takes seconds."""

from pathlib import Path

import pytest
import yaml

from config.deployment import DeploymentConfig, load
from k8s import main

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))


class Manifests:
    """One deployment's objects."""

    def __init__(self, deployment, documents):
        self.deployment = deployment
        self.documents = documents

    def all(self, kind):
        """Every object of a kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def only(self, kind):
        """The one object of a kind."""
        (document,) = self.all(kind)
        return document

    def jobs(self):
        """Specs of the Jobs by name: a JobSet's replicated jobs, or Jobs without the training job's own name."""
        jobs = {job["name"]: job["template"]["spec"] for jobset in self.all("JobSet") for job in replicated(jobset)}
        prefix = f"{self.deployment.job.name}-"
        return jobs | {job["metadata"]["name"].removeprefix(prefix): job["spec"] for job in self.all("Job")}

    def job(self, name):
        """Spec of the Job `name`."""
        return self.jobs()[name]

    def pod(self, name):
        return self.job(name)["template"]["spec"]

    def container(self, name):
        """The one main container of the Job `name`."""
        (container,) = self.pod(name)["containers"]
        return container

    def environment(self, name):
        return {variable["name"]: variable.get("value") for variable in self.container(name)["env"]}


def replicated(jobset):
    return jobset["spec"]["replicatedJobs"]


@pytest.fixture(scope="session")
def render(tmp_path_factory):
    """render(deployment, chart): its manifests as the command line writes them."""

    def render(deployment, chart=main.JOB):
        files = main.write(deployment, tmp_path_factory.mktemp("manifests") / "out", chart=chart)
        documents = [
            document for file in files for document in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader)
        ]
        return Manifests(deployment, documents)

    return render


@pytest.fixture(scope="session")
def shipped(render):
    """shipped(name, chart): manifests of deployments/<name>.yaml, rendered once."""
    rendered = {}

    def shipped(name, chart=main.JOB):
        if (name, chart) not in rendered:
            rendered[name, chart] = render(load(ROOT / "deployments" / f"{name}.yaml"), chart)
        return rendered[name, chart]

    return shipped


@pytest.fixture(scope="session")
def changed():
    """changed(name, job={...}, train={...}): a shipped deployment with other settings, checked as if from a file."""

    def changed(name, *, cluster=True, job=None, train=None):
        document = yaml.safe_load((ROOT / "deployments" / f"{name}.yaml").read_text())
        document["job"] |= job or {}
        document["train"] |= train or {}
        if not cluster:
            document.pop("cluster", None)
        return DeploymentConfig.model_validate({"name": name, **document})

    return changed


@pytest.fixture(params=[path.stem for path in DEPLOYMENTS])
def manifests(request, shipped):
    """Each shipped deployment's manifests in turn."""
    return shipped(request.param)
