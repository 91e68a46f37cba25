"""One rendered deployment of 2 nodes and 1 spare, and one without a spare, with a corpus in place."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.integration.manifest_cluster import REPOSITORY, ManifestCluster, render
from training import prepare_data

INTERVAL = 4


def write_deployment(
    path: Path, *, spare_count: int, max_restarts: int, max_no_progress_cycles: int, total_steps: int
) -> Path:
    """deployments/local.yaml with small steps."""
    document = yaml.safe_load((REPOSITORY / "deployments" / "local.yaml").read_text())
    document["job"]["spare_count"] = spare_count
    train = document["train"]
    train |= {"total_steps": total_steps, "seq_len": 32, "micro_batch_size": 1, "global_batch_size": 2}
    train["schedule"]["warmup_steps"] = 1
    train["checkpoint"]["interval_steps"] = INTERVAL
    train["restarts"]["in_job"] |= {"max_restarts": max_restarts, "max_no_progress_cycles": max_no_progress_cycles}
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """What data.path holds."""
    folder = tmp_path_factory.mktemp("corpus")
    source, out = folder / "text", folder / "corpus"
    source.mkdir()
    shutil.copy(REPOSITORY / "drills" / "goodput.py", source)
    prepare_data.prepare(source, "*.py", out, tokenizer="bytes")
    return out


@pytest.fixture
def cluster(tmp_path, corpus):
    """cluster(...): the pods of a deployment's rendered manifests, started and ended by a `with` block."""

    def make(
        *, spare_count: int = 1, max_restarts: int = 20, max_no_progress_cycles: int = 20, total_steps: int = 100_000
    ) -> ManifestCluster:
        deployment = write_deployment(
            tmp_path / "small.yaml",
            spare_count=spare_count,
            max_restarts=max_restarts,
            max_no_progress_cycles=max_no_progress_cycles,
            total_steps=total_steps,  # by default so many that the test decides when it is over
        )
        made = ManifestCluster(render(deployment, tmp_path / "manifests"), tmp_path / "cluster")
        train = yaml.safe_load(deployment.read_text())["train"]
        place = made.fsx / train["data"]["path"].removeprefix("/fsx/")
        place.parent.mkdir(parents=True)
        place.symlink_to(corpus)
        return made

    return make
