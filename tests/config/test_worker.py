"""What a worker asks of its node, and what does not fit."""

from pathlib import Path

import pytest
import yaml

from config.deployment import DeploymentConfig, load
from config.instances import INSTANCE_TYPES
from config.worker import staging_gib, worker_resources
from training.config import MODEL_PRESETS

ROOT = Path(__file__).resolve().parents[2]


def deployment(*, local=None, **job):
    document = yaml.safe_load((ROOT / "deployments" / "p5-2node.yaml").read_text())
    del document["cluster"]
    document["job"] |= job
    document["train"]["global_batch_size"] = 16 * 8 * 9
    if local is not None:
        document["train"]["checkpoint"]["local"] = {"interval_steps": 10, "replicas": 0, **local}
    return DeploymentConfig.model_validate({"name": "p5-2node", **document})


@pytest.mark.parametrize("name", INSTANCE_TYPES)
def test_a_worker_leaves_room_on_its_node(name):
    instance = INSTANCE_TYPES[name]
    found = deployment(instance_type=name, node_count=16, spare_count=0)
    worker = worker_resources(found.job, found.train)
    assert worker.cpu < instance.vcpu_count
    memory_mib = worker.memory_gib * 1024 + worker.huge_pages_mib
    assert memory_mib < instance.memory_mib * 0.9
    assert worker.shm_gib <= worker.memory_gib // 2
    assert worker.nvme_gib * 2**30 < instance.nvme_gb * 1e9
    assert (worker.gpu_count, worker.efa_count) == (instance.gpu_count, instance.efa_count)


def test_staging_shrinks_with_the_number_of_nodes():
    sizes = [staging_gib(found.job, found.train) for found in (deployment(node_count=n) for n in (2, 4, 8))]
    assert sizes == [98, 53, 31]


@pytest.mark.parametrize("shm_gib", [897, 1792, 5000])
def test_shared_memory_above_half_of_the_limit_is_refused(shm_gib):
    assert deployment(shm_gib=896)
    with pytest.raises(ValueError, match=rf"job.shm_gib {shm_gib}: .* memory limit of 1792 GiB.*; lower it"):
        deployment(shm_gib=shm_gib)


def test_a_model_whose_checkpoint_can_not_be_staged_is_refused():
    with pytest.raises(ValueError, match=r"job.shm_gib \d+ \(computed from the model\): .*raise job.node_count"):
        deployment(instance_type="p5.4xlarge", node_count=1, spare_count=0)


def test_half_the_grace_period_is_refused_at_load(tmp_path):
    document = yaml.safe_load((ROOT / "deployments" / "local.yaml").read_text())
    document["job"]["termination_grace_period_seconds"] = 5
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="termination_grace_period_seconds 5 must be above") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_text_to_tokenize_lies_on_the_shared_volume():
    with pytest.raises(ValueError, match="input_directory /data/raw must lie under /fsx"):
        deployment(prepare_data={"input_directory": "/data/raw"})


# Local copies of checkpoints


@pytest.mark.parametrize("directory", ["/local", "/fsx/copies", "/tmp/copies", "/local-disk/copies", "relative"])
def test_local_copies_lie_where_a_worker_may_write(directory):
    assert deployment(local={"directory": "/local/llama-8b"})
    with pytest.raises(ValueError, match=f"checkpoint.local.directory {directory} must lie under /dev/shm or /local"):
        deployment(local={"directory": directory})


def test_local_copies_in_memory_are_charged_to_it():
    found = deployment(local={"directory": "/dev/shm/llama-8b"})
    # 45 GiB of state on each node: two staged and two copies, and 8 GiB of queues.
    assert worker_resources(found.job, found.train).shm_gib == 188
    on_disk = deployment(local={"directory": "/local/llama-8b"})
    assert worker_resources(on_disk.job, on_disk.train).shm_gib == 98


def test_local_copies_that_do_not_fit_the_disk_are_refused():
    document = yaml.safe_load((ROOT / "deployments" / "p5-2node.yaml").read_text())
    document["job"]["shm_gib"] = 800
    document["train"]["model"] = MODEL_PRESETS["llama-3.1-8b"].model_dump() | {"num_hidden_layers": 8000}
    document["train"]["checkpoint"]["local"] = {"directory": "/local/x", "interval_steps": 10, "replicas": 0}
    with pytest.raises(
        ValueError, match=r"two saves of a node with 0 copies .* GiB, /local has 14156; raise job.node_"
    ):
        DeploymentConfig.model_validate({"name": "p5-2node", **document})
